"""How far polynomials and Gegenbauer series are from exp on an interval (PROOFS.md, Theorem 5 and Lemma 10).

Decimal arithmetic of the standard library at 170 digits, whose operations and exp are correctly rounded; no float64.
"""

import math
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from itertools import pairwise

import numpy as np

from rankcert.checker.errors import InvalidInput
from rankcert.checker.inputs import exact_float64

__all__ = [
    "absolute_error_upper",
    "centred_error_upper",
    "relative_error_upper",
    "series_error_bound",
    "series_tail_bound",
    "sup_error_bound",
]

DIGITS = 170
PIECES = 3  # per degree, to begin with
SPLITS = 64  # pieces per degree at most: more are not cut, which costs sharpness only
SHARPNESS = Decimal("0.002")  # relative excess over the supremum that is aimed at
LARGEST = (
    1e40  # of sum |c_k| (2 W)^k and e^W: products reach 1e80 and leave 90 digits for rounding (Theorem 5)
)
WIDEST = 1e6  # of intervals
MARGIN = Decimal("1e-60")  # more than all rounding of one piece, and of a series
LARGEST_SERIES = 4096  # of z, degree and dimension of a series (Lemma 10)


def sup_error_bound(coefficients, half_width: float, kind: str) -> float:
    """`relative_error_upper` or `centred_error_upper` for kind "relative" or "absolute"."""
    measures = {"relative": relative_error_upper, "absolute": centred_error_upper}
    if kind not in measures:
        raise InvalidInput(f"kind must be one of {', '.join(measures)}, got {kind!r}")
    return measures[kind](coefficients, half_width)


def relative_error_upper(coefficients, half_width: float) -> float:
    """At least max |p(x) e^-x - 1| over |x| <= half_width, p(x) = sum_k coefficients[k] x^k with exactly these floats.

    inf where the numbers are too large to enclose.
    """
    return _supremum(coefficients, -half_width, half_width, None)


def absolute_error_upper(coefficients, width: float) -> float:
    """At least max |p(x) - e^x| over -width <= x <= 0, p(x) = sum_k coefficients[k] x^k with exactly these floats."""
    return _supremum(coefficients, -width, 0.0, 0.0)


def centred_error_upper(coefficients, half_width: float) -> float:
    """At least max |p(x) - e^(x - half_width)| over |x| <= half_width: the same interval, powers about its middle."""
    return _supremum(coefficients, -half_width, half_width, half_width)


def _supremum(coefficients, low: float, high: float, top: float | None) -> float:
    """Over [low, high], of |p(x) - e^(x - top)|, or of |p(x) e^-x - 1| if top is None."""
    numbers = exact_float64("coefficients", coefficients, 1)
    if not numbers.size or not np.isfinite(numbers).all():
        raise InvalidInput(f"coefficients must be finite and at least one, got {coefficients!r}")
    if not 0.0 <= high - low < math.inf:
        raise InvalidInput(f"the half-width of the interval must be a finite number >= 0, got {-low!r}")
    reach = max(-low, high, 1.0)
    powers = [
        (2.0 * reach) ** k if k * math.log2(2.0 * reach) < 1000 else math.inf for k in range(numbers.size)
    ]
    size = sum(abs(c) * p for c, p in zip(numbers.tolist(), powers, strict=True) if c)
    if top is None:
        size = max(size, math.exp(min(reach, 700.0)))
    if not (size <= LARGEST and reach <= WIDEST):
        return math.inf
    with localcontext(Context(prec=DIGITS, rounding=ROUND_HALF_EVEN)):
        exact = [Decimal(c) for c in numbers.tolist()]
        shift = None if top is None else Decimal(top)
        return _float_up(_branch_and_bound(exact, shift, low, high) + MARGIN)


def _branch_and_bound(coefficients: list[Decimal], top: Decimal | None, low: float, high: float) -> Decimal:
    """Halve pieces until what is proved on each is close to a value attained somewhere.

    Every piece is either counted as it is or replaced by two that cover it; so whatever the order and wherever this
    stops, the pieces counted cover the interval.
    """
    count = PIECES * len(coefficients) if high > low else 1
    inner = [low + (high - low) * (1 - math.cos(math.pi * i / count)) / 2 for i in range(1, count)]
    ends = [low, *inner, high]
    work = list(pairwise(ends))
    budget = SPLITS * len(coefficients)
    counted = attained = Decimal(0)
    while work:
        measured = []
        for a, b in work:
            centre, half = (Decimal(a) + Decimal(b)) / 2, abs(Decimal(b) - Decimal(a)) / 2
            value, most = _on_piece(coefficients, top, centre, half)
            attained = max(attained, value)
            measured.append((a, b, most))
        enough = attained * (1 + SHARPNESS) + MARGIN
        work = []
        for a, b, most in measured:
            middle = (a + b) / 2
            if most <= enough or middle in (a, b) or budget <= 0:
                counted = max(counted, most)
            else:
                work += [(a, middle), (middle, b)]
                budget -= 1
    return counted


def _on_piece(
    coefficients: list[Decimal], top: Decimal | None, centre: Decimal, half: Decimal
) -> tuple[Decimal, Decimal]:
    """|g(centre)|, and a bound of |g| on [centre - half, centre + half] by Taylor's theorem of third order."""
    p = _taylor(coefficients, centre)
    size = len(p)
    p += [Decimal(0)] * 3
    if top is None:  # g = p e^-x - 1, whose k-th derivative is (d/dx - 1)^k p times e^-x
        factor = (-centre).exp()
        third = [
            (k + 1) * ((k + 2) * ((k + 3) * p[k + 3] - 3 * p[k + 2]) + 3 * p[k + 1]) - p[k]
            for k in range(size)
        ]
        bend = factor * half.exp() * _absolute_sum(third, half)
        g = [p[0] * factor - 1, (p[1] - p[0]) * factor, (2 * p[2] - 2 * p[1] + p[0]) * factor]
    else:  # g = p - e^(x - top)
        factor = (centre - top).exp()
        third = [(k + 1) * (k + 2) * (k + 3) * p[k + 3] for k in range(size)]
        bend = factor * half.exp() + _absolute_sum(third, half)
        g = [p[0] - factor, p[1] - factor, 2 * p[2] - factor]
    return abs(g[0]), _quadratic(g, half) + half**3 / 6 * bend


def _absolute_sum(p: list[Decimal], half: Decimal) -> Decimal:
    """sum_k |p[k]| half^k."""
    total = Decimal(0)
    for c in reversed(p):
        total = total * half + abs(c)
    return total


def _quadratic(g: list[Decimal], half: Decimal) -> Decimal:
    """At least max |g0 + g1 t + g2 t^2 / 2| over |t| <= half: at the ends, or at the vertex if it lies between."""
    even, odd = g[0] + g[2] * half * half / 2, g[1] * half
    most = max(abs(even + odd), abs(even - odd))
    if g[2] and abs(g[1]) <= half * abs(g[2]):
        most = max(most, abs(g[0] - g[1] * g[1] / (2 * g[2])))
    return most


def _taylor(coefficients: list[Decimal], centre: Decimal) -> list[Decimal]:
    """p[k] with p(centre + t) = sum_k p[k] t^k, by repeated synthetic division."""
    p = list(coefficients)
    for done in range(len(p) - 1):
        for k in range(len(p) - 2, done - 1, -1):
            p[k] += centre * p[k + 1]
    return p


def series_error_bound(coefficients, dim: int, z: float) -> float:
    """At least max |sum_l coefficients[l] C_l(t) - e^(z (t - 1))| over |t| <= 1, with exactly these floats.

    C_l are the Gegenbauer polynomials of index dim/2 - 1; for dim = 2 the Chebyshev polynomials T_l.
    """
    numbers = exact_float64("coefficients", coefficients, 1)
    if not np.isfinite(numbers).all():
        raise InvalidInput(f"coefficients must be finite, got {coefficients!r}")
    return _series(dim, z, numbers.size, numbers.tolist())


def series_tail_bound(dim: int, z: float, degree: int) -> float:
    """The same for the first degree + 1 coefficients of the Gegenbauer series of e^(z (t - 1)), taken exactly."""
    return _series(dim, z, degree + 1, None)


def _series(dim: int, z: float, count: int, coefficients: list[float] | None) -> float:
    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or dim < 2:
        raise InvalidInput(f"dim must be an integer >= 2, got {dim!r}")
    if not 0.0 <= z < math.inf:
        raise InvalidInput(f"z must be a finite number >= 0, got {z!r}")
    if max(dim, z, count) > LARGEST_SERIES:
        return math.inf
    with localcontext(Context(prec=DIGITS, rounding=ROUND_HALF_EVEN)):
        half, scale = Decimal(float(z)) / 2, (-Decimal(float(z))).exp()
        reached = off = Decimal(
            0
        )  # of sum_l a_l C_l(1) = e^z from below; what coefficients are off by, from above
        first = Decimal(1)  # the first term of a_l
        for degree in range(count):
            least, rest = _coefficient(dim, half, degree, first)
            at_one = 1 if dim == 2 else math.comb(degree + dim - 3, degree)
            reached += scale * least * at_one
            if coefficients is not None:
                off += (abs(Decimal(coefficients[degree]) - scale * least) + scale * rest) * at_one
            if dim == 2:
                first *= (half if degree else 2 * half) / (degree + 1)  # of 2 I_l(z), but of I_0(z)
            else:
                first *= half / (Decimal(dim - 2) / 2 + degree)
        return _float_up(max(1 - reached, Decimal(0)) + off + MARGIN)


def _coefficient(dim: int, half: Decimal, degree: int, first: Decimal) -> tuple[Decimal, Decimal]:
    """Part of the sum a_l = first (1 + x/(1 (v+1)) + x^2/(1 2 (v+1)(v+2)) + ..), and a bound of the rest of it.

    x = (z/2)^2 and v = l + dim/2 - 1; all terms are positive.
    """
    order, square = Decimal(dim - 2) / 2 + degree, half * half
    total = term = first
    j = 0
    while True:
        j += 1
        ratio = square / (j * (order + j))
        term *= ratio
        total += term
        if ratio * 2 <= 1 and term <= total * Decimal("1e-100"):
            return total, term  # from here on each term is at most half the one before


def _float_up(value: Decimal) -> float:
    return math.nextafter(float(value), math.inf)  # float() rounds to nearest
