"""The Taylor construction."""

import numpy as np
import pytest
from generated import Head, build, check_polynomial, heads
from hypothesis import assume, given
from hypothesis import strategies as st

from rankcert.constructions import METHODS
from rankcert.constructions.taylor import Taylor


@given(heads(), st.sampled_from([0.5, 0.1, 1e-3, 1e-6]))
def test_law(head, eps):
    assume(head.widest <= 8.0)
    check_polynomial(Taylor(), head, eps)


def test_rank_is_counted_before_anything_is_built():
    """Eight dimensions and half-range 4: the sign vectors reach both ends."""
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 8)).reshape(8, -1).T
    plan = Taylor().plan(Head(signs, signs / 2, {"scale": 1.0}).problem(), 0.1, memory=2**30)
    assert plan.rank == 319_770
    assert plan.details == {"dimension": 8, "half_range": pytest.approx(4.0), "degree": 14}
    assert plan.refusal == "needs 1.2 GiB of dense arrays, more than the 1.0 GiB allowed"


def test_rank_is_counted_far_beyond_any_memory():
    rng = np.random.default_rng(0)
    head = Head(100 * rng.normal(size=(80, 32)), rng.normal(size=(90, 32)), {})
    plan = Taylor().plan(head.problem(), 0.1, memory=2**40)
    assert plan.rank > 10**30 and "over 2^" in plan.refusal


def test_degrees_beyond_float64_are_refused():
    head = Head(np.array([[40.0], [1.0]]), np.array([[-1.0], [1.0]]), {"scale": 1.0})
    plan = Taylor().plan(head.problem(), 0.1, memory=2**30)
    assert plan.rank == plan.details["degree"] + 1 > 101 and "beyond 100" in plan.refusal


def test_one_visible_point_needs_rank_one():
    head = Head(np.ones((4, 3)), np.full((5, 3), 2.0), {"key_bias": np.arange(5.0)})
    _, plan, factors = build(Taylor(), head, 1e-6)
    assert plan.rank == 1 and head.error(factors.left, factors.right) <= 1e-14


def test_growing_biases_under_a_mask_are_refused_not_overflown():
    head = Head(np.ones((60, 1)), np.ones((60, 1)), {"causal": True, "key_bias": 20.0 * np.arange(60)})
    plan = Taylor().plan(head.problem(), 0.1, memory=2**30)
    assert plan.rank == 1 and "row factors would reach e^1180" in plan.refusal


def test_eps_below_rounding_is_refused():
    head = Head(np.ones((2, 1)), np.ones((2, 1)), {})
    plan = Taylor().plan(head.problem(), 1e-15, memory=2**30)
    assert plan.rank is None and "below the rounding of float64" in plan.refusal


def test_method_is_registered():
    assert isinstance(METHODS["taylor"], Taylor)
