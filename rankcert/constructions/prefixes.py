"""Least squares in which row i sees the first counts[i] rows of a basis only: what a causal mask makes of a fit."""

import numpy as np

__all__ = ["find_ridge", "fit_prefixes"]

RIDGE = 1e-6  # of the proximal term, in units of the mean eigenvalue of the Gram matrix
HEIGHT = 32  # rows that share one Cholesky factor


def find_ridge(basis: np.ndarray) -> float:
    """The weight of the proximal term for a fit to this basis (m, r)."""
    return RIDGE * float((basis**2).sum()) / max(1, basis.shape[1]) + 1e-300


def fit_prefixes(
    basis: np.ndarray,
    counts: np.ndarray,
    products: np.ndarray,
    previous: np.ndarray,
    ridge: float,
    gram: np.ndarray | None = None,
) -> np.ndarray:
    """argmin_a sum over j < counts[i] of (z_ij - <a, basis_j>)^2 + ridge |a - previous_i|^2, one row a float64.

    basis (m, r), counts (n,) ascending, products (n, r): sum over j < counts[i] of z_ij basis_j. `gram` (r, r): that
    of basis[:counts[0]] (lower triangle), replaced by that of basis[:counts[-1]]. Suffixes are prefixes of the arrays
    in reverse order. Source: CONSTRUCTIONS.md, C10.
    """
    from rankcert.kernels.prefix import solve_prefixes  # loads numba

    basis, products, previous = (
        np.ascontiguousarray(array, np.float64) for array in (basis, products, previous)
    )
    if gram is None:
        first = basis[: counts[0]] if counts.size else basis[:0]
        gram = first.T @ first
    out = np.empty_like(products)
    solve_prefixes(basis, np.ascontiguousarray(counts), products, previous, ridge, gram, out, HEIGHT)
    return out
