"""The polynomial of smallest relative distance to exp on [-W, W], by the Remez exchange (THEORY.md, Lemma 8)."""

import numpy as np
from numpy.polynomial import chebyshev

from rankcert.approximants import taylor
from rankcert.approximants.base import Polynomial
from rankcert.errors import CannotCertify

__all__ = ["WIDEST", "find_degree", "fit"]

WIDEST = 10.0  # e^2W = 5e8: float64 coefficients of size e^W still resolve e^-W to about 1e-7
GRID = 256  # points per degree on which errors are looked at
EXCHANGES = 20  # the exchange converges quadratically, a handful is the rule
LEVEL = 1e-6  # it stops when the peaks of the error agree to this


def find_degree(half_width: float, target: float) -> int:
    """The smallest D >= 0 whose fit has `rho_est` <= target, for 0 <= W <= WIDEST and 0 < target.

    Raises CannotCertify for larger W, and where rounding keeps every fit above the target.
    """
    if half_width > WIDEST:
        raise CannotCertify(
            f"logit half-range W = {half_width:.3g} is beyond {WIDEST:g}, the most a float64 minimax fit carries"
        )
    for degree in range(taylor.find_degree(half_width, min(target, 1.0)) + 1):
        if fit(half_width, degree).rho_est <= target:
            return degree
    raise CannotCertify(
        f"float64 coefficients do not reach relative error {target:.1e} on |x| <= {half_width:.3g}"
    )


def fit(half_width: float, degree: int) -> Polynomial:
    """The minimax polynomial of given degree, 0 <= W <= WIDEST.

    Solved in the basis T_k(x / W), then rounded to monomial coefficients; `rho_est` is the largest error of the
    rounded polynomial over a grid, peaks refined by parabolas.
    """
    if half_width == 0.0:
        return Polynomial(np.eye(1, degree + 1)[0], half_width, 0.0)
    points = -half_width * np.cos(np.pi * np.arange(degree + 2) / (degree + 1))
    best, lowest = np.ones(1), np.inf  # where rounding hides the shape of the error, exchanges go astray
    for _ in range(EXCHANGES):
        series = _solve_levelled(points, half_width, degree)
        points, heights = _find_peaks(
            lambda x, c=series: chebyshev.chebval(x / half_width, c), half_width, degree
        )
        if heights.max() < lowest:
            best, lowest = series, heights.max()
        if points.size < degree + 2 or heights.max() <= (1.0 + LEVEL) * heights.min():
            break
    coefficients = chebyshev.cheb2poly(best) / half_width ** np.arange(degree + 1)
    _, heights = _find_peaks(lambda x: np.polyval(coefficients[::-1], x), half_width, degree)
    return Polynomial(coefficients, half_width, float(heights.max()))


def _solve_levelled(points: np.ndarray, half_width: float, degree: int) -> np.ndarray:
    """Chebyshev coefficients of the p with p(x) e^-x - 1 = +h, -h, +h, .. at the degree + 2 points, for some h."""
    weighted = chebyshev.chebvander(points / half_width, degree) * np.exp(-points)[:, None]
    signs = (-1.0) ** np.arange(degree + 2)
    return np.linalg.solve(np.column_stack([weighted, signs]), np.ones(degree + 2))[:-1]


def _find_peaks(polynomial, half_width: float, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Where |p(x) e^-x - 1| peaks between sign changes, and how high: degree + 2 places at most, outer ones dropped."""
    count = GRID * (degree + 2)
    points = -half_width * np.cos(np.pi * np.arange(count + 1) / count)
    error = polynomial(points) * np.exp(-points) - 1.0
    changes = np.flatnonzero(np.signbit(error[1:]) != np.signbit(error[:-1])) + 1
    positions, heights = [], []
    for part in np.split(np.arange(count + 1), changes):
        i = int(part[np.argmax(np.abs(error[part]))])
        step, height = 0.0, error[i]
        if 0 < i < count:  # the vertex of the parabola through three points, at most half a step away
            slope, bend = (error[i + 1] - error[i - 1]) / 2, error[i + 1] - 2 * error[i] + error[i - 1]
            step = -slope / bend if bend else 0.0
            height += slope * step / 2
        positions.append(i + step)
        heights.append(abs(height))
    first, last = 0, len(heights)
    while last - first > degree + 2:
        if heights[first] < heights[last - 1]:
            first += 1
        else:
            last -= 1
    kept = np.array(positions[first:last])
    return -half_width * np.cos(np.pi * kept / count), np.array(heights[first:last])
