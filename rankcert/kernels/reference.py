"""The compiled kernels once more in plain NumPy, with the same signatures.

`write_features` and `find_extremes` do the same operations in the same order; the other two agree to rounding.
"""

import numpy as np

__all__ = ["find_extremes", "reflect_rows", "solve_prefixes", "write_features"]


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


def reflect_rows(
    target: np.ndarray,
    low: np.ndarray,
    state: np.ndarray,
    weight: np.ndarray,
    reach: np.ndarray,
    radius: np.ndarray,
    beta: np.floating,
    threshold: np.ndarray,
    errors: np.ndarray,
    rest: np.ndarray,
) -> None:
    """See `rankcert.kernels.reflect.reflect_rows`."""
    for i, width in enumerate(reach):
        t, x, z, w = target[i, :width], low[i, :width], state[i, :width], weight[:width]
        r = t - (2 * x - z)
        errors[i] = (w * np.abs(t - x)).sum()
        threshold[i] = 0.0
        if (w * np.abs(r)).sum() > radius[i]:
            # the multiplier by sorting where each |r_j| / w_j drops out
            order = np.argsort(-np.abs(r) / w)
            sums, squares = np.cumsum((w * np.abs(r))[order]), np.cumsum((w * w)[order])
            candidates = (sums - radius[i]) / squares
            active = np.flatnonzero((np.abs(r) / w)[order] > candidates)[-1]
            threshold[i] = candidates[active]
        z += beta * (t - np.sign(r) * np.maximum(np.abs(r) - threshold[i] * w, 0.0) - x)


def solve_prefixes(
    basis: np.ndarray,
    counts: np.ndarray,
    rhs: np.ndarray,
    previous: np.ndarray,
    rho: float,
    out: np.ndarray,
    height: int,
) -> None:
    """See `rankcert.kernels.prefix.solve_prefixes`."""
    for i, count in enumerate(counts):
        gram = basis[:count].T @ basis[:count] + rho * np.eye(basis.shape[1])
        out[i] = np.linalg.solve(gram, rhs[i] + rho * previous[i])
