"""Row extremes of a matrix while rank-one terms are taken off it, compiled (twin in `rankcert.kernels.reference`)."""

import numpy as np
from numba import njit

__all__ = ["find_extremes"]


@njit(cache=True, nogil=True)
def find_extremes(
    block: np.ndarray,
    terms: np.ndarray,
    keys: np.ndarray,
    reach: np.ndarray,
    kept: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> None:
    """Extremes of each row of block - sum_{s < t} terms[:, s] keys[s] over its kept keys, for t = 0, 1, .., f.

    block (rows, m), used up; terms (rows, f), keys (f, m). Row i keeps key j iff kept[j] and j < reach[i].
    low, high (rows, f + 1) receive minimum and maximum, +inf and -inf for a row that keeps nothing.
    Shapes are not checked.
    """
    for i in range(block.shape[0]):
        rest = block[i, : reach[i]]
        least, most = np.inf, -np.inf
        for j in range(rest.size):
            # NaN passes through the subtractions and loses every comparison: a masked key changes nothing
            value = rest[j] if kept[j] else np.nan
            rest[j] = value
            least = value if value < least else least
            most = value if value > most else most
        low[i, 0], high[i, 0] = least, most
        # Invariant: before term t, `rest` is the row with t terms taken off, and columns 0..t of low, high are done.
        for t in range(terms.shape[1]):
            factor, key = terms[i, t], keys[t]
            least, most = np.inf, -np.inf
            for j in range(rest.size):
                value = rest[j] - factor * key[j]
                rest[j] = value
                least = value if value < least else least
                most = value if value > most else most
            low[i, t + 1], high[i, t + 1] = least, most
