"""The compiled kernels once more in plain NumPy, with the same signatures.

`write_features` and `find_extremes` do the same operations in the same order. The others add in any order and find
thresholds by Newton's method, here by sorting: they agree to rounding.
"""

import numpy as np

__all__ = [
    "find_extremes",
    "measure_rows",
    "pull_rows",
    "reflect_rows",
    "solve_prefixes",
    "split_rows",
    "trace_ranks",
    "write_features",
]


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
    gram: np.ndarray,
    out: np.ndarray,
    height: int,
) -> None:
    """See `rankcert.kernels.prefix.solve_prefixes`."""
    for i, count in enumerate(counts):
        between = basis[counts[i - 1] : count] if i else basis[:0]
        gram += between.T @ between
        normal = np.tril(gram) + np.tril(gram, -1).T + rho * np.eye(basis.shape[1])
        out[i] = np.linalg.solve(normal, rhs[i] + rho * previous[i])


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
