"""One half of a splitting step, row by row, compiled (twin in `rankcert.kernels.reference`)."""

import numpy as np
from numba import njit

from rankcert.kernels import REORDERED

__all__ = ["reflect_rows"]

SWEEPS = 12  # of Newton's method for a threshold, at most; warm started it takes one to four
SETTLED = np.float32(1e-4)  # relative change of a threshold at which it is left
ZERO = np.float32(0.0)


@njit(cache=True, nogil=True)
def reflect_rows(
    target: np.ndarray,
    low: np.ndarray,
    state: np.ndarray,
    weight: np.ndarray,
    reach: np.ndarray,
    radius: np.ndarray,
    beta: np.float32,
    threshold: np.ndarray,
    errors: np.ndarray,
    rest: np.ndarray,
) -> None:
    """state += beta (ball(2 low - state) - low), a row at a time.

    ball projects a row onto sum_j weight_j |target - x|_j <= radius. All of one floating type, C order: target, low,
    state (rows, m), of which row i counts up to reach[i]; weight (m,), positive; radius (rows,). threshold (rows,) is
    the multiplier of each row's ball: its last value on entry, its new one on return. errors (rows,) receives
    sum_j weight_j |target - low|_j. rest (m,) is working memory.
    Shapes are not checked. Source: docs/CONSTRUCTIONS.md, C10.
    """
    for i in range(target.shape[0]):
        width = reach[i]
        t, x, z = target[i, :width], low[i, :width], state[i, :width]
        r, w = rest[:width], weight[:width]
        errors[i], total = _reflect(t, x, z, w, r)
        threshold[i] = _find_threshold(r, w, radius[i], threshold[i]) if total > radius[i] else ZERO
        _step(t, x, z, w, r, threshold[i], beta)


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _reflect(t, x, z, w, r):
    """r = t - (2 x - z); returns the weighted sums of |t - x| and of |r|."""
    error, total = ZERO, ZERO
    for j in range(t.shape[0]):
        d = t[j] - x[j]
        y = d - x[j] + z[j]
        r[j] = y
        error += w[j] * abs(d)
        total += w[j] * abs(y)
    return error, total


@njit(cache=True, nogil=True)
def _find_threshold(r, w, radius, theta):
    """The root of f(theta) = sum_j w_j max(|r_j| - theta w_j, 0) - radius, started from `theta`."""
    # Invariant: f is convex and falls, so a Newton step ends left of the root wherever it began, unless it began
    # where f is flat; all later steps approach the root from there.
    for _ in range(SWEEPS):
        over, slope = _slope(r, w, theta)
        if slope == ZERO:
            theta = ZERO
            continue
        step = (over - radius) / slope
        theta = max(theta + step, ZERO)
        if abs(step) <= SETTLED * theta:
            break
    return theta


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _slope(r, w, theta):
    """sum_j w_j max(|r_j| - theta w_j, 0), and minus its derivative in theta."""
    over, slope = ZERO, ZERO
    for j in range(r.shape[0]):
        excess = abs(r[j]) - theta * w[j]
        over += w[j] * max(excess, ZERO)
        slope += w[j] * w[j] * np.float32(excess > ZERO)
    return over, slope


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _step(t, x, z, w, r, theta, beta):
    """z += beta (t - soft(r, theta w) - x), soft(r, c) = r - clip(r, -c, c)."""
    for j in range(t.shape[0]):
        c = theta * w[j]
        z[j] += beta * (t[j] - x[j] - r[j] + min(max(r[j], -c), c))
