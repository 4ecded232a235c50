"""Least squares of every row over its own prefix of a basis, compiled (twin in `rankcert.kernels.reference`)."""

import numpy as np
from numba import njit

from rankcert.kernels import REORDERED

__all__ = ["solve_prefixes"]


@njit(cache=True, nogil=True)
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
    """out_i = (sum_{j < counts_i} v_j v_j^T + rho)^-1 (rhs_i + rho previous_i), v_j the rows of `basis`.

    All float64, C order: basis (m, r), rhs, previous, out (n, r); counts (n,) int64, ascending, at most m; rho > 0.
    gram (r, r), of which only the lower triangle is used: sum_{j < counts_0} v_j v_j^T, replaced by the sum over
    j < counts_(n-1). Rows are done `height` at a time, with one Cholesky factorization of the Gram matrix of the keys
    that all of them see and one for the keys that only some of them see: O(n r (r + height)). Shapes are not checked.
    Source: docs/CONSTRUCTIONS.md, C10.
    """
    n, r = rhs.shape
    factor = np.empty((r, r))
    seen = counts[0] if n else 0
    start = 0
    while start < n:
        # a block ends after `height` rows or before more than `height` keys that only some of its rows see
        first = counts[start]
        stop = start + 1
        while stop < n and stop - start < height and counts[stop] - first <= height:
            stop += 1
        extra = counts[stop - 1] - first
        # Invariant: out[:start] is done, and gram is the sum over the first `seen` keys, seen <= first
        _add_gram(gram, basis[seen:first])
        seen = first
        factor[:] = gram
        for s in range(r):
            factor[s, s] += rho
        _cholesky(factor)
        y = np.empty((r, stop - start))
        for i in range(start, stop):
            for s in range(r):
                y[s, i - start] = rhs[i, s] + rho * previous[i, s]
        _solve_lower(factor, y)
        if extra > 0:
            x = np.empty((r, extra))
            for j in range(extra):
                for s in range(r):
                    x[s, j] = basis[first + j, s]
            _solve_lower(factor, x)
            small = np.zeros((extra, extra))
            for j in range(extra):
                small[j, j] = 1.0
            _add_gram(small, np.ascontiguousarray(x))
            _cholesky(small)
            w = np.zeros((extra, stop - start))
            _add_product(x, y, w)
            _solve_lower(small, w)
            for i in range(start, stop):
                for j in range(counts[i] - first, extra):
                    w[j, i - start] = 0.0
            _solve_upper(small, w)
            _take_product(x, w, y)
        _solve_upper(factor, y)
        for i in range(start, stop):
            for s in range(r):
                out[i, s] = y[s, i - start]
        start = stop
    if n:
        _add_gram(gram, basis[seen : counts[n - 1]])


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _add_gram(gram, rows):
    """gram += rows^T rows, lower triangle."""
    for j in range(rows.shape[0]):
        row = rows[j]
        for s in range(row.size):
            value = row[s]
            line = gram[s]
            for t in range(s + 1):
                line[t] += value * row[t]


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _cholesky(a):
    """The lower triangle of a becomes its Cholesky factor's."""
    for s in range(a.shape[0]):
        line = a[s]
        for t in range(s):
            other = a[t]
            total = line[t]
            for u in range(t):
                total -= line[u] * other[u]
            line[t] = total / other[t]
        total = line[s]
        for u in range(s):
            total -= line[u] * line[u]
        line[s] = np.sqrt(max(total, 1e-300))


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _solve_lower(factor, y):
    """y = factor^-1 y, all columns at once."""
    for s in range(y.shape[0]):
        line = y[s]
        for t in range(s):
            value, other = factor[s, t], y[t]
            for c in range(line.size):
                line[c] -= value * other[c]
        value = 1.0 / factor[s, s]
        for c in range(line.size):
            line[c] *= value


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _solve_upper(factor, y):
    """y = factor^-T y, all columns at once."""
    for s in range(y.shape[0] - 1, -1, -1):
        line = y[s]
        value = 1.0 / factor[s, s]
        for c in range(line.size):
            line[c] *= value
        for t in range(s):
            value, other = factor[s, t], y[t]
            for c in range(line.size):
                other[c] -= value * line[c]


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _add_product(x, y, out):
    """out += x^T y."""
    for s in range(x.shape[0]):
        for j in range(x.shape[1]):
            value, line, row = x[s, j], out[j], y[s]
            for c in range(row.size):
                line[c] += value * row[c]


@njit(cache=True, nogil=True, fastmath=REORDERED)
def _take_product(x, w, y):
    """y -= x w."""
    for s in range(x.shape[0]):
        line = y[s]
        for j in range(x.shape[1]):
            value, row = x[s, j], w[j]
            for c in range(line.size):
                line[c] -= value * row[c]
