"""The compiled kernels once more in plain NumPy: same signatures, and the same operations in the same order, except
that those of `streaming` add in any order and find thresholds by Newton's method, here by sorting."""

import numpy as np

__all__ = ["find_extremes", "measure_rows", "pull_rows", "split_rows", "trace_ranks", "write_features"]


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


def measure_rows(tile: np.ndarray, product: np.ndarray, counts: np.ndarray, errors: np.ndarray) -> None:
    """See `rankcert.kernels.streaming.measure_rows`."""
    for i, count in enumerate(counts):
        errors[i] = np.abs(tile[i, :count] - product[i, :count]).sum()


def trace_ranks(
    rest: np.ndarray, left: np.ndarray, right: np.ndarray, counts: np.ndarray, worst: np.ndarray
) -> None:
    """See `rankcert.kernels.streaming.trace_ranks`."""
    seen = np.arange(rest.shape[1]) < counts[:, None]
    for t in range(right.shape[0]):
        rest -= left[:, t, None] * right[t]
        worst[t] = np.abs(rest).sum(axis=1, where=seen).max()


def _threshold(row: np.ndarray, radius: float) -> float:
    """theta >= 0 with sum_j max(|row_j| - theta, 0) = radius, 0 if that is less for theta = 0."""
    falling = np.sort(np.abs(row))[::-1]
    if falling.sum() <= radius:
        return 0.0
    thetas = (np.cumsum(falling) - radius) / np.arange(1, row.size + 1)
    return float(thetas[np.flatnonzero(falling > thetas)[-1]])


def pull_rows(
    tile: np.ndarray,
    product: np.ndarray,
    counts: np.ndarray,
    radius: float,
    relax: float,
    theta: np.ndarray,
    errors: np.ndarray,
) -> None:
    """See `rankcert.kernels.streaming.pull_rows`."""
    measure_rows(tile, product, counts, errors)
    for i, count in enumerate(counts):
        gap = tile[i, :count] - product[i, :count]
        theta[i] = _threshold(gap, radius)
        product[i, :count] += relax * np.clip(gap, -theta[i], theta[i])
        product[i, count:] = 0.0


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
    """See `rankcert.kernels.streaming.split_rows`."""
    measure_rows(tile, product, counts, errors)
    for i, count in enumerate(counts):
        new = product[i, :count]
        ahead = state[i, :count] + scale[i] * dual[i, :count] - new
        gap = tile[i, :count] - new + ahead
        theta[i] = _threshold(gap, radius)
        ahead += relax * (np.clip(gap, -theta[i], theta[i]) - ahead)
        scale[i] = np.abs(ahead).max(initial=0.0) / 127
        dual[i, :count] = np.floor(ahead / scale[i] + 0.5) if scale[i] > 0 else 0
        state[i, :count] = new + scale[i] * dual[i, :count]
        state[i, count:] = 0.0
