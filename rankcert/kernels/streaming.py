"""Row loops over one tile of P, compiled: each reads and writes a tile once, while it is in cache.

Arrays are float32 or float64, all of one kind. Row i of a tile counts its first `counts[i]` columns; what stands
beyond them is read as nothing and written as zero. Twins in `rankcert.kernels.reference`. Shapes are not checked.
"""

import numpy as np
from numba import njit

from rankcert.kernels import REORDERED

__all__ = ["measure_rows", "pull_rows", "split_rows", "trace_ranks"]

_STEPS = 12  # of Newton's method at most; warm starts need one to four


@njit(cache=True, nogil=True, fastmath=REORDERED)
def measure_rows(tile: np.ndarray, product: np.ndarray, counts: np.ndarray, errors: np.ndarray) -> None:
    """errors[i] = sum_j |tile - product|_ij."""
    for i in range(tile.shape[0]):
        seen, near = tile[i, : counts[i]], product[i, : counts[i]]
        total = tile.dtype.type(0)
        for j in range(seen.size):
            total += abs(seen[j] - near[j])
        errors[i] = total


@njit(cache=True, nogil=True, fastmath=REORDERED)
def trace_ranks(
    rest: np.ndarray, left: np.ndarray, right: np.ndarray, counts: np.ndarray, worst: np.ndarray
) -> None:
    """worst[t] = the largest row error of `rest`, used up, less the first t + 1 products left[:, s] right[s]."""
    worst[:] = rest.dtype.type(0)
    for i in range(rest.shape[0]):
        row = rest[i, : counts[i]]
        # Invariant: before turn t, `row` lacks the products before t.
        for t in range(right.shape[0]):
            factor, key = left[i, t], right[t, : counts[i]]
            total = rest.dtype.type(0)
            for j in range(row.size):
                value = row[j] - factor * key[j]
                row[j] = value
                total += abs(value)
            worst[t] = total if total > worst[t] else worst[t]


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _threshold(row: np.ndarray, start, radius):
    """theta >= 0 with sum_j max(|row_j| - theta, 0) = radius to a thousandth, for a row whose l1 norm is larger."""
    zero = row.dtype.type(0)
    slack = row.dtype.type(1e-3) * radius
    theta = start
    # Invariant: the sum is convex and decreasing in theta, so after one step theta is at most the root.
    for _ in range(_STEPS):
        total, count = zero, np.int32(0)  # as a float, the count would keep the loop from being vectorised
        for j in range(row.size):
            over = abs(row[j]) - theta
            total += max(over, zero)
            count += np.int32(over > zero)
        if abs(total - radius) <= slack:
            break
        theta += (total - radius) / row.dtype.type(count) if count else -theta
        theta = theta if theta > zero else zero
    return theta


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _clip(row: np.ndarray, limit) -> None:
    for j in range(row.size):
        value = row[j] if row[j] < limit else limit
        row[j] = value if value > -limit else -limit


@njit(cache=True, nogil=True, fastmath=REORDERED)
def pull_rows(
    tile: np.ndarray,
    product: np.ndarray,
    counts: np.ndarray,
    radius: float,
    relax: float,
    theta: np.ndarray,
    errors: np.ndarray,
) -> None:
    """product += relax * clip(tile - product, -theta_i, theta_i), which for relax = 1 has row errors <= radius.

    `theta` holds the last thresholds and receives the new ones, `errors` the row errors before the pull.
    """
    real = tile.dtype.type
    rest = np.empty(tile.shape[1], tile.dtype)
    for i in range(tile.shape[0]):
        seen, near, gap = tile[i, : counts[i]], product[i, : counts[i]], rest[: counts[i]]
        total = real(0)
        for j in range(gap.size):
            gap[j] = seen[j] - near[j]
            total += abs(gap[j])
        errors[i] = total
        limit = _threshold(gap, theta[i], real(radius)) if total > real(radius) else real(0)
        theta[i] = limit
        _clip(gap, limit)
        for j in range(gap.size):
            near[j] += real(relax) * gap[j]
        product[i, counts[i] :] = real(0)


@njit(cache=True, nogil=True, fastmath=REORDERED)
def split_rows(
    tile: np.ndarray,
    state: np.ndarray,
    product: np.ndarray,
    dual: np.ndarray,
    scale: np.ndarray,
    counts: np.ndarray,
    radius: float,
    relax: float,
    theta: np.ndarray,
    errors: np.ndarray,
) -> None:
    """One step of Douglas-Rachford splitting on a tile, whose state Z is kept as one byte an entry.

    On entry Z = state + scale_i * dual, `state` being the last product; on return `state` holds the new Z = product +
    scale_i * dual, with new int8 `dual` and `scale`: Z + relax * (the point within `radius` of the tile's row that is
    nearest to 2 product - Z, less product), rounded to 255 levels. `theta`, `errors`: as in `pull_rows`.
    """
    real = tile.dtype.type
    half = real(0.5)
    rest = np.empty(tile.shape[1], tile.dtype)
    for i in range(tile.shape[0]):
        seen, old, new = tile[i, : counts[i]], state[i, : counts[i]], product[i, : counts[i]]
        levels, gap = dual[i, : counts[i]], rest[: counts[i]]
        total, reach, step = real(0), real(0), scale[i]
        for j in range(gap.size):
            old[j] += step * real(np.int32(levels[j]))
        for j in range(gap.size):
            total += abs(seen[j] - new[j])
            gap[j] = seen[j] - real(2) * new[j] + old[j]
            reach += abs(gap[j])
        errors[i] = total
        limit = _threshold(gap, theta[i], real(radius)) if reach > real(radius) else real(0)
        theta[i] = limit
        _clip(gap, limit)
        largest = real(0)
        for j in range(gap.size):
            ahead = old[j] - new[j]
            # the nearest point less product is clip(gap) - ahead
            gap[j] = ahead + real(relax) * (gap[j] - ahead)
            size = abs(gap[j])
            largest = size if size > largest else largest
        step = largest / real(127)
        scale[i] = step
        inverse = real(127) / largest if largest > real(0) else real(0)
        for j in range(gap.size):
            gap[j] = np.floor(gap[j] * inverse + half)
        for j in range(gap.size):
            old[j] = new[j] + step * gap[j]
        for j in range(gap.size):
            levels[j] = np.int8(np.int32(gap[j]))
        state[i, counts[i] :] = real(0)
