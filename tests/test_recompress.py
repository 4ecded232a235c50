"""Recompression: never thicker, within eps, and as thin as the truncated SVD where that can be had."""

import numpy as np
import pytest
from generated import Head, build, heads, is_proved
from hypothesis import given, settings
from hypothesis import strategies as st

from rankcert.constructions import METHODS
from rankcert.constructions import recompress as module
from rankcert.constructions.base import Factorization
from rankcert.constructions.exact import Exact
from rankcert.constructions.minimax import Minimax
from rankcert.constructions.pivots import Pivots
from rankcert.constructions.recompress import Recompress, recompress
from rankcert.constructions.svd import TruncatedSVD
from rankcert.heads import example_head


def sphere(n: int, d: int, beta: float, seed: int = 0, **options) -> Head:
    points = np.random.default_rng(seed).normal(size=(2, n, d))
    return Head(*(x / np.linalg.norm(x, axis=1)[:, None] for x in points), {"scale": beta} | options)


@settings(max_examples=60)
@given(heads(rows=16, columns=16, size=3.0), st.sampled_from([0.7, 0.1, 1e-4]))
def test_exact_factors_become_thin(head, eps):
    problem, _, base = build(Exact(), head, eps)
    thin = recompress(base, problem, eps)
    assert thin.rank <= base.rank and thin.left.shape[1] == thin.right.shape[1]
    assert head.error(thin.left, thin.right) <= eps and is_proved(problem, thin, eps)
    assert thin.error_est == pytest.approx(head.error(thin.left, thin.right), abs=1e-11)
    # the first of its truncations is that of P itself
    assert thin.rank <= max(1, build(TruncatedSVD(), head, eps)[2].rank)


@pytest.mark.parametrize("causal", [False, True])
def test_polynomial_becomes_as_thin_as_the_svd(causal):
    head = sphere(120, 3, 4.0, causal=causal)
    problem, plan, base = build(Minimax(), head, 0.025)
    thin = recompress(base, problem, 0.1)
    assert thin.method == "recompress" and thin.details["base_rank"] == plan.rank
    assert thin.rank <= thin.details["truncated"] < plan.rank / 2 and is_proved(problem, thin, 0.1)
    if not causal:
        assert thin.rank <= build(TruncatedSVD(), head, 0.1)[2].rank + 1


@settings(max_examples=25)
@given(heads(rows=12, columns=12), st.integers(1, 14), st.integers(0, 2**32 - 1))
def test_never_worse(head, rank, seed):
    """Whatever the factors: the rank does not grow, and what cannot be improved comes back as it was."""
    rng = np.random.default_rng(seed)
    problem = head.problem()
    base = Factorization(
        rng.normal(size=(problem.n, rank)), rng.normal(size=(problem.m, rank)), "random", {}, 99.0
    )
    thin = recompress(base, problem, 0.3)
    assert thin.rank <= rank
    if head.error(thin.left, thin.right) > 0.3:
        assert thin.left is base.left and thin.right is base.right and thin.error_est == 99.0


def test_rows_of_p_are_recomputed_when_they_are_too_many_to_hold(monkeypatch):
    head = sphere(80, 2, 4.0)
    problem, _, base = build(Minimax(), head, 0.025)
    held = recompress(base, problem, 0.1)
    monkeypatch.setattr(module, "LARGEST_HELD", 100)
    again = recompress(base, problem, 0.1)
    assert again.rank == held.rank and again.error_est == pytest.approx(held.error_est, rel=1e-9)


@pytest.mark.parametrize("name, eps", [("diffuse", 0.5), ("diffuse", 0.1), ("causal", 0.1), ("peaked", 0.5)])
def test_real_heads(name, eps):
    example = example_head(name)
    head = Head(example.q[:128].astype(float), example.k[:128].astype(float), example.options())
    problem, _, factors = build(METHODS["recompress"], head, eps)
    assert factors.rank <= build(TruncatedSVD(), head, eps)[2].rank and is_proved(problem, factors, eps)
    if name == "diffuse":
        assert factors.rank < build(TruncatedSVD(), head, eps)[2].rank  # weights even the rows out


@pytest.mark.parametrize("beta, base", [(0.5, "minimax"), (16.0, "pivots")])
def test_method_stands_on_the_thinnest_base(beta, base):
    head = sphere(150, 2, beta)
    thinner = Recompress((Minimax(),), (Pivots(), TruncatedSVD()))
    problem, plan, factors = build(thinner, head, 0.1)
    assert plan.rank is None and plan.details["base"] == factors.details["base"] == base
    assert is_proved(problem, factors, 0.1)


@pytest.mark.parametrize("n, m, d", [(1, 6, 2), (6, 1, 2), (1, 1, 1), (5, 6, 1)])
def test_edge_shapes(n, m, d):
    rng = np.random.default_rng(0)
    head = Head(rng.normal(size=(n, d)), rng.normal(size=(m, d)), {})
    problem, _, base = build(Exact(), head, 0.2)
    thin = recompress(base, problem, 0.2)
    assert 1 <= thin.rank <= min(n, m) and is_proved(problem, thin, 0.2)


def test_equal_keys():
    head = Head(np.random.default_rng(0).normal(size=(7, 3)), np.ones((9, 3)), {})
    problem, _, base = build(Exact(), head, 1e-6)
    assert recompress(base, problem, 1e-6).rank == 1


def test_refusals():
    wide = np.random.default_rng(0).normal(size=(600, 12))
    problem = Head(wide, wide, {}).problem()
    plan = METHODS["recompress"].plan(problem, 0.1, memory=2**30)
    assert plan.rank is None and plan.refusal.startswith("nothing to recompress")
    head = sphere(100, 2, 2.0)
    assert "below the rounding" in METHODS["recompress"].plan(head.problem(), 1e-14, memory=2**28).refusal
    assert (
        METHODS["recompress"]
        .plan(head.problem(), 0.1, memory=2**14)
        .refusal.startswith(("nothing to", "needs"))
    )


def test_method_is_registered():
    assert isinstance(METHODS["recompress"], Recompress)
