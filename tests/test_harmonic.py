"""Harmonics, zonal approximations, and the construction made of them."""

from itertools import pairwise

import numpy as np
import pytest
from generated import Head, build, heads, is_proved
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import eval_chebyt, eval_gegenbauer, roots_chebyt, roots_gegenbauer

from rankcert.constructions.harmonic import (
    Harmonic,
    canonical_points,
    count_harmonics,
    evaluate_zonal,
    harmonics,
    orthonormal_gegenbauer,
    series_terms,
    tail_upper,
)

MEMORY = 2**28


def unit(rng, n, sides):
    x = rng.normal(size=(n, sides))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def on_sphere(n, sides, seed=0):
    """Evenly spread for sides 2 and 3."""
    if sides == 2:
        angle = 2 * np.pi * np.arange(n) / n
        return np.column_stack([np.cos(angle), np.sin(angle)])
    if sides == 3:
        height, angle = 1 - (2 * np.arange(n) + 1) / n, np.pi * (1 + 5**0.5) * np.arange(n)
        flat = np.sqrt(1 - height**2)
        return np.column_stack([flat * np.cos(angle), flat * np.sin(angle), height])
    return unit(np.random.default_rng(seed), n, sides)


def zonal(t, degree, sides):
    """N_l C_l(t) / C_l(1), from SciPy."""
    if sides == 2:
        return (2 if degree else 1) * eval_chebyt(degree, t)
    nu = sides / 2 - 1
    return (degree + nu) / nu * eval_gegenbauer(degree, nu, t)


@pytest.mark.parametrize("sides", [2, 3, 4, 5, 7])
def test_addition_theorem(sides):
    """Lemma H2, against SciPy's Gegenbauer polynomials: columns of one degree add up to the zonal function."""
    rng = np.random.default_rng(sides)
    degree = 12 if sides < 5 else 6
    x, y = unit(rng, 20, sides), unit(rng, 30, sides)
    left, right = harmonics(x, degree), harmonics(y, degree)
    stop = 0
    for L in range(degree + 1):
        start, stop = stop, count_harmonics(sides, L)
        want = zonal(np.clip(x @ y.T, -1, 1), L, sides)
        np.testing.assert_allclose(left[:, start:stop] @ right[:, start:stop].T, want, atol=1e-10)
    assert left.shape == (20, stop)


@pytest.mark.parametrize("sides", [2, 3, 4])
def test_lifted_basis_serves_the_plane_of_the_queries(sides):
    rng = np.random.default_rng(sides)
    x, y = unit(rng, 9, sides), unit(rng, 11, sides)
    x[:, -1] = 0.0
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    full = harmonics(x, 7) @ harmonics(y, 7).T
    np.testing.assert_allclose(harmonics(x, 7, even=True) @ harmonics(y, 7, even=True).T, full, atol=1e-11)


def test_harmonics_stay_accurate_at_high_degree():
    """sum over all of Y^2 is their number, everywhere on the sphere, the poles of the nesting included."""
    points = np.vstack([np.eye(4), unit(np.random.default_rng(0), 20, 4)])
    squares = (harmonics(points, 30) ** 2).sum(axis=1)
    np.testing.assert_allclose(squares, count_harmonics(4, 30), rtol=1e-10)


def test_counts():
    """Lemma H1: 2L + 1, (L + 1)^2, (L + 1)(L + 2)(2L + 3) / 6."""
    for L in range(8):
        assert count_harmonics(2, L) == 2 * L + 1
        assert count_harmonics(3, L) == (L + 1) ** 2
        assert count_harmonics(4, L) == (L + 1) * (L + 2) * (2 * L + 3) // 6
        assert harmonics(np.eye(4), L).shape[1] == count_harmonics(4, L)


@pytest.mark.parametrize("nu", [0.0, 0.5, 1.0, 3.5])
def test_orthonormal_polynomials(nu):
    t, weights = roots_gegenbauer(40, nu) if nu else roots_chebyt(40)
    values = orthonormal_gegenbauer(t, 20, nu)
    np.testing.assert_allclose((values * weights / weights.sum()) @ values.T, np.eye(21), atol=1e-11)
    coefficients = np.random.default_rng(0).normal(size=(21, 3))
    got = evaluate_zonal(np.tile(t, (3, 1)), coefficients, nu)
    np.testing.assert_allclose(got, coefficients.T @ values, atol=1e-9)


@settings(max_examples=60)
@given(st.integers(2, 9), st.floats(1e-3, 400.0), st.integers(0, 60))
def test_tail_bounds_the_remainder(sides, z, degree):
    """Lemma H3: |e^(z (t - 1)) - its series to this degree| <= tail, with equality at t = 1."""
    t = np.concatenate([[1.0, -1.0], np.cos(np.linspace(0, np.pi, 31))])
    terms = series_terms(np.array([z]), degree, sides)[:, 0]
    series = sum(terms[L] * zonal(t, L, sides) / zonal(1.0, L, sides) for L in range(degree + 1))
    remainder = np.exp(z * (t - 1)) - series
    tail = tail_upper(np.array([z]), degree, sides)[0]
    assert np.abs(remainder).max() <= tail * (1 + 1e-9) + 1e-11
    assert remainder[0] == pytest.approx(tail, rel=1e-6, abs=1e-11)


@pytest.mark.parametrize("z", [1e-250, 1e-8, 3.0, 2000.0])
def test_series_terms_are_positive_and_add_up_to_one(z):
    terms = series_terms(np.array([z]), 900, 5)
    assert (terms >= 0).all() and terms.sum() == pytest.approx(1.0, rel=1e-11)


@pytest.mark.parametrize("sides", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("degree", [0, 1, 4, 9])
def test_canonical_points_alternate_orthogonally(sides, degree):
    """Lemma H4, by quadrature: signs alternating at the points are orthogonal to t^0 .. t^degree."""
    points = canonical_points(degree, sides)
    assert points.size == degree + 1 and (np.diff(points) > 0).all() and np.abs(points).max() < 1
    angles = np.concatenate([[0.0], np.arccos(points[::-1]), [np.pi]])
    for power in range(degree + 1):
        pieces = [
            quad(lambda a, p=power: np.cos(a) ** p * np.sin(a) ** (sides - 2), low, high, epsabs=1e-13)[0]
            for low, high in pairwise(angles)
        ]
        assert abs(sum((-1) ** i * piece for i, piece in enumerate(pieces))) < 1e-11


def relative_error(kind, z, degree, sides):
    """l1 error of an approximation of e^(z (t - 1)) in the sphere's measure, by quadrature, over the integral."""
    angle = (np.arange(20_000) + 0.5) * np.pi / 20_000
    t, weights = np.cos(angle), np.sin(angle) ** (sides - 2)
    if kind == "series":
        terms = series_terms(np.array([z]), degree, sides)[:, 0]
        fitted = sum(terms[L] * zonal(t, L, sides) / zonal(1.0, L, sides) for L in range(degree + 1))
    else:
        points = canonical_points(degree, sides)
        values = orthonormal_gegenbauer(points, degree, sides / 2 - 1)
        coefficients = np.linalg.solve(values.T, np.exp(z * (points - 1)))
        fitted = coefficients @ orthonormal_gegenbauer(t, degree, sides / 2 - 1)
    exact = np.exp(z * (t - 1))
    return (weights * np.abs(fitted - exact)).sum() / (weights * exact).sum()


@pytest.mark.parametrize("sides, degree, rank", [(2, 18, 37), (3, 21, 484), (4, 22, 4324)])
def test_ranks_of_the_uniform_sphere_at_64(sides, degree, rank):
    """The best polynomials in l1; one degree less is not enough, and the truncated series is worse."""
    errors = [relative_error("interpolated", 64.0, L, sides) for L in (degree - 1, degree)]
    assert errors[1] <= 0.1 < errors[0] and count_harmonics(sides, degree) == rank
    assert relative_error("series", 64.0, degree, sides) > errors[1]


@pytest.mark.parametrize("sides, rank", [(2, 37), (3, 484)])
def test_keys_spread_over_a_sphere(sides, rank):
    k = on_sphere(1200, sides)
    problem, plan, factors = build(Harmonic(), Head(k, k, {"scale": 64.0}), 0.1)
    assert factors.rank == rank and plan.details["support"] == "sphere"
    assert is_proved(problem, factors, 0.1)


def test_keys_on_an_ellipsoid_with_queries_of_any_length():
    """A gauge makes it a sphere (Lemma H5); queries of lengths 0 to 3, one of them zero."""
    rng = np.random.default_rng(3)
    turn = rng.normal(size=(3, 3))
    k = on_sphere(700, 3) @ turn + rng.normal(size=3)
    q = rng.normal(size=(200, 3))
    q[0] = 0.0
    head = Head(q, k, {"scale": 1.5})
    problem, plan, factors = build(Harmonic(), head, 0.05)
    assert plan.details["support"] == "sphere" and plan.rank < 150
    assert head.error(factors.left, factors.right) == pytest.approx(factors.error_est, rel=1e-6)
    assert is_proved(problem, factors, 0.05)


def test_few_bad_rows_are_taken_exactly():
    """Three queries much longer than the others cost three columns, not several degrees."""
    k = on_sphere(600, 3)
    q = k[::3].copy()
    q[[5, 50, 111]] *= 8.0
    problem, plan, factors = build(Harmonic(), Head(q, k, {"scale": 6.0}), 0.1)
    ordinary = Harmonic().plan(Head(k[::3], k, {"scale": 6.0}).problem(), 0.1, memory=MEMORY)
    assert plan.details["exact_rows"] == 3 and plan.rank == ordinary.rank + 3
    assert is_proved(problem, factors, 0.1)


def test_biases_and_masks_on_a_sphere():
    rng = np.random.default_rng(4)
    k = on_sphere(500, 3)
    bias = rng.normal(size=500)
    bias[::7] = -np.inf
    options = {"scale": 5.0, "key_bias": bias, "causal": True, "offset": 300}
    head = Head(unit(rng, 250, 3), k, options)
    problem, plan, factors = build(Harmonic(), head, 0.1)
    assert plan.details["support"] == "sphere" and plan.rank < 200
    assert (factors.right[::7] == 0).all() and is_proved(problem, factors, 0.1)


@pytest.mark.parametrize("dimension, most", [(1, 9), (2, 66), (3, 300)])
def test_gaussian_rows_of_a_ball(dimension, most):
    """The biases of THEORY's Gaussian rows are no obstacle, as projected rows do not carry them."""
    rng = np.random.default_rng(dimension)
    k = rng.uniform(-0.5, 0.5, size=(3000, dimension))
    k = k[(k**2).sum(axis=1) <= 0.25][:900]
    head = Head(k, k, {"scale": 64.0, "key_bias": -32.0 * (k**2).sum(axis=1)})
    problem, plan, factors = build(Harmonic(), head, 0.1)
    assert plan.details["support"] == "ball" and plan.rank <= most
    assert head.error(factors.left, factors.right) <= factors.error_est * (1 + 1e-6)
    assert is_proved(problem, factors, 0.1)


def test_a_plane_inside_many_dimensions():
    rng = np.random.default_rng(5)
    points = rng.uniform(-1, 1, size=(600, 2))
    frame = np.linalg.qr(rng.normal(size=(40, 2)))[0]
    head = Head(points @ frame.T, points @ frame.T + rng.normal(size=40), {"scale": 8.0})
    problem, plan, factors = build(Harmonic(), head, 0.1)
    assert plan.details["dimension"] == 2 and plan.rank < 100 and is_proved(problem, factors, 0.1)


@settings(max_examples=50)
@given(heads(), st.sampled_from([0.5, 0.1, 1e-3]))
def test_whatever_is_built_is_proved(head, eps):
    problem = head.problem()
    plan = Harmonic().plan(problem, eps, memory=MEMORY)
    if plan.refusal is None:
        factors = Harmonic().build(problem, plan, eps)
        assert factors.rank == plan.rank <= min(problem.n, problem.m)
        assert head.error(factors.left, factors.right) <= eps
        assert is_proved(problem, factors, eps)


@settings(max_examples=25)
@given(heads(rows=14, columns=14))
def test_smaller_eps_never_gives_smaller_rank(head):
    plans = [Harmonic().plan(head.problem(), eps, memory=MEMORY) for eps in (0.7, 0.3, 0.1, 0.01)]
    ranks = [plan.rank for plan in plans]
    assume(None not in ranks)
    assert ranks == sorted(ranks)


def test_smaller_eps_never_gives_smaller_rank_where_it_pays():
    k = on_sphere(400, 3)
    rng = np.random.default_rng(6)
    ball = rng.uniform(-1, 1, size=(300, 2))
    for head in (Head(k[::2], k, {"scale": 6.0}), Head(ball, ball, {"scale": 4.0})):
        problem = head.problem()
        ranks = [
            Harmonic().plan(problem, eps, memory=MEMORY).rank for eps in (0.5, 0.2, 0.1, 0.05, 0.01, 1e-3)
        ]
        assert ranks == sorted(ranks) and ranks[-1] > ranks[0]


def test_nothing_visible_is_rank_one():
    rng = np.random.default_rng(7)
    head = Head(np.zeros((5, 3)), rng.normal(size=(6, 3)), {"key_bias": rng.normal(size=6)})
    problem, plan, factors = build(Harmonic(), head, 0.01)
    assert plan.rank == 1 and is_proved(problem, factors, 0.01)


def test_what_is_out_of_reach_is_refused_with_a_rank():
    rng = np.random.default_rng(8)
    head = Head(rng.normal(size=(60, 8)), rng.normal(size=(60, 8)), {})
    plan = Harmonic().plan(head.problem(), 0.05, memory=MEMORY)
    assert plan.rank > 60 and plan.refusal == "no degree below 3 is within eps" and plan.state is None
    most = Harmonic(most=4).plan(
        Head(on_sphere(50, 2), on_sphere(50, 2), {"scale": 9.0}).problem(), 0.1, memory=MEMORY
    )
    assert most.rank > 4 and most.refusal


def test_memory_is_refused():
    k = on_sphere(300, 2)
    plan = Harmonic().plan(Head(k, k, {"scale": 9.0}).problem(), 0.1, memory=1000)
    assert plan.rank == 13 and plan.refusal.startswith("needs 0.1 MiB")
    assert Harmonic().plan(Head(k, k, {}).problem(), 1e-18, memory=MEMORY).refusal.startswith("eps = 1e-18")
