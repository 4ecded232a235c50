"""Univariate approximants of exp: the degrees they need, how close they are, and what they refuse."""

import math
from fractions import Fraction
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankcert.approximants import chebyshev, gegenbauer, minimax, taylor
from rankcert.errors import CannotCertify, InvalidInput

TARGETS = (0.5, 0.1, 0.01, 1e-4)
DEGREES = {  # W: (Taylor, minimax) for each target
    1.0: [(2, 1), (4, 2), (5, 3), (7, 5)],
    2.0: [(6, 2), (7, 3), (9, 5), (11, 7)],
    4.0: [(13, 4), (14, 6), (16, 7), (19, 10)],
    8.0: [(27, 8), (28, 10), (30, 12), (33, 16)],
}
WIDE = {16.0: [16, 18, 21, 26], 24.0: [23, 27, 30, 35], 32.0: [31, 35, 39, 44], 40.0: [39, 43, 47, 53]}
half_widths = st.floats(1e-3, 8.0)
targets = st.floats(1e-5, 0.9)
dims = st.sampled_from([2, 3, 4, 7, 64])


def horner(coefficients, x):
    total = 0
    for c in reversed(coefficients):
        total = total * x + c
    return total


def true_error(polynomial, points: int = 301) -> float:
    """The largest error over a grid at 60 digits: at most the supremum, and within 1e-3 of it."""
    with mpmath.workdps(60):
        half_width, top = mpmath.mpf(polynomial.half_width), polynomial.kind == "absolute"
        coefficients = [mpmath.mpf(c) for c in polynomial.coefficients.tolist()]
        worst = mpmath.mpf(0)
        for i in range(points):
            x = -half_width * mpmath.cos(mpmath.pi * i / (points - 1))
            value = horner(coefficients, x)
            error = value - mpmath.exp(x - half_width) if top else value * mpmath.exp(-x) - 1
            worst = max(worst, abs(error))
        return float(worst)


@pytest.mark.parametrize("half_width", DEGREES)
def test_table_of_degrees(half_width):
    found = [(taylor.find_degree(half_width, t), minimax.find_degree(half_width, t)) for t in TARGETS]
    assert found == DEGREES[half_width]


@pytest.mark.parametrize("half_width", WIDE)
def test_degrees_are_counted_on_wide_intervals(half_width):
    assert [minimax.find_degree(half_width, t) for t in TARGETS] == WIDE[half_width]


def lagrange(half_width: float, degree: int) -> float:
    power = Fraction(half_width) ** (degree + 1) / math.factorial(degree + 1)
    return math.exp(half_width) * float(power)


@given(half_widths, targets)
def test_taylor_degree_is_the_smallest_within_lagranges_bound(half_width, target):
    degree = taylor.find_degree(half_width, target)
    assert lagrange(half_width, degree) <= target * (1 + 1e-12)
    assert degree == 0 or lagrange(half_width, degree - 1) > target * (1 - 1e-12)


@settings(max_examples=20)
@given(half_widths, targets)
def test_taylor_error_is_within_its_estimate(half_width, target):
    polynomial = taylor.fit(half_width, taylor.find_degree(half_width, target))
    assert polynomial.rho_est <= target * (1 + 1e-12)
    noise = 1e-16 * math.exp(2 * half_width)
    assert true_error(polynomial, 51) <= polynomial.rho_est * (1 + 1e-9) + noise


def test_taylor_counts_where_nothing_can_be_built():
    assert taylor.find_degree(0.0, 0.1) == 0
    assert taylor.find_degree(1e6, 0.1) == pytest.approx(3.5911e6, rel=1e-4)  # k log k - k = W + k log W
    with pytest.raises(CannotCertify, match="Taylor degree 101 is beyond 100"):
        taylor.fit(30.0, 101)


@settings(max_examples=30)
@given(half_widths, targets)
def test_minimax_estimate_is_the_error_and_no_smaller_degree_will_do(half_width, target):
    degree = minimax.find_degree(half_width, target)
    polynomial = minimax.fit(half_width, degree)
    noise = minimax.rounding_est(half_width)
    assert polynomial.degree == degree and polynomial.rho_est <= target * (1 + 1e-6) + noise
    assert true_error(polynomial) == pytest.approx(polynomial.rho_est, rel=2e-3, abs=noise)
    assert degree == 0 or minimax.fit(half_width, degree - 1).rho_est > target * (1 - 1e-6) - noise


@given(st.floats(1e-3, 12.0), targets)
def test_minimax_degree_is_never_above_taylors(half_width, target):
    assert minimax.find_degree(half_width, target) <= taylor.find_degree(half_width, target)


@pytest.mark.parametrize("half_width", [0.01, 0.7, 3.0])
def test_minimax_constant_is_known_in_closed_form(half_width):
    polynomial = minimax.fit(half_width, 0)
    assert polynomial.coefficients[0] == pytest.approx(1 / math.cosh(half_width), rel=1e-13)
    assert polynomial.rho_est == pytest.approx(math.tanh(half_width), rel=1e-13)


@pytest.mark.parametrize(
    "half_width, degree",
    [(0.5, 3), (2.0, 6), (5.0, 9), (8.0, 14), (10.0, 12), (16.0, 20), (24.0, 30), (30.0, 36)],
)
def test_minimax_error_alternates_at_the_estimated_height(half_width, degree):
    """De la Vallee-Poussin: degree + 2 alternations of height h prove that nothing is closer than h."""
    polynomial = minimax.fit(half_width, degree)
    angles = minimax._exchange(half_width, degree).angles
    with mpmath.workdps(60):
        coefficients = [mpmath.mpf(c) for c in polynomial.coefficients.tolist()]
        points = [mpmath.mpf(float(x)) for x in -half_width * np.cos(angles)]
        errors = [horner(coefficients, x) * mpmath.exp(-x) - 1 for x in points]
    noise = minimax.rounding_est(half_width)
    assert len(errors) == degree + 2 and all(a * b < 0 for a, b in pairwise(errors))
    assert max(map(abs, errors)) == pytest.approx(polynomial.rho_est, rel=1e-6, abs=noise)
    assert min(map(abs, errors)) >= polynomial.rho_est * (1 - 1e-6) - 2 * noise


@pytest.mark.parametrize(
    "half_width, target", [(4.0, 1e-6), (16.0, 1e-4), (20.0, 1e-3), (26.0, 0.01), (32.0, 0.1)]
)
def test_rounding_costs_at_most_what_is_said(half_width, target):
    degree = minimax.find_degree(half_width, target)
    for extra in range(2):
        polynomial, exact = (
            minimax.fit(half_width, degree + extra),
            minimax._exchange(half_width, degree + extra),
        )
        assert true_error(polynomial, 801) - exact.rho <= minimax.rounding_est(half_width)


def test_rounding_every_coefficient_for_itself_would_cost_far_more():
    """At W = 16 about 1e-3, at W = 20 about a half: why coefficients are rounded in turn."""
    for half_width, least, most in ((16.0, 2e-5, 3e-3), (20.0, 0.05, 8.0)):
        degree = minimax.find_degree(half_width, 1e-4)
        with mpmath.workdps(150):
            remainders = [float(c) - mpmath.mpf(c) for c in minimax._extend(half_width, degree).coefficients]
            x = [mpmath.mpf(half_width) * i / 200 for i in range(-200, 201)]
            cost = max(abs(horner(remainders, y)) * mpmath.exp(-y) for y in x)
        assert least < cost < most
        assert minimax.fit(half_width, degree).rho_est < 1.1e-4


@pytest.mark.parametrize(
    "half_width, degree", [(1e-3, 3), (0.5, 10), (0.5, 20), (2.0, 6), (8.0, 14), (16.0, 30), (34.0, 50)]
)
def test_the_exchange_ends_in_extended_precision(half_width, degree):
    """Also where float64 sees nothing of the error: before rounding, its peaks agree to eleven digits."""
    exact = minimax._extend(half_width, degree)
    with mpmath.workdps(200):
        ends, signs = [], [mpmath.sign(exact.level) * (-1) ** i for i in range(degree + 2)]
        for angle in exact.angles.tolist():  # peaks are flat: float64 angles show all digits of their height
            x = -half_width * mpmath.cos(angle)
            ends.append(horner(exact.coefficients, x) * mpmath.exp(-x) - 1)
        heights = [sign * end / abs(exact.level) for sign, end in zip(signs, ends, strict=True)]
        assert all(abs(height - 1) < 1e-11 for height in heights)
        places = [-half_width * mpmath.cos(mpmath.pi * i / 999) for i in range(1000)]
        highest = max(abs(horner(exact.coefficients, x) * mpmath.exp(-x) - 1) for x in places)
        assert highest <= abs(exact.level) * (1 + mpmath.mpf("1e-11"))


def test_fitting_leaves_the_precision_of_others_alone():
    before = mpmath.mp.dps
    minimax.fit.cache_clear()
    minimax.fit(3.0, 8)
    assert mpmath.mp.dps == before


@pytest.mark.parametrize("target", TARGETS)
def test_the_widest_interval_is_usable(target):
    half_width = minimax.widest(target)
    reserved = minimax.rounding_est(half_width)
    assert reserved == pytest.approx(target / 4)
    polynomial = minimax.fit(half_width, minimax.find_degree(half_width, target - reserved))
    assert polynomial.rho_est <= target and polynomial.sup_bound <= target


def test_minimax_of_a_point_is_exact():
    assert minimax.find_degree(0.0, 1e-9) == 0
    assert minimax.fit(0.0, 2).coefficients.tolist() == [1.0, 0.0, 0.0]
    assert minimax.fit(0.0, 2).sup_bound <= 1e-50


def test_minimax_refuses_what_float64_does_not_carry():
    with pytest.raises(CannotCertify, match=r"W = 40\.5 is beyond 40"):
        minimax.find_degree(40.5, 0.1)
    with pytest.raises(CannotCertify, match=r"W = 36 is beyond 34\.95"):
        minimax.fit(36.0, 40)
    with pytest.raises(CannotCertify, match=r"relative error 1\.0e-17 is below 1e-13"):
        minimax.find_degree(10.0, 1e-17)


@pytest.mark.parametrize(
    "polynomial",
    [
        taylor.fit(3.0, 12),
        minimax.fit(1.0, 3),
        minimax.fit(8.0, 12),
        minimax.fit(20.0, 26),
        chebyshev.fit(0.5, 3),
        chebyshev.fit(8.0, 9),
        chebyshev.fit(50.0, 20),
    ],
    ids=lambda p: f"{p.kind}-{p.half_width:g}-{p.degree}",
)
def test_proved_bound_is_above_the_error_and_close_to_it(polynomial):
    error = true_error(polynomial, 1001)
    assert error <= polynomial.sup_bound  # sound
    assert polynomial.sup_bound <= 1.01 * error  # tight


@given(half_widths, targets, targets)
def test_smaller_targets_never_have_smaller_degrees(half_width, one, other):
    small, large = sorted((one, other))
    for find in (taylor.find_degree, minimax.find_degree, chebyshev.find_degree):
        assert find(half_width, small) >= find(half_width, large)
    for dim in (2, 3, 5):
        assert gegenbauer.find_degree(dim, half_width, small) >= gegenbauer.find_degree(
            dim, half_width, large
        )


@settings(max_examples=30)
@given(st.floats(1e-3, 60.0), targets)
def test_chebyshev_error_is_the_tail_of_its_series(half_width, target):
    polynomial = chebyshev.fit(half_width, chebyshev.find_degree(half_width, target))
    noise = chebyshev.rounding_est(half_width)
    assert polynomial.kind == "absolute" and polynomial.rho_est <= target + noise
    assert true_error(polynomial, 101) == pytest.approx(polynomial.rho_est, rel=1e-9, abs=2 * noise)


def test_chebyshev_degrees_grow_like_a_square_root():
    degrees = [chebyshev.find_degree(w, 1e-3) for w in (100.0, 400.0, 1600.0)]
    assert degrees[1] / degrees[0] == pytest.approx(2, abs=0.1) and degrees[2] / degrees[1] == pytest.approx(
        2, abs=0.1
    )
    with pytest.raises(CannotCertify, match=r"W = 65 is beyond 64"):
        chebyshev.fit(65.0, 30)
    assert chebyshev.fit(0.0, 2).coefficients.tolist() == [1.0, 0.0, 0.0]


def true_coefficient(dim: int, z: float, degree: int) -> float:
    with mpmath.workdps(40):
        index, z = mpmath.mpf(dim) / 2 - 1, mpmath.mpf(z)
        if dim == 2:
            return float((2 if degree else 1) * mpmath.besseli(degree, z) * mpmath.exp(-z))
        lead = mpmath.gamma(index) * (2 / z) ** index * (index + degree)
        return float(lead * mpmath.besseli(index + degree, z) * mpmath.exp(-z))


@settings(max_examples=40)
@given(dims, st.one_of(st.floats(1e-6, 50.0), st.floats(50.0, 3000.0)), st.integers(0, 60))
def test_gegenbauer_coefficients(dim, z, degree):
    found = gegenbauer.coefficients(dim, z, degree)[degree]
    assert found == pytest.approx(true_coefficient(dim, z, degree), rel=1e-11, abs=1e-290)


@settings(max_examples=25)
@given(dims, st.floats(1e-3, 200.0), targets)
def test_gegenbauer_degree_is_the_smallest_and_its_tail_is_the_error(dim, z, target):
    degree = gegenbauer.find_degree(dim, z, target)
    series = gegenbauer.fit(dim, z, degree)
    at_one = float(series.coefficients @ gegenbauer.values_at_one(dim, degree))
    assert series.rho_est <= target and 1 - at_one == pytest.approx(series.rho_est, rel=1e-9, abs=1e-12)
    assert degree == 0 or gegenbauer.tail_est(dim, z, degree - 1) > target
    assert series.rho_est * (1 - 1e-9) <= series.sup_bound <= series.rho_est * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_gegenbauer_series_is_within_its_bound_everywhere(dim):
    from scipy.special import eval_chebyt, eval_gegenbauer

    t, z = np.linspace(-1, 1, 501), 20.0
    series = gegenbauer.fit(dim, z, gegenbauer.find_degree(dim, z, 0.01))
    values = [
        eval_chebyt(k, t) if dim == 2 else eval_gegenbauer(k, dim / 2 - 1, t)
        for k in range(series.degree + 1)
    ]
    error = np.abs(series.coefficients @ np.array(values) - np.exp(z * (t - 1))).max()
    assert error <= series.sup_bound * (1 + 1e-10) and series.sup_bound <= 1.01 * error


def test_gegenbauer_at_zero_and_its_refusals():
    for dim in (2, 3, 10):
        assert gegenbauer.coefficients(dim, 0.0, 2).tolist() == [1.0, 0.0, 0.0]
        assert gegenbauer.find_degree(dim, 0.0, 1e-9) == 0
    with pytest.raises(CannotCertify, match=r"z = 1e\+09 is beyond 1e\+08"):
        gegenbauer.find_degree(3, 1e9, 0.1)
    with pytest.raises(InvalidInput, match="dim must be an integer >= 2, got 1"):
        gegenbauer.coefficients(1, 1.0, 3)
