"""The state of a splitting (CONSTRUCTIONS.md, C10): where it is, and its two projections.

Everything is held in a mild metric, diag(row weights) P diag(column weights): it changes no rank, turns row errors
into weighted sums, and lets rows and columns of every size be heard. Rows are worked on in tiles of fixed height, so
that the number of threads changes no result.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from scipy.linalg import get_blas_funcs, get_lapack_funcs

from rankcert.checker.engine import blas_threads
from rankcert.constructions.prefixes import find_ridge, fit_prefixes
from rankcert.constructions.svd import Dense

__all__ = ["State", "open_state"]

ROW_POWER = -0.25  # of a row's l2 norm in the metric
TILE_ROWS = 256
SMALL = 2**20  # entries of P up to which one tile and one thread are fastest
JITTER = 1e-6  # on the diagonal of a Gram matrix of unit columns, in single precision
REBALANCE = 10  # causal fits between two rotations of the factors to singular order
TINY = 1e-30

Run = Callable[[Callable[[slice], np.ndarray | None]], list]


@contextmanager
def open_state(
    dense: Dense, reach: np.ndarray, metric: tuple[float, float], dtype: type, threads: int
) -> "Iterator[State]":
    """A state for one head; `reach` (n,) counts the kept keys each row may see.

    metric: the power of a column's maximum in it, and the share of the usual overstep that is taken.
    """
    n, m = dense.attention.shape
    height = n if n * m <= SMALL else TILE_ROWS
    tiles = [slice(i, min(i + height, n)) for i in range(0, n, height)]
    kind = FullState if dense.allowed is None else PrefixState
    with blas_threads(1):
        if len(tiles) == 1 or threads == 1:
            yield kind(dense, reach, metric, dtype, lambda work: [work(tile) for tile in tiles])
        else:
            with ThreadPoolExecutor(threads) as pool:
                yield kind(dense, reach, metric, dtype, lambda work: list(pool.map(work, tiles)))


class State(ABC):
    """target = P in the metric; state (n, m), the point of the splitting; left right^T, its projection to rank r."""

    shrink: float  # share of eps that a row's ball gets
    beta: float  # how far past the projections a step goes

    def __init__(self, dense: Dense, reach: np.ndarray, metric: tuple[float, float], dtype: type, run: Run):
        from rankcert.kernels.reflect import reflect_rows  # loads numba

        attention = dense.attention
        self._reflect, self._run, self.dtype = reflect_rows, run, np.dtype(dtype)
        self._beta = self.beta * metric[1]
        row = np.maximum(np.sqrt((attention**2).sum(axis=1)), TINY) ** ROW_POWER
        column = np.maximum(attention.max(axis=0), TINY) ** metric[0]
        self._row, self._column = row / row.mean(), column / column.mean()
        self.target = np.empty(attention.shape, dtype)
        np.multiply(attention, self._row[:, None], out=self.target, casting="same_kind")
        self.target *= self._column.astype(dtype)
        self._weight = (1.0 / self._column).astype(dtype)
        self._reach = reach
        self._errors = np.zeros(reach.size, dtype)
        self._threshold = np.zeros(reach.size, dtype)
        self.state = np.empty_like(self.target)
        self.left = self.right = np.empty((0, 0))

    def begin(self, left: np.ndarray, right: np.ndarray) -> None:
        """Start afresh from factors of P."""
        self.left, self.right = left * self._row[:, None], right * self._column[:, None]
        self._threshold[:] = 0.0
        self._begin()
        self.project()

    def advance(self, eps: float) -> float:
        """The largest row error of the projection; then the state's reflections in both sets."""
        radius = (self.shrink * eps * self._row).astype(self.dtype)
        right = np.ascontiguousarray(self.right, self.dtype)

        def work(rows: slice) -> None:
            low = self.left[rows].astype(self.dtype, copy=False) @ right.T
            self._reflect(
                self.target[rows],
                low,
                self.state[rows],
                self._weight,
                self._reach[rows],
                radius[rows],
                self.dtype.type(self._beta),
                self._threshold[rows],
                self._errors[rows],
                np.empty(right.shape[0], self.dtype),
            )

        self._run(work)
        return float((self._errors / self._row).max(initial=0.0))

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """The projection as factors of P, float64."""
        return self.left / self._row[:, None], self.right / self._column[:, None]

    def cut(self, rank: int) -> None:
        """Go on at a smaller rank, without the weakest directions; the state stays."""
        self.left, self.right = self.left[:, :rank], self.right[:, :rank]
        self.project()

    @abstractmethod
    def _begin(self) -> None:
        """Set the state, from left and right."""

    @abstractmethod
    def project(self) -> None:
        """Set left and right: rank r and near the state on the pairs that count."""


class FullState(State):
    """Every pair counts: the projection is a step of subspace iteration from the last one."""

    shrink, beta = 0.999, 1.9

    def _begin(self) -> None:
        self.left, self.right = self.left.astype(self.dtype), self.right.astype(self.dtype)

        def work(rows: slice) -> None:
            np.matmul(self.left[rows], self.right.T, out=self.state[rows])

        self._run(work)

    def project(self) -> None:
        product = np.concatenate(self._run(lambda rows: self.state[rows] @ self.right))
        self.left = _orthonormalise(product)
        parts = self._run(lambda rows: self.state[rows].T @ self.left[rows])
        self.right = parts[0]
        for part in parts[1:]:
            self.right += part


class PrefixState(State):
    """Only pairs (i, j < reach_i) count: rows and then keys are fitted to the state, each over the pairs it has.

    The state is zero at all other pairs, so that state @ right sums over a row's own pairs.
    """

    shrink, beta = 0.98, 1.5

    def __init__(self, dense: Dense, reach: np.ndarray, metric: tuple[float, float], dtype: type, run: Run):
        super().__init__(dense, reach, metric, dtype, run)
        n, m = dense.attention.shape
        # keys in reverse order see prefixes of the rows in reverse order
        self._seen_by = np.ascontiguousarray(n - np.searchsorted(reach, np.arange(m), side="right")[::-1])
        self._age = 0

    def _begin(self) -> None:
        self._balance()
        self.state[:] = self.target
        self._age = 0

    def cut(self, rank: int) -> None:
        self._balance()
        super().cut(rank)

    def project(self) -> None:
        self._age += 1
        if self._age % REBALANCE == 0:
            self._balance()
        right = self.right.astype(self.dtype)
        products = np.concatenate(self._run(lambda rows: self.state[rows] @ right))
        self.left = fit_prefixes(self.right, self._reach, products, self.left, find_ridge(self.right))
        left = self.left.astype(self.dtype)
        parts = self._run(lambda rows: self.state[rows].T @ left[rows])
        products = np.sum(parts, axis=0)
        ridge = find_ridge(self.left)
        fitted = fit_prefixes(self.left[::-1], self._seen_by, products[::-1], self.right[::-1], ridge)
        self.right = fitted[::-1]

    def _balance(self) -> None:
        """The same product, its factors rotated to singular order and of equal size."""
        left_basis, left_core = np.linalg.qr(self.left)
        right_basis, right_core = np.linalg.qr(self.right)
        u, values, vt = np.linalg.svd(left_core @ right_core.T)
        root = np.sqrt(values)
        self.left, self.right = left_basis @ (u * root), right_basis @ (vt.T * root)


def _orthonormalise(columns: np.ndarray) -> np.ndarray:
    """An orthonormal basis, its leading columns spanning what theirs did, by Cholesky if that goes, else Householder.

    What is factorized is the Gram matrix of the columns scaled to length 1: of the others, single precision would
    lose the small ones.
    """
    gram = columns.T @ columns
    lengths = np.sqrt(np.maximum(gram.diagonal(), TINY))
    gram /= lengths * lengths[:, None]
    gram.flat[:: gram.shape[0] + 1] += JITTER
    (potrf,) = get_lapack_funcs(("potrf",), (gram,))
    (trsm,) = get_blas_funcs(("trsm",), (gram,))
    factor, failed = potrf(gram.T, overwrite_a=1)
    if failed:
        return np.linalg.qr(columns / lengths)[0]
    factor *= lengths
    return trsm(1.0, factor, columns.T, trans_a=1, overwrite_b=1).T
