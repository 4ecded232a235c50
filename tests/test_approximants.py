"""Univariate approximants of exp: the degrees they need, how close they are, and what they refuse."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankcert.approximants import minimax, taylor
from rankcert.errors import CannotCertify

TARGETS = (0.5, 0.1, 0.01, 1e-4)
DEGREES = {  # W: (Taylor, minimax) for each target
    1.0: [(2, 1), (4, 2), (5, 3), (7, 5)],
    2.0: [(6, 2), (7, 3), (9, 5), (11, 7)],
    4.0: [(13, 4), (14, 6), (16, 7), (19, 10)],
    8.0: [(27, 8), (28, 10), (30, 12), (33, 16)],
}
half_widths = st.floats(1e-3, 8.0)
targets = st.floats(1e-5, 0.9)


def measured_error(polynomial, points: int = 20_001) -> float:
    x = np.linspace(-polynomial.half_width, polynomial.half_width, points).astype(np.longdouble)
    value = np.polyval(polynomial.coefficients[::-1].astype(np.longdouble), x)
    return float(np.abs(value * np.exp(-x) - 1).max())


@pytest.mark.parametrize("half_width", DEGREES)
def test_table_of_degrees(half_width):
    found = [(taylor.find_degree(half_width, t), minimax.find_degree(half_width, t)) for t in TARGETS]
    assert found == DEGREES[half_width]


def lagrange(half_width: float, degree: int) -> float:
    power = Fraction(half_width) ** (degree + 1) / math.factorial(degree + 1)
    return math.exp(half_width) * float(power)


@given(half_widths, targets)
def test_taylor_degree_is_the_smallest_within_lagranges_bound(half_width, target):
    degree = taylor.find_degree(half_width, target)
    assert lagrange(half_width, degree) <= target * (1 + 1e-12)
    assert degree == 0 or lagrange(half_width, degree - 1) > target * (1 - 1e-12)


@given(half_widths, targets)
def test_taylor_error_is_within_its_estimate(half_width, target):
    polynomial = taylor.fit(half_width, taylor.find_degree(half_width, target))
    assert polynomial.rho_est <= target * (1 + 1e-12)
    assert measured_error(polynomial, 501) <= polynomial.rho_est * (1 + 1e-9) + 1e-16 * math.exp(
        2 * half_width
    )


def test_taylor_counts_where_nothing_can_be_built():
    assert taylor.find_degree(0.0, 0.1) == 0
    assert taylor.find_degree(1e6, 0.1) == pytest.approx(3.5911e6, rel=1e-4)  # k log k - k = W + k log W
    with pytest.raises(CannotCertify, match="Taylor degree 101 is beyond 100"):
        taylor.fit(30.0, 101)


@given(half_widths, targets)
def test_minimax_estimate_is_the_error_and_no_smaller_degree_will_do(half_width, target):
    degree = minimax.find_degree(half_width, target)
    polynomial = minimax.fit(half_width, degree)
    assert polynomial.degree == degree and polynomial.rho_est <= target
    noise = 1e-15 * math.exp(2 * half_width)
    assert measured_error(polynomial) == pytest.approx(polynomial.rho_est, rel=1e-4, abs=noise)
    assert degree == 0 or minimax.fit(half_width, degree - 1).rho_est > target


@pytest.mark.parametrize("half_width", [0.01, 0.7, 3.0])
def test_minimax_constant_is_known_in_closed_form(half_width):
    polynomial = minimax.fit(half_width, 0)
    assert polynomial.coefficients[0] == pytest.approx(1 / math.cosh(half_width), rel=1e-13)
    assert polynomial.rho_est == pytest.approx(math.tanh(half_width), rel=1e-13)


@pytest.mark.parametrize("half_width, degree", [(0.5, 3), (2.0, 6), (5.0, 9), (8.0, 14), (10.0, 12)])
def test_minimax_error_alternates_at_the_estimated_height(half_width, degree):
    """De la Vallee-Poussin: degree + 2 alternations of height h prove that nothing is closer than h."""
    polynomial = minimax.fit(half_width, degree)
    x = half_width * np.cos(np.linspace(np.pi, 0, 100_001))
    error = np.polyval(polynomial.coefficients[::-1], x) * np.exp(-x) - 1
    runs = np.split(np.abs(error), np.flatnonzero(np.diff(np.sign(error))) + 1)
    heights = [run.max() for run in runs]
    noise = 1e-15 * np.exp(2 * half_width)
    assert len(heights) == degree + 2
    assert max(heights) == pytest.approx(polynomial.rho_est, rel=1e-7, abs=noise)
    assert min(heights) >= polynomial.rho_est * (1 - 1e-5) - noise


def test_minimax_of_a_point_is_exact():
    assert minimax.find_degree(0.0, 1e-9) == 0
    assert minimax.fit(0.0, 2).coefficients.tolist() == [1.0, 0.0, 0.0]


def test_minimax_refuses_what_float64_does_not_carry():
    with pytest.raises(CannotCertify, match=r"W = 10\.5 is beyond 10"):
        minimax.find_degree(10.5, 0.1)
    with pytest.raises(CannotCertify, match=r"do not reach relative error 1\.0e-09 on \|x\| <= 10"):
        minimax.find_degree(10.0, 1e-9)
