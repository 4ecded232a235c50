"""The minimax construction."""

import numpy as np
import pytest
from generated import Head, build, check_polynomial, heads, is_proved
from hypothesis import assume, given
from hypothesis import strategies as st

from rankcert.constructions import METHODS
from rankcert.constructions.minimax import Minimax
from rankcert.constructions.taylor import Taylor


@given(heads(), st.sampled_from([0.5, 0.1, 1e-3, 1e-6]))
def test_law(head, eps):
    assume(head.widest <= 8.0)
    check_polynomial(Minimax(), head, eps)


@given(heads(), st.sampled_from([0.5, 0.1, 1e-3]))
def test_rank_is_never_above_taylors(head, eps):
    problem = head.problem()
    plans = [method.plan(problem, eps, memory=2**28) for method in (Minimax(), Taylor())]
    assume(plans[0].rank is not None)
    assert plans[0].rank <= plans[1].rank


def test_rank_of_eight_dimensions_at_half_range_four():
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * 8)).reshape(8, -1).T
    head = Head(signs, signs / 2, {"scale": 1.0})
    problem, plan, factors = build(Minimax(), head, 0.1)
    assert plan.rank == 3003
    assert plan.details == {"dimension": 8, "half_range": pytest.approx(4.0), "degree": 6}
    assert is_proved(problem, factors, 0.1)


def test_a_thin_head_is_certified_far_below_its_size():
    rng = np.random.default_rng(1)
    head = Head(rng.normal(size=(400, 2)) / 2, rng.normal(size=(500, 2)), {})
    problem, _, factors = build(Minimax(), head, 0.01)
    assert factors.rank < 60 and is_proved(problem, factors, 0.01)


def ends(half_width: float) -> Head:
    """Two keys and a query whose logits are +-half_width."""
    return Head(np.array([[half_width], [1.0]]), np.array([[-1.0], [1.0]]), {"scale": 1.0})


def test_wide_rows_are_refused_without_a_rank():
    plan = Minimax().plan(ends(41.0).problem(), 0.1, memory=2**30)
    assert plan.rank is None and plan.refusal.startswith("logit half-range W = 41 is beyond 40")


def test_what_float64_cannot_carry_is_counted_and_refused_with_the_limit():
    plan = Minimax().plan(ends(35.0).problem(), 0.1, memory=2**30)
    assert plan.rank == plan.details["degree"] + 1 == 40
    assert plan.refusal.startswith(
        "logit half-range W = 35 is beyond 32.64, the most float64 coefficients carry"
    )
    build(Minimax(), ends(32.0), 0.1)


@pytest.mark.parametrize("beta", [8.0, 16.0, 24.0])
def test_wide_heads_are_proved(beta):
    rng = np.random.default_rng(0)
    q, k = (x / np.linalg.norm(x, axis=1)[:, None] for x in rng.normal(size=(2, 60, 2)))
    problem, _, factors = build(Minimax(), Head(q, k, {"scale": beta}), 0.1)
    assert is_proved(problem, factors, 0.1)


def test_memory_is_refused_with_the_amount():
    rng = np.random.default_rng(1)
    head = Head(rng.normal(size=(40, 2)), rng.normal(size=(50, 2)), {})
    plan = Minimax().plan(head.problem(), 0.1, memory=1000)
    assert plan.rank > 0 and plan.refusal.startswith("needs 0.0 MiB")


def test_method_is_registered():
    assert isinstance(METHODS["minimax"], Minimax)
