"""Anisotropic Taylor: the sets of largest weight, and the row error C1 promises of them."""

import itertools
import math

import numpy as np
import pytest
from generated import Head, build, heads, is_proved
from hypothesis import given, settings
from hypothesis import strategies as st

from rankcert.constructions import METHODS
from rankcert.constructions.anisotropic import Anisotropic, grow
from rankcert.constructions.levels import read_levels


def weight(alpha, scales) -> float:
    return math.prod(a**n / math.factorial(n) for a, n in zip(scales, alpha, strict=True))


@given(st.lists(st.sampled_from([0.05, 0.4, 1.0, 2.0, 2.5, 4.1]), min_size=1, max_size=2), st.integers(1, 40))
def test_largest_weights_come_first(scales, count):
    found = list(itertools.islice(grow(np.array(scales)), count))
    assert len(set(found)) == count and found[0] == tuple(math.floor(a) for a in scales)
    weights = np.array([weight(alpha, scales) for alpha in found])
    assert (np.diff(weights) <= 1e-12 * weights[:-1]).all()
    largest = 24 if len(scales) > 1 else 80
    box = sorted(
        (weight(a, scales) for a in itertools.product(range(largest), repeat=len(scales))), reverse=True
    )
    np.testing.assert_allclose(weights, box[:count], rtol=1e-12)


@settings(max_examples=60)
@given(heads(rows=24, columns=24, size=0.8), st.sampled_from([0.5, 0.1, 1e-3]))
def test_error_is_within_the_estimate(head, eps):
    construction = Anisotropic()
    plan = construction.plan(head.problem(), eps, memory=2**28)
    if plan.refusal:
        assert (
            "leave an error estimate" in plan.refusal or "beyond 30" in plan.refusal or "e^" in plan.refusal
        )
        return
    problem, plan, factors = build(construction, head, eps)
    assert factors.error_est <= eps
    assert head.error(factors.left, factors.right) <= factors.error_est * (1 + 1e-9) + 1e-11
    assert is_proved(problem, factors, eps)


def test_estimate_is_that_of_c1_and_one_monomial_fewer_misses_eps():
    rng = np.random.default_rng(5)
    head = Head(
        rng.uniform(-1, 1, size=(60, 3)) * [1.0, 0.3, 0.05], rng.uniform(-1, 1, size=(50, 3)), {"scale": 1.0}
    )
    problem, plan, factors = build(Anisotropic(), head, 0.1)
    levels = read_levels(problem)
    x, z = (points - (points.min(axis=0) + points.max(axis=0)) / 2 for points in (levels.query, levels.key))
    weights = np.exp(z @ ((levels.query.min(axis=0) + levels.query.max(axis=0)) / 2))
    chosen, _ = plan.state

    def estimate(count: int) -> float:
        left = np.exp(np.abs(x) @ np.abs(z).T)
        for alpha in chosen[:count]:
            left -= np.outer(
                np.prod(np.abs(x) ** alpha, axis=1), np.prod(np.abs(z) ** alpha, axis=1)
            ) / math.prod(map(math.factorial, alpha.tolist()))
        return float((left @ weights / (np.exp(x @ z.T) @ weights)).max())

    assert estimate(plan.rank) == pytest.approx(factors.error_est, rel=1e-9)
    assert factors.error_est <= 0.1 < estimate(plan.rank - 1)
    assert plan.rank < math.comb(3 + plan.details["largest_degree"], 3)  # flat directions get fewer monomials


def test_flat_heads_need_one_monomial():
    head = Head(np.ones((4, 3)), np.full((5, 3), 2.0), {"key_bias": np.arange(5.0)})
    _, plan, factors = build(Anisotropic(), head, 1e-6)
    assert plan.rank == 1 and head.error(factors.left, factors.right) <= 1e-13


@pytest.mark.parametrize("n, m, d", [(1, 6, 2), (6, 1, 2), (1, 1, 1), (5, 6, 1)])
def test_edge_shapes(n, m, d):
    rng = np.random.default_rng(0)
    head = Head(0.1 * rng.normal(size=(n, d)), rng.normal(size=(m, d)), {})
    problem, plan, factors = build(Anisotropic(), head, 0.2)
    assert plan.rank <= min(n, m) and is_proved(problem, factors, 0.2)


def test_refusals():
    far = Head(np.array([[40.0], [-40.0]]), np.array([[-1.0], [1.0]]), {"scale": 1.0})
    assert (
        "sum |x_l z_l| reaches 40, beyond 30" in Anisotropic().plan(far.problem(), 0.1, memory=2**28).refusal
    )
    head = Head(np.ones((60, 1)), np.ones((60, 1)), {"causal": True, "key_bias": 20.0 * np.arange(60)})
    assert "row factors would reach e^1180" in Anisotropic().plan(head.problem(), 0.1, memory=2**30).refusal
    rng = np.random.default_rng(0)
    wide = Head(2 * rng.normal(size=(30, 8)), rng.normal(size=(30, 8)), {})
    plan = Anisotropic().plan(wide.problem(), 0.1, memory=2**28)
    assert plan.rank is None and plan.refusal.startswith("30 monomials leave an error estimate of")
    small = Head(rng.normal(size=(300, 2)) / 3, rng.normal(size=(300, 2)) / 3, {})
    assert Anisotropic().plan(small.problem(), 0.1, memory=2**10).refusal.startswith("needs")
    assert "below the rounding" in Anisotropic().plan(small.problem(), 1e-15, memory=2**28).refusal


def test_method_is_registered():
    assert isinstance(METHODS["anisotropic"], Anisotropic)
