"""Proved sup errors: never below the truth, and not far above it (PROOFS.md, Theorem 5 and Lemma 10)."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankcert.checker.errors import InvalidInput
from rankcert.checker.suprema import (
    absolute_error_upper,
    centred_error_upper,
    relative_error_upper,
    series_error_bound,
    series_tail_bound,
    sup_error_bound,
)

MEASURES = {  # name: (function, low / width, error of p at x)
    "relative": (relative_error_upper, -1, 1, lambda p, x, w: p * mpmath.exp(-x) - 1),
    "absolute": (absolute_error_upper, -1, 0, lambda p, x, w: p - mpmath.exp(x)),
    "centred": (centred_error_upper, -1, 1, lambda p, x, w: p - mpmath.exp(x - w)),
}


def horner(coefficients, x):
    total = mpmath.mpf(0)
    for c in reversed(coefficients):
        total = total * x + c
    return total


def dense_maximum(name, coefficients, width, points) -> float:
    _, low, high, error = MEASURES[name]
    with mpmath.workdps(50):
        c, w = [mpmath.mpf(float(a)) for a in coefficients], mpmath.mpf(width)
        grid = [
            w * (low + (high - low) * (1 - mpmath.cos(mpmath.pi * i / points)) / 2) for i in range(points + 1)
        ]
        return float(max(abs(error(horner(c, x), x, w)) for x in grid))


polynomials = st.lists(st.floats(-3, 3), min_size=1, max_size=12)
widths = st.floats(0, 4)


@settings(max_examples=60)
@given(st.sampled_from(list(MEASURES)), polynomials, widths)
def test_never_below_the_truth(name, coefficients, width):
    assert MEASURES[name][0](coefficients, width) >= dense_maximum(name, coefficients, width, 101)


@settings(max_examples=60)
@given(st.sampled_from(list(MEASURES)), polynomials, widths)
def test_within_one_percent_of_the_truth(name, coefficients, width):
    truth = dense_maximum(name, coefficients, width, 401)
    assert MEASURES[name][0](coefficients, width) <= 1.01 * truth + 1e-50


@pytest.mark.parametrize("width", [0.0, 1e-300, 1e-9, 0.3])
def test_constants_are_known_in_closed_form(width):
    assert relative_error_upper([1.0], width) == pytest.approx(math.expm1(width), rel=3e-3, abs=1e-50)
    assert absolute_error_upper([1.0], width) == pytest.approx(-math.expm1(-width), rel=3e-3, abs=1e-50)
    assert centred_error_upper([1.0], width) == pytest.approx(-math.expm1(-2 * width), rel=3e-3, abs=1e-50)


def test_centred_and_shifted_powers_agree():
    """(x + w/2)^k about the middle, expanded about the right end."""
    centred = np.array([0.3, 0.25, 0.11])
    width = 2.0
    a, b, c = centred
    shifted = [a + b + c, b + 2 * c, c]
    assert absolute_error_upper(shifted, width) == pytest.approx(
        centred_error_upper(centred, width / 2), rel=5e-3
    )


def test_what_cannot_be_enclosed_is_infinite():
    assert relative_error_upper([1.0], 93.0) == math.inf
    assert relative_error_upper([1.0] + 40 * [1e30], 2.0) == math.inf
    assert absolute_error_upper([1e300, 1e300], 1.0) == absolute_error_upper([1.0], 2e6) == math.inf
    assert series_tail_bound(3, 5000.0, 10) == series_error_bound([1.0], 5000, 1.0) == math.inf


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: relative_error_upper([], 1.0), "coefficients must be finite"),
        (lambda: relative_error_upper([math.nan], 1.0), "coefficients must be finite"),
        (lambda: absolute_error_upper([1.0], -1.0), "half-width of the interval"),
        (lambda: centred_error_upper([1.0], math.nan), "half-width of the interval"),
        (lambda: sup_error_bound([1.0], 1.0, "best"), "kind must be one of relative, absolute"),
        (lambda: series_error_bound([math.inf], 3, 1.0), "coefficients must be finite"),
        (lambda: series_tail_bound(1, 1.0, 3), "dim must be an integer >= 2"),
        (lambda: series_tail_bound(3, -1.0, 3), "z must be a finite number >= 0"),
    ],
)
def test_nonsense_is_refused(call, message):
    with pytest.raises(InvalidInput, match=message):
        call()


def true_tail(dim, z, degree) -> float:
    """sum over l > degree of a_l C_l(1), from mpmath's Bessel functions, the small end first."""
    with mpmath.workdps(40):
        index, z = mpmath.mpf(dim) / 2 - 1, mpmath.mpf(z)
        total, last = mpmath.mpf(0), degree + 60 + int(2 * z)
        for k in range(last, degree, -1):
            if dim == 2:
                total += 2 * mpmath.besseli(k, z)
            else:
                lead = mpmath.gamma(index) * (2 / z) ** index * (index + k)
                total += lead * mpmath.besseli(index + k, z) * mpmath.binomial(k + dim - 3, k)
        return float(total * mpmath.exp(-z))


@settings(max_examples=20)
@given(st.sampled_from([2, 3, 4, 9]), st.floats(0.01, 30.0), st.integers(0, 12))
def test_tail_is_proved_and_sharp(dim, z, degree):
    truth = true_tail(dim, z, degree)
    found = series_tail_bound(dim, z, degree)
    assert truth * (1 - 1e-15) <= found <= truth * (1 + 1e-12) + 2e-60


@settings(max_examples=20)
@given(
    st.sampled_from([2, 3, 4, 9]), st.floats(0.01, 10.0), st.lists(st.floats(-1, 1), min_size=1, max_size=6)
)
def test_any_series_is_within_its_bound(dim, z, coefficients):
    from scipy.special import eval_chebyt, eval_gegenbauer

    t = np.linspace(-1, 1, 201)
    value = sum(
        c * (eval_chebyt(k, t) if dim == 2 else eval_gegenbauer(k, dim / 2 - 1, t))
        for k, c in enumerate(coefficients)
    )
    assert (
        np.abs(value - np.exp(z * (t - 1))).max()
        <= series_error_bound(coefficients, dim, z) * (1 + 1e-12) + 1e-12
    )
