"""Kernel pivots: the power-function bound with exact and own normaliser, and features without n x m work."""

import numpy as np
import pytest
from generated import Head, build, heads, is_proved
from hypothesis import given, settings
from hypothesis import strategies as st

import rankcert
from rankcert.constructions import METHODS, pivots
from rankcert.constructions.pivots import Pivots, pivot_features


@settings(max_examples=50)
@given(heads(rows=20, columns=20, size=1.5), st.sampled_from([0.7, 0.1, 1e-3]))
def test_law(head, eps):
    construction = Pivots()
    plan = construction.plan(head.problem(), eps, memory=2**28)
    if plan.refusal:
        assert "e^" in plan.refusal
        return
    problem, plan, factors = build(construction, head, eps)
    assert factors.rank <= min(problem.n, problem.m)
    assert factors.error_est == pytest.approx(head.error(factors.left, factors.right), abs=1e-12)
    if factors.details["power_est"] <= eps:  # else every pivot there may be was not enough
        assert factors.error_est <= eps and is_proved(problem, factors, eps)


@pytest.mark.parametrize("beta, d", [(2.0, 2), (8.0, 2), (2.0, 4)])
def test_power_function_bounds_every_row(beta, d):
    """C5 before the prefix is cut: all pivots, against the dense matrix."""
    rng = np.random.default_rng(d)
    head = Head(
        *(x / np.linalg.norm(x, axis=1)[:, None] for x in rng.normal(size=(2, 150, d))), {"scale": beta}
    )
    problem = head.problem()
    queries, keys, limit = Pivots().plan(problem, 0.1, memory=2**28).state
    left, right, estimate = pivots._factor(queries, keys, 0.1, limit, own=False)
    assert head.error(left, right) <= estimate <= 0.1
    factors = build(Pivots(), head, 0.1)[2]
    assert factors.rank <= left.shape[1] and is_proved(problem, factors, 0.1)


@pytest.mark.parametrize("beta, d, bias", [(2.0, 2, False), (1.5, 3, True), (1.0, 4, True), (0.0, 2, False)])
def test_features_with_their_own_normaliser(beta, d, bias):
    rng = np.random.default_rng(3)
    q, k = rng.normal(size=(300, d)) / 2 + 1.0, rng.normal(size=(400, d)) / 2 - 3.0
    options = {"scale": beta}
    if bias:
        options["key_bias"] = np.where(rng.random(400) < 0.2, -np.inf, rng.normal(size=400))
    features = pivot_features(q, k, eps=0.05, **options)
    verdict = rankcert.audit(q, k, features.left, features.right, **options)
    assert verdict.bound <= features.bound_est + 1e-11 and features.bound_est <= 0.05
    np.testing.assert_allclose(features.left @ features.right.sum(axis=0), 1.0, rtol=1e-9)
    if bias:
        assert not features.right[np.isneginf(options["key_bias"])].any()


def test_sample_grows_by_the_worst(monkeypatch):
    """Few points sampled, and clusters the sample does not see: the estimate still covers all points."""
    monkeypatch.setattr(pivots, "SAMPLE", 40)
    monkeypatch.setattr(pivots, "WORST", 16)
    rng = np.random.default_rng(4)
    q, k = rng.normal(size=(2, 600, 2)) / 2
    k[301:306] += 2.0
    features = pivot_features(q, k, eps=0.05, scale=1.0)
    assert rankcert.audit(q, k, features.left, features.right, scale=1.0).bound <= features.bound_est <= 0.05


def test_time_and_memory_have_no_square():
    """200 000 tokens: an array of pairs would need 80 GB."""
    rng = np.random.default_rng(5)
    q, k = rng.normal(size=(2, 100_000, 4)) / 4
    features = pivot_features(q, k, eps=0.1, scale=1.0)
    assert features.left.shape[0] == 100_000 and features.rank < 100 and features.bound_est <= 0.1
    rows = rng.integers(100_000, size=20)
    logits = q[rows] @ k.T
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.abs(p - features.left[rows] @ features.right.T).sum(axis=1).max() <= features.bound_est


@pytest.mark.parametrize("n, m, d", [(1, 6, 2), (6, 1, 2), (1, 1, 1), (5, 6, 1)])
def test_edge_shapes(n, m, d):
    rng = np.random.default_rng(0)
    head = Head(rng.normal(size=(n, d)), rng.normal(size=(m, d)), {})
    problem, _, factors = build(Pivots(), head, 0.2)
    assert factors.rank <= min(n, m) and is_proved(problem, factors, 0.2)
    features = pivot_features(head.q, head.k, eps=0.2)
    assert rankcert.audit(head.q, head.k, features.left, features.right).bound <= 0.2 + 1e-12


def test_equal_keys_need_one_pivot():
    head = Head(np.random.default_rng(0).normal(size=(7, 3)), np.ones((9, 3)), {})
    assert build(Pivots(), head, 1e-6)[2].rank == 1


def test_no_queries():
    features = pivot_features(np.empty((0, 2)), np.ones((3, 2)), eps=0.1)
    assert features.rank == 0 and features.bound_est == 0.0


def test_refusals():
    rng = np.random.default_rng(0)
    plan = Pivots().plan(
        Head(rng.normal(size=(30, 9)), rng.normal(size=(30, 9)), {}).problem(), 0.1, memory=2**28
    )
    assert plan.rank is None and "9 visible dimensions; beyond 8" in plan.refusal
    head = Head(rng.normal(size=(30, 2)), rng.normal(size=(30, 2)), {})
    assert Pivots().plan(head.problem(), 0.1, memory=2**10).refusal.startswith("needs")
    assert "below the rounding" in Pivots().plan(head.problem(), 1e-15, memory=2**28).refusal
    far = Head(20 * head.q, 20 * head.k, {"scale": 1.0})
    assert "row factors would reach e^" in Pivots().plan(far.problem(), 0.1, memory=2**28).refusal
    with pytest.raises(rankcert.CannotCertify, match="row factors would reach e"):
        pivot_features(far.q, far.k, eps=0.1, scale=1.0)
    with pytest.raises(rankcert.CannotCertify, match="3 pivots leave an error estimate of"):
        pivot_features(head.q, head.k, eps=0.1, scale=1.0, largest_rank=3)


def test_method_is_registered():
    assert isinstance(METHODS["pivots"], Pivots)
