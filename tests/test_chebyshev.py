"""The Chebyshev construction."""

import numpy as np
import pytest
from generated import Head, build, heads, is_proved
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rankcert.approximants import chebyshev as series
from rankcert.constructions.chebyshev import Chebyshev
from rankcert.constructions.minimax import Minimax


def circle(beta: float, n: int = 120, m: int = 150, **options) -> Head:
    rng = np.random.default_rng(0)
    q, k = (
        x / np.linalg.norm(x, axis=1)[:, None] for x in (rng.normal(size=(n, 2)), rng.normal(size=(m, 2)))
    )
    return Head(q, k, {"scale": beta, **options})


@settings(max_examples=60)
@given(heads(rows=25, columns=25, width=2), st.sampled_from([0.5, 0.1, 1e-3]))
def test_law(head, eps):
    """The measured error is at most the estimate, the estimate at most eps, and the checker agrees."""
    plan = Chebyshev().plan(head.problem(), eps, memory=2**28)
    assume(plan.refusal is None)
    problem, plan, factors = build(Chebyshev(), head, eps)
    assert factors.error_est <= eps and plan.details["degree"] <= plan.details["series_degree"]
    assert head.error(factors.left, factors.right) <= factors.error_est * (1 + 1e-9) + 1e-11
    assert is_proved(problem, factors, eps)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "offset": 5}, {"key_bias": np.linspace(-2, 2, 150)}]
)
@pytest.mark.parametrize("beta, eps", [(1.0, 1e-3), (4.0, 0.1), (16.0, 0.1), (32.0, 0.5)])
def test_circles_are_proved_below_the_relative_rank(beta, eps, options):
    head = circle(beta, **options)
    problem, _, factors = build(Chebyshev(), head, eps)
    assert head.error(factors.left, factors.right) <= factors.error_est * (1 + 1e-9) + 1e-12
    assert is_proved(problem, factors, eps)
    assert factors.rank <= Minimax().plan(problem, eps, memory=2**30).rank


def test_fitted_coefficients_need_a_smaller_degree_than_the_series():
    _, plan, _ = build(Chebyshev(), circle(32.0, 400, 400), 0.1)
    assert plan.details["degree"] < plan.details["series_degree"]


def test_degree_of_the_series_is_that_of_the_bound():
    """One row, no bias: the least D whose error times sum_j e^M / Z is within eps."""
    k = np.linspace(-1, 1, 40)[:, None]
    head = Head(np.array([[6.0]]).repeat(30, 0) * np.linspace(0.5, 1, 30)[:, None], k, {"scale": 1.0})
    plan = Chebyshev().plan(head.problem(), 0.05, memory=2**28)
    need = []
    for width in 6.0 * np.linspace(0.5, 1, 30):
        total = 40 * np.exp(width) / np.exp(width * k).sum()
        need.append(series.find_degree(width, 0.05 / total))
    assert plan.details["series_degree"] == max(need)


@settings(max_examples=25)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 3]),
    st.floats(1e-4, 0.6),
    st.floats(1e-4, 0.6),
    st.booleans(),
)
def test_smaller_eps_never_has_smaller_rank(seed, d, one, other, causal):
    rng = np.random.default_rng(seed)
    head = Head(2 * rng.normal(size=(60, d)), rng.normal(size=(70, d)), {"causal": causal})
    ranks = [Chebyshev().plan(head.problem(), eps, memory=2**30).rank for eps in sorted((one, other))]
    assert ranks[0] >= ranks[1]


def test_wide_logits_are_built_until_powers_lose_them():
    problem, _, factors = build(Chebyshev(), circle(64.0, 300, 300), 0.1)
    assert is_proved(problem, factors, 0.1) and factors.rank <= 210
    lost = Head(np.linspace(-400, 400, 500)[:, None], np.linspace(0, 1, 500)[:, None] ** 4, {"scale": 1.0})
    plan = Chebyshev().plan(lost.problem(), 1e-3, memory=2**30)
    assert plan.rank > 20 and "lose eps = 0.001 to rounding" in plan.refusal


def test_heads_of_many_dimensions_are_refused_after_a_few_rows():
    rng = np.random.default_rng(0)
    head = Head(rng.normal(size=(200, 16)), rng.normal(size=(200, 16)), {})
    plan = Chebyshev().plan(head.problem(), 0.1, memory=2**30)
    assert plan.rank == 969 and plan.refusal == "its rank would exceed min(n, m) = 200"


def test_memory_and_rounding_are_refused_with_the_amount():
    plan = Chebyshev().plan(circle(4.0).problem(), 0.1, memory=1000)
    assert plan.rank > 0 and plan.refusal.startswith("needs 0.0 MiB")
    assert (
        "below the rounding of float64"
        in Chebyshev().plan(circle(4.0).problem(), 1e-15, memory=2**30).refusal
    )
    growing = Head(np.ones((60, 1)), np.ones((60, 1)), {"causal": True, "key_bias": 20.0 * np.arange(60)})
    assert "row factors would reach e^1180" in Chebyshev().plan(growing.problem(), 0.1, memory=2**30).refusal


def test_one_visible_point_needs_rank_one():
    head = Head(np.ones((4, 3)), np.full((5, 3), 2.0), {"key_bias": np.arange(5.0)})
    _, plan, factors = build(Chebyshev(), head, 1e-6)
    assert plan.rank == 1 and head.error(factors.left, factors.right) <= 1e-14
