"""Rows of monomial features, compiled (twin: `rankcert.kernels.reference.write_features`)."""

import numpy as np
from numba import njit

__all__ = ["write_features"]


@njit(cache=True, nogil=True)
def write_features(points: np.ndarray, runs: np.ndarray, factor: np.ndarray, out: np.ndarray) -> None:
    """Write the features of each row of `points` (n, r) into `out` (n, R), by `monomial_table(r, D)`.

    <out_i, out'_j> summed over the features of one degree a is <x_i, y_j>^a (THEORY.md, Lemma 5).
    Shapes are not checked.
    """
    for i in range(points.shape[0]):
        row = out[i]
        row[0] = 1.0
        # Invariant: before run t, row[:start] holds the features of point i.
        for t in range(runs.shape[0]):
            start, stop, parent, variable = runs[t, 0], runs[t, 1], runs[t, 2], runs[t, 3]
            x = points[i, variable]
            for c in range(stop - start):
                row[start + c] = row[parent + c] * x * factor[start + c]
