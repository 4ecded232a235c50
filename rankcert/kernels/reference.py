"""The compiled kernels once more in plain NumPy: same signatures, same operations in the same order."""

import numpy as np

__all__ = ["find_extremes", "write_features"]


def write_features(points: np.ndarray, runs: np.ndarray, factor: np.ndarray, out: np.ndarray) -> None:
    """See `rankcert.kernels.monomials.write_features`."""
    out[:, 0] = 1.0
    for start, stop, parent, variable in runs:
        source = out[:, parent : parent + (stop - start)]
        out[:, start:stop] = source * points[:, variable, None] * factor[start:stop]


def find_extremes(
    block: np.ndarray,
    terms: np.ndarray,
    keys: np.ndarray,
    reach: np.ndarray,
    kept: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> None:
    """See `rankcert.kernels.rowspread.find_extremes`."""
    seen = kept & (np.arange(block.shape[1]) < reach[:, None])
    for t in range(terms.shape[1] + 1):
        if t:
            block -= terms[:, t - 1, None] * keys[t - 1]
        low[:, t] = block.min(axis=1, where=seen, initial=np.inf)
        high[:, t] = block.max(axis=1, where=seen, initial=-np.inf)
