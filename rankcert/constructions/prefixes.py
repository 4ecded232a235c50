"""Least squares in which row i sees the first counts[i] rows of a basis only: what a causal mask makes of a fit."""

import numpy as np
import scipy.linalg

__all__ = ["solve_prefixes"]

EXTRA = 128  # rows of the basis by which the prefixes of one group may differ


def solve_prefixes(
    basis: np.ndarray,
    counts: np.ndarray,
    rhs: np.ndarray,
    previous: np.ndarray,
    rho: float,
    gram: np.ndarray | None = None,
) -> np.ndarray:
    """out_i = (G_i + rho I)^-1 (rhs_i + rho previous_i), G_i = sum over j < counts[i] of basis_j basis_j^T.

    basis (m, r), counts (n,) nondecreasing, rhs and previous (n, r); `gram`: that of basis[:counts[0]], which is left
    as that of basis[:counts[-1]]. Suffixes are prefixes of the arrays in reverse order.
    """
    rank = basis.shape[1]
    out = np.empty(rhs.shape)
    if gram is None:
        gram = np.zeros((rank, rank))
        if counts.size:
            gram += basis[: counts[0]].T @ basis[: counts[0]]
    start = 0
    base = int(counts[0]) if counts.size else 0
    # Invariant: out[:start] is done, and `gram` is that of basis[:base], base <= counts[start].
    while start < counts.size:
        if counts[start] > base + EXTRA:
            gram += basis[base : counts[start]].T @ basis[base : counts[start]]
            base = int(counts[start])
        end = min(start + EXTRA, int(np.searchsorted(counts, base + EXTRA, side="right")))
        top = int(counts[end - 1])
        group, extra = slice(start, end), basis[base:top]
        factor = np.linalg.cholesky(gram + rho * np.eye(rank))
        solved = scipy.linalg.solve_triangular(
            factor, (rhs[group] + rho * previous[group]).T, lower=True, check_finite=False
        )
        if top > base:
            # Woodbury: with X = factor^-1 extra^T, (factor factor^T + E_c^T E_c)^-1 needs chol(I + X_c^T X_c), which
            # is the leading minor of one Cholesky factor for every number c of extra rows.
            cross = scipy.linalg.solve_triangular(factor, extra.T, lower=True, check_finite=False)
            minors = np.linalg.cholesky(np.eye(top - base) + cross.T @ cross)
            inner = scipy.linalg.solve_triangular(minors, cross.T @ solved, lower=True, check_finite=False)
            inner[np.arange(base, top)[:, None] >= counts[group]] = 0.0
            inner = scipy.linalg.solve_triangular(
                minors, inner, lower=True, trans="T", overwrite_b=True, check_finite=False
            )
            solved -= cross @ inner
        out[group] = scipy.linalg.solve_triangular(
            factor, solved, lower=True, trans="T", overwrite_b=True, check_finite=False
        ).T
        gram += extra.T @ extra
        start, base = end, top
    return out
