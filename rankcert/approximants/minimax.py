"""The polynomial of smallest relative distance to exp on [-W, W], by the Remez exchange (THEORY.md, Lemma 8).

p runs from e^-W to e^W, so that as a sum of powers it loses 2W / log 10 digits. As a table of values it loses none: the
exchange interpolates p(x) e^-x between the points where the error alternates, which is well conditioned, and so degrees
are searched in float64. `fit` goes on from the points found there in mpmath, with digits for all that cancels, until
the peaks agree to SETTLED. What is left is that coefficients have to be float64: rounding each for itself would cost
about .02 to .3 of 2^-53 e^2W (1e-3 at W = 16, everything at W = 20); `_round` makes 2^-53 e^W of it.
"""

import math
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rankcert.approximants import taylor
from rankcert.approximants.base import Polynomial
from rankcert.errors import CannotCertify

if TYPE_CHECKING:
    from mpmath import MPContext, mpf

__all__ = ["WIDEST_COUNT", "find_degree", "fit", "rounding_est", "widest"]

WIDEST_COUNT = 40.0  # degrees are counted up to here
ROUNDING = 1.5  # measured: rounding the coefficients, as `_round` does, costs at most 1.2 times 2^-53 e^W
RESOLVED = 1e-13  # errors below that drown in the rounding of the exchange
GRID = 16  # places per pair of neighbouring alternation points on which errors are looked at
EXCHANGES = 30  # the exchange converges quadratically: three to five are the rule
LEVEL = 1e-7  # in float64 it stops when the peaks of the error agree to this
SETTLED = 1e-12  # in mpmath when they agree to this: one or two exchanges more


def rounding_est(half_width: float) -> float:
    """About the most that float64 coefficients add to the relative error of a polynomial on [-W, W]."""
    return ROUNDING * 2.0**-53 * math.exp(half_width)


def widest(target: float) -> float:
    """The largest W on which float64 coefficients reach a relative error, leaving rounding a quarter of it.

    >>> [round(widest(eps), 1) for eps in (0.5, 0.1, 0.01, 1e-4, 1e-6)]
    [34.3, 32.6, 30.3, 25.7, 21.1]
    """
    return math.log(target / (4.0 * ROUNDING * 2.0**-53))


def find_degree(half_width: float, target: float) -> int:
    """The smallest D >= 0 whose minimax polynomial has rho <= target, in exact arithmetic; 0 <= W <= WIDEST_COUNT.

    Counts further than `fit` can build. Raises CannotCertify for larger W.
    """
    if half_width > WIDEST_COUNT:
        raise CannotCertify(
            f"logit half-range W = {half_width:.3g} is beyond {WIDEST_COUNT:g}, up to which minimax degrees are counted"
        )
    if not target >= RESOLVED:
        raise CannotCertify(
            f"relative error {target:.1e} is below {RESOLVED:g}, the least the exchange resolves"
        )
    if half_width == 0.0:
        return 0
    # |level| at any points is a lower bound of rho (Lemma 8), and at the first points already close to it.
    refused, accepted = -1, taylor.find_degree(half_width, min(target, 1.0))
    while accepted - refused > 1:
        middle = (accepted + refused) // 2
        if abs(_level(_first_points(half_width, middle), half_width).level) > target:
            refused = middle
        else:
            accepted = middle
    most = accepted + 2  # the search found where a lower bound of rho passes the target
    while _exchange(half_width, accepted).rho > target:
        accepted += 1
        if accepted > most:
            raise CannotCertify(
                f"the exchange does not resolve relative error {target:.1e} on |x| <= {half_width:.3g}"
            )
    return accepted


@lru_cache(maxsize=64)
def fit(half_width: float, degree: int) -> Polynomial:
    """The minimax polynomial of given degree with its coefficients rounded to float64, `rho_est` including that.

    Raises CannotCertify for W > widest(1.0), where rounding leaves nothing at any degree.
    """
    if half_width > widest(1.0):
        raise CannotCertify(
            f"logit half-range W = {half_width:.4g} is beyond {widest(1.0):.4g}, the most float64 coefficients of a "
            "minimax polynomial carry"
        )
    if half_width == 0.0:
        return Polynomial(np.eye(1, degree + 1)[0], half_width, 0.0)
    exact = _extend(half_width, degree)
    coefficients, added = _round(exact.coefficients, half_width)
    coefficients.flags.writeable = False  # the cache shares it
    angles = np.linspace(0.0, np.pi, 4 * GRID * (degree + 2) + 1)[1:-1]
    x = np.concatenate([-half_width * np.cos(angles), [-half_width, half_width]])
    rounding = np.zeros(x.size)
    for s, change in enumerate(added):
        rounding += change * np.exp(-x) * np.prod(x[:, None] - _nodes(half_width, s), axis=1)
    if abs(exact.level) < RESOLVED:  # float64 does not see the error itself
        rho_est = abs(exact.level) + float(np.abs(rounding).max())
    else:
        rho_est = float(np.abs(_errors(_level(exact.angles, half_width), x, half_width) + rounding).max())
    return Polynomial(coefficients, half_width, rho_est)


class _Levelled(NamedTuple):
    """p in values: p(x) e^-x - 1 is +level, -level, .. at x = -W cos(angles), ascending.

    terms: its barycentric terms, up to a common factor e^scale. rho: the largest error found, once looked at.
    """

    angles: np.ndarray
    level: float
    terms: np.ndarray
    scale: float
    rho: float = math.inf


def _first_points(half_width: float, degree: int) -> np.ndarray:
    """Angles at which (D + 1) a + W sin a is a multiple of pi: the error oscillates about like the cosine of that."""
    angles = _solve_phases(np.pi * np.arange(degree + 2), degree + 1, min(half_width, 0.9 * (degree + 1)))
    angles[[0, -1]] = 0.0, np.pi
    return angles


def _solve_phases(phases: np.ndarray, count: int, tilt: float) -> np.ndarray:
    """Angles a in [0, pi] with count a + tilt sin a = phase, tilt <= count; by bisection."""
    low, high = np.zeros(phases.size), np.full(phases.size, np.pi)
    for _ in range(40):
        middle = (low + high) / 2
        below = count * middle + tilt * np.sin(middle) < phases
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def _level(angles: np.ndarray, half_width: float) -> _Levelled:
    """The polynomial whose error alternates at these points: its divided difference over all of them vanishes."""
    x = -half_width * np.cos(angles)
    apart = np.abs(x[:, None] - x) * (2.0 / half_width)
    np.fill_diagonal(apart, 1.0)
    exponents = x - np.log(apart).sum(axis=1)
    scale = float(exponents.max())
    signs = (-1.0) ** np.arange(x.size)
    weights = np.exp(exponents - scale)
    level = -float((signs * weights).sum() / weights.sum())
    return _Levelled(angles, level, signs * weights * (1.0 + level * signs), scale)


def _errors(levelled: _Levelled, x: np.ndarray, half_width: float) -> np.ndarray:
    """p(x) e^-x - 1."""
    points = -half_width * np.cos(levelled.angles)
    apart = (x[:, None] - points) * (2.0 / half_width)
    here = apart == 0.0
    apart[here] = 1.0
    sizes = np.exp(np.log(np.abs(apart)).sum(axis=1) - x + levelled.scale)
    signs = (-1.0) ** (np.signbit(apart).sum(axis=1) + points.size - 1)
    errors = signs * sizes * (levelled.terms / apart).sum(axis=1) - 1.0
    row, point = np.nonzero(here)
    errors[row] = (-1.0) ** point * levelled.level
    return errors


@lru_cache(maxsize=256)
def _exchange(half_width: float, degree: int) -> _Levelled:
    levelled = _level(_first_points(half_width, degree), half_width)
    if (
        abs(levelled.level) < RESOLVED / 4.0
    ):  # nothing to be seen; the first points are good to a small factor
        return levelled._replace(rho=RESOLVED)
    best = levelled
    for _ in range(EXCHANGES):
        angles, heights = _find_peaks(levelled, half_width)
        levelled = levelled._replace(rho=float(heights.max()))
        if levelled.rho < best.rho:
            best = levelled
        done = heights.max() <= (1.0 + LEVEL) * heights.min()
        if done or angles.size < degree + 2 or not (np.diff(angles) > 0.0).all():
            break  # or rounding hides the shape of the error
        levelled = _level(angles, half_width)
    return best


def _find_peaks(levelled: _Levelled, half_width: float) -> tuple[np.ndarray, np.ndarray]:
    """Where the error peaks between sign changes, and how high: degree + 2 places at most, lower ends dropped."""
    angles = levelled.angles
    between = angles[:-1, None] + np.diff(angles)[:, None] * (np.arange(GRID) + 0.5) / GRID
    x = np.sort(np.concatenate([angles, between.ravel()]))
    error = _errors(levelled, -half_width * np.cos(x), half_width)
    changes = np.flatnonzero(np.signbit(error[1:]) != np.signbit(error[:-1])) + 1
    peaks = np.array([part[np.argmax(np.abs(error[part]))] for part in np.split(np.arange(x.size), changes)])
    places, heights = x[peaks], np.abs(error[peaks])
    for number, i in enumerate(peaks):
        if 0 < i < x.size - 1:  # the vertex of the parabola through three neighbours
            rise, fall = (
                (error[i] - error[i - 1]) / (x[i] - x[i - 1]),
                (error[i + 1] - error[i]) / (x[i + 1] - x[i]),
            )
            bend = (fall - rise) / (x[i + 1] - x[i - 1])
            if bend:
                places[number] = min(max((x[i - 1] + x[i] - rise / bend) / 2, x[i - 1]), x[i + 1])
                away = places[number] - x[i]
                heights[number] = abs(error[i] + away * (rise + bend * (places[number] - x[i - 1])))
    first, last = 0, heights.size
    while last - first > levelled.angles.size:
        if heights[first] < heights[last - 1]:
            first += 1
        else:
            last -= 1
    return places[first:last], heights[first:last]


class _Extended(NamedTuple):
    """The polynomial in extended precision: coefficients (mpf), its level, and the angles of its alternation."""

    coefficients: "list[mpf]"
    level: float
    angles: np.ndarray


def _extend(half_width: float, degree: int) -> _Extended:
    """The exchange in mpmath, from the points at which the one in float64 ended.

    Peaks are zeros of p' - p, a polynomial of degree D, and the two ends: D + 2 at most, one for every point. A single
    Newton step from the last point keeps the exchange quadratic. Whatever it does, |level| is at most the smallest rho
    there is, and the highest peak at least that (Lemma 8).
    """
    from mpmath import MPContext  # here, so that it loads only when something is fitted

    mp = MPContext()  # our own: the shared one's precision belongs to whoever imports mpmath
    # Digits for the differences of the points, and for the cancellation from e^W to e^-W, with 40 to spare.
    mp.dps = 40 + 2 * degree + math.ceil(half_width)
    wide = mp.mpf(half_width)
    points = [-wide * mp.cos(float(angle)) for angle in _exchange(half_width, degree).angles]
    points[0], points[-1] = -wide, wide
    for _ in range(EXCHANGES):
        coefficients, level = _expand(mp, points)
        after = [*((k + 1) * c for k, c in enumerate(coefficients[1:])), mp.zero]
        slope = [
            a - c for a, c in zip(after, coefficients, strict=True)
        ]  # p' - p: e^x times that of the error
        bending = [k * c for k, c in enumerate(slope)][1:]
        moved, rise = list(points), mp.zero
        for i in range(1, degree + 1):
            powers = list(accumulate(repeat(points[i], degree), mul, initial=mp.one))
            tilt, bend = mp.fdot(slope, powers), mp.fdot(bending, powers[:-1])
            moved[i] -= tilt / bend
            rise = max(rise, abs(tilt * tilt / bend) * mp.exp(-points[i]) / 2)  # up to the parabola's vertex
        if rise <= SETTLED * abs(level) or not all(a < b for a, b in pairwise(moved)):
            break
        points = moved
    return _Extended(coefficients, float(level), np.array([float(mp.acos(-x / wide)) for x in points]))


def _expand(mp: "MPContext", points: "list[mpf]") -> "tuple[list[mpf], mpf]":
    """Coefficients of the levelled polynomial at these points, by Newton's divided differences, and its level."""
    values = [mp.exp(point) for point in points]
    signed = [value if i % 2 == 0 else -value for i, value in enumerate(values)]
    plain, turned = (_divided_differences(points, column) for column in (values, signed))
    level = -plain[-1] / turned[-1]
    newton = [a + level * b for a, b in zip(plain[:-1], turned[:-1], strict=True)]
    coefficients = [newton[-1]]
    for k in range(len(newton) - 2, -1, -1):  # times (x - point), plus the next constant
        coefficients = _times_root(coefficients, points[k])
        coefficients[0] += newton[k]
    return coefficients, level


def _times_root(p: "list[mpf]", root: "mpf | float") -> "list[mpf]":
    """Coefficients of (x - root) p."""
    return [-root * p[0], *(a - root * b for a, b in pairwise(p)), p[-1]]


def _round(exact: "list[mpf]", half_width: float) -> tuple[np.ndarray, np.ndarray]:
    """float64 coefficients, and how much each rounding added: the result is p + sum_s added[s] prod_t (x - nodes(s)_t).

    From the highest power down: rounding c_s would add a multiple of x^s. Changing the coefficients that are still to
    be rounded makes of it the same multiple of a monic polynomial that is nearly the smallest relative to e^x.
    """
    left = list(exact)
    rounded, added = np.zeros(len(left)), np.zeros(len(left))
    for s in range(len(left) - 1, -1, -1):
        rounded[s] = float(left[s])
        change = float(rounded[s]) - left[s]
        added[s] = float(change)
        monic = [left[s] * 0 + 1]
        for node in _nodes(half_width, s).tolist():
            monic = _times_root(monic, node)
        left = [c + change * b for c, b in zip(left[:s], monic, strict=False)]
    return rounded, added


def _nodes(half_width: float, count: int) -> np.ndarray:
    """Zeros of a polynomial that is small relative to e^x on [-W, W] for its leading coefficient."""
    spread = min(half_width, float(count))  # beyond -W + 2 count, e^x wins whatever the polynomial
    angles = _solve_phases(np.pi * (np.arange(count) + 0.5), count, spread)
    return -half_width + spread * (1.0 - np.cos(angles))


def _divided_differences(x: "list[mpf]", values: "list[mpf]") -> "list[mpf]":
    out = list(values)
    for order in range(1, len(x)):
        for i in range(len(x) - 1, order - 1, -1):
            out[i] = (out[i] - out[i - 1]) / (x[i] - x[i - order])
    return out
