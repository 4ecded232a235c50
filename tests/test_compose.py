"""Exact keys and rows around a base, and the policy that chooses among all constructions."""

import numpy as np
import pytest
from generated import Head, build, heads, is_proved
from hypothesis import given, settings
from hypothesis import strategies as st

import rankcert
from rankcert.checker import check_rows
from rankcert.constructions import METHODS
from rankcert.constructions.compose import Compose, Split, compose, rest_problem
from rankcert.constructions.exact import Exact
from rankcert.constructions.minimax import Minimax
from rankcert.problem import AttentionProblem


def sink_head(n: int = 120, d: int = 2, hot: int = 1, **options) -> Head:
    """A key every row looks at, another that many do, and hot rows."""
    rng = np.random.default_rng(d)
    q, k = rng.normal(size=(n, d)), 0.3 * rng.normal(size=(n, d))
    q[:, 0] += 3.0
    k[0], k[0, 0], k[7, 0] = 0.0, 6.0, 4.0
    q[5 : 5 + hot] *= 4.0
    return Head(q, k, {"scale": 0.5} | options)


@settings(max_examples=80)
@given(heads(rows=12, columns=12, size=2.0), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.2, 0.6]))
def test_composition_of_exact_parts_is_exact(head, seed, share):
    """C7 with B' = P': any exact keys, any exact rows, biases, masks, causal offsets."""
    rng = np.random.default_rng(seed)
    problem = head.problem()
    kept = np.flatnonzero(problem.inputs.kept_keys)
    split = Split(kept[rng.random(kept.size) < share], np.flatnonzero(rng.random(problem.n) < share))
    rest = rest_problem(problem, split)
    if rest is None:
        ordinary = np.setdiff1d(np.arange(problem.n), split.rows)
        counted = head.kept[:, np.setdiff1d(np.arange(problem.m), split.keys)]
        assert not ordinary.size or not counted[ordinary].any()
        return
    plan = Exact().plan(rest.problem, 0.1, memory=2**28)
    base = Exact().build(rest.problem, plan, 0.1)
    factors = compose(problem, split, rest, base)
    assert factors.rank == split.rank + base.rank
    assert head.error(factors.left, factors.right) <= 1e-12
    shares = np.where(head.kept, head.attention, 0.0)
    shares[:, split.keys] = 0.0
    ordinary = np.setdiff1d(np.arange(rest.first, problem.n), split.rows)
    np.testing.assert_allclose(rest.share[ordinary - rest.first], shares.sum(axis=1)[ordinary], rtol=1e-9)


@settings(max_examples=40)
@given(heads(rows=12, columns=12, size=1.5), st.integers(0, 2**32 - 1), st.sampled_from([0.5, 0.1]))
def test_error_is_at_most_share_times_that_of_the_base(head, seed, eps):
    rng = np.random.default_rng(seed)
    problem = head.problem()
    kept = np.flatnonzero(problem.inputs.kept_keys)
    split = Split(kept[rng.random(kept.size) < 0.2], np.flatnonzero(rng.random(problem.n) < 0.2))
    rest = rest_problem(problem, split)
    if rest is None:
        return
    plan = Minimax().plan(rest.problem, eps, memory=2**28)
    if plan.refusal:
        return
    factors = compose(problem, split, rest, Minimax().build(rest.problem, plan, eps))
    assert factors.error_est <= eps and is_proved(problem, factors, eps)
    assert head.error(factors.left, factors.right) <= factors.error_est * (1 + 1e-9) + 1e-11


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, hot", [(2, 1), (3, 3)])
def test_sinks_and_hot_rows_are_taken_out(causal, d, hot):
    head = sink_head(d=d, hot=hot, causal=causal)
    problem, plan, factors = build(METHODS["compose"], head, 0.1)
    alone = Minimax().plan(problem, 0.1, memory=2**28).rank
    assert plan.rank == factors.rank < alone / 4
    assert 1 <= plan.details["exact_keys"] <= 6 and plan.details["exact_rows"] <= hot + 8
    assert {0, 7} <= set(plan.state.split.keys)
    assert head.error(factors.left, factors.right) <= factors.error_est <= 0.1
    assert is_proved(problem, factors, 0.1)


def test_the_share_of_the_rest_loosens_its_tolerance():
    head = sink_head(hot=0)
    head.k[0, 0] = 9.0  # nearly all weight
    plan = METHODS["compose"].plan(head.problem(), 0.1, memory=2**28)
    assert plan.state.eps > 0.1 and plan.state.eps == pytest.approx(
        min(0.1 / plan.state.rest.share.max(), 0.99)
    )


def test_all_keys_exact_leaves_no_rest():
    problem = sink_head(n=10).problem()
    none = np.empty(0, dtype=np.int64)
    assert rest_problem(problem, Split(np.arange(10), none)) is None
    assert rest_problem(problem, Split(none, np.arange(10))) is None


def test_early_causal_rows_that_only_see_exact_keys_are_left_off():
    head = sink_head(n=10, causal=True)
    rest = rest_problem(head.problem(), Split(np.array([0, 1, 4]), np.empty(0, dtype=np.int64)))
    assert rest.first == 2 and rest.problem.n == 8 and rest.problem.inputs.offset == 2


@pytest.mark.parametrize("n, m, d", [(1, 6, 2), (6, 1, 2), (1, 1, 1), (5, 6, 1)])
def test_edge_shapes(n, m, d):
    rng = np.random.default_rng(0)
    head = Head(3 * rng.normal(size=(n, d)), 3 * rng.normal(size=(m, d)), {"scale": 1.0})
    plan = METHODS["compose"].plan(head.problem(), 0.2, memory=2**28)
    if plan.refusal is None:
        problem, plan, factors = build(METHODS["compose"], head, 0.2)
        assert plan.rank <= min(n, m) and is_proved(problem, factors, 0.2)
    else:
        assert "no small set of exact keys" in plan.refusal


def test_refusals():
    equal = Head(np.random.default_rng(0).normal(size=(7, 3)), np.ones((9, 3)), {})
    assert "no small set of exact keys" in METHODS["compose"].plan(equal.problem(), 0.1, memory=2**28).refusal
    head = sink_head()
    assert METHODS["compose"].plan(head.problem(), 0.1, memory=2**9).refusal
    assert "below the rounding" in METHODS["compose"].plan(head.problem(), 1e-15, memory=2**28).refusal


def test_method_is_registered():
    assert isinstance(METHODS["compose"], Compose)


# which constructions are tried, and in which order


def by_method(certificate) -> dict:
    assert len({c.method for c in certificate.candidates}) == len(certificate.candidates)
    return {c.method: c for c in certificate.candidates}


def test_every_method_is_accounted_for():
    head = sink_head()
    certificate = rankcert.certify(head.q, head.k, eps=0.1, **head.options)
    found = by_method(certificate)
    assert set(found) == set(METHODS)
    proved = [c.rank for c in found.values() if c.status == "proved"]
    assert certificate.rank == min(proved) and certificate.method in found
    for candidate in found.values():
        assert candidate.note or candidate.status == "proved"


def test_auto_is_never_worse_than_the_svd_on_small_heads():
    for head in (sink_head(), sink_head(causal=True), sink_head(d=4, hot=3)):
        certificate = rankcert.certify(head.q, head.k, eps=0.1, **head.options)
        svd = rankcert.certify(head.q, head.k, eps=0.1, method="svd", **head.options)
        assert certificate.rank <= svd.rank


def test_large_flat_heads_are_spared_the_dense_decomposition():
    points = np.random.default_rng(0).normal(size=(2, 1100, 2))
    q, k = (x / np.linalg.norm(x, axis=2, keepdims=True) for x in points[:, None])
    certificate = rankcert.certify(q[0], k[0], eps=0.1, scale=2.0, effort="max")
    found = by_method(certificate)
    assert found["svd"].status == "skipped" and "recompress starts from" in found["svd"].note
    assert certificate.rank <= 8


def test_nothing_is_planned_once_rank_one_is_proved():
    certificate = rankcert.certify(np.ones((30, 2)), np.ones((40, 2)), eps=0.1)
    found = by_method(certificate)
    assert certificate.rank == 1 and certificate.method == "exact" and set(found) == set(METHODS)
    assert all("no smaller rank than the 1" in c.note for c in found.values() if c.method != "exact")


@pytest.mark.parametrize(
    "name", ["taylor", "minimax", "anisotropic", "chebyshev", "harmonic", "cells", "pivots", "recompress", "svd"]
)
def test_every_construction_composes_with_exact_keys_and_rows(name):
    rng = np.random.default_rng(0)
    points = rng.normal(size=(2, 200, 2))
    q, k = points / np.linalg.norm(points, axis=2, keepdims=True)
    k[0] *= 12  # an attention sink
    q[3] *= 9  # a hot row
    problem = AttentionProblem(q, k, scale=1.0)
    composed = Compose((METHODS[name],))
    plan = composed.plan(problem, 0.1, memory=2**30)
    assert plan.refusal is None and plan.details["base"] == name
    assert plan.details["exact_keys"] >= 1
    factors = composed.build(problem, plan, 0.1)
    assert factors.rank == plan.rank <= 20
    assert check_rows(problem.inputs, factors.left, factors.right, eps=0.1).status == "PROVED"
