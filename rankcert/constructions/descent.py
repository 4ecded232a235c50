"""Smaller ranks for factors that are within eps already, in passes over row tiles (CONSTRUCTIONS.md, C13)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import scipy.linalg

from rankcert.constructions.prefixes import find_ridge, fit_prefixes
from rankcert.constructions.tiles import Tiles, accumulate

__all__ = ["Budget", "Descent", "Factors", "balance"]

SHRINK = (
    0.7  # share of the target to which a polish pulls a row: less overshoots, more takes twice the passes
)
OVER = 1.95  # of the pull, relaxation
SPREAD = 0.1  # of the mean row error, added to each before it becomes a weight
RADIUS = 0.999  # share of the target that is the splitting's ball
RELAX = 1.8, 1.5  # of the splitting; under a causal mask, where the fit is not a projection
BALANCE = 10  # passes under a causal mask until the factors are balanced again
PRODUCTS, OVERHEAD = 4, 64  # columns of products in a pass: a rank; and what computing P costs, in that unit
PROGRESS = 0.99  # of the worst row error: less of a gain is none


class Factors(NamedTuple):
    """left (n, r), right (m', r) over the kept keys of some tiles."""

    left: np.ndarray
    right: np.ndarray

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    def cut(self, rank: int) -> "Factors":
        """The first columns."""
        return Factors(self.left[:, :rank].copy(), self.right[:, :rank].copy())


class Budget(NamedTuple):
    """How long to look: work in all, in columns of products with P for each rank of the start; passes for one rank;
    passes without a gain."""

    work: int
    each: int
    patience: int


class _Sums(NamedTuple):
    """Of one thread: T^T W^2 A, A^T W^2 A, and the Gram matrix of the first seen[0] keys (causal only)."""

    moment: np.ndarray
    gram: np.ndarray
    prefix: np.ndarray
    seen: list[int]


@dataclass
class Descent:
    """Alternates between a target T for every row and the factors of given rank that fit all T best.

    one_byte: T is the state of a Douglas-Rachford splitting, kept as one byte a pair. Else T is the last product,
    pulled towards the ball of radius `target` around P's row, and hard rows gain weight in the fit.

    found: the last two feasible factors of all ranks tried and their worst row errors, smallest rank last; good after
    an exception too.
    """

    tiles: Tiles
    start: Factors
    one_byte: bool
    budget: Budget
    progress: Callable[[int, int], None] | None = None
    found: list[tuple[Factors, float]] = field(default_factory=list)
    passes: int = 0

    def run(self, aim: float) -> None:
        """Begin at aim * (rank of the start), and go down while the budget lasts."""
        rank = max(1, int(aim * self.start.rank))
        self._reset(rank)
        tried, best, since = 0, np.inf, 0
        total, done = self.budget.work * (self.start.rank + OVERHEAD // 2), 0
        while done < total:
            measured = self.factors
            worst = self._step()
            tried += 1
            done += PRODUCTS * rank + OVERHEAD
            if self.progress:
                self.progress(min(done, total), total)
            if worst <= self.tiles.target:
                self.found = [*self.found[-1:], (measured, worst)]
                if rank == 1:
                    return
                rank -= _drop(rank, tried)
                if self.tiles.causal:
                    self._reset(rank)  # singular values know nothing of which entries are free
                else:
                    self.factors = balance(self.factors).cut(rank)
                tried, best, since = 0, np.inf, 0
                continue
            if worst < PROGRESS * best:
                best, since = worst, tried
            if tried < self.budget.each and tried - since < self.budget.patience:
                continue
            if self.found:
                return
            rank = int(np.sqrt(rank * self.start.rank)) + 1
            if rank >= self.start.rank:
                return
            self._reset(rank)
            tried, best, since = 0, np.inf, 0

    def _reset(self, rank: int) -> None:
        tiles = self.tiles
        self.factors = self.before = self.start.cut(rank)
        self.errors = np.full(tiles.n, tiles.target, tiles.dtype)
        self.theta = np.zeros(tiles.n, tiles.dtype)
        self.weights = np.ones(tiles.n, tiles.dtype)
        self.scale = np.zeros(tiles.n, tiles.dtype)
        self.dual: dict[int, np.ndarray] = {}

    def _step(self) -> float:
        """One pass: the worst row error of `factors`, which are then replaced by the fit to their targets."""
        tiles, (left, right) = self.tiles, self.factors
        rank = right.shape[1]
        fit = np.empty_like(left)
        basis = right.astype(np.float64) if tiles.causal else right
        ridge = find_ridge(basis)
        mean = max(float(self.errors.mean()), 1e-30)
        self.weights /= self.weights.max()  # only their ratios count, and they grow by a factor a pass

        def begin(start: int) -> _Sums:
            seen = int(tiles.counts[start]) if tiles.causal else 0
            prefix = basis[:seen].T @ basis[:seen]
            return _Sums(np.zeros((tiles.m, rank), tiles.dtype), np.zeros((rank, rank)), prefix, [seen])

        def visit(rows: slice, tile: np.ndarray, sums: _Sums) -> None:
            counts, width = tiles.counts[rows], tile.shape[1]
            product = np.matmul(left[rows], right[:width].T, out=tiles.buffer("product", *tile.shape))
            target = (
                self._split(rows, tile, product) if self.one_byte else self._pull(rows, tile, product, mean)
            )
            fit[rows] = moment = target @ right[:width]
            if tiles.causal:
                between = basis[sums.seen[0] : counts[0]]
                sums.prefix[:] += between.T @ between
                sums.seen[0] = int(counts[-1])
                fit[rows] = fit_prefixes(basis[:width], counts, moment, left[rows], ridge, sums.prefix)
            weighted = fit[rows] * self.weights[rows, None]
            accumulate(sums.moment, target, weighted * self.weights[rows, None])
            weighted = weighted.astype(np.float64)
            sums.gram[:] += weighted.T @ weighted

        first, *others = tiles.sweep(begin, visit)
        for other in others:
            first.moment[:] += other.moment
            first.gram[:] += other.gram
        self.before = self.factors
        self.passes += 1
        self.factors = self._fit_keys(fit, first.moment, first.gram)
        return float(self.errors.max())

    def _fit_keys(self, left: np.ndarray, moment: np.ndarray, gram: np.ndarray) -> Factors:
        """The best right factor for a left one."""
        tiles = self.tiles
        if not tiles.causal:
            gram[np.diag_indices_from(gram)] += 1e-12 * gram.trace() / len(gram) + 1e-300
            right = scipy.linalg.solve(gram, moment.T, assume_a="pos", check_finite=False).T
            right, core = scipy.linalg.qr(right, mode="economic", overwrite_a=True, check_finite=False)
            return Factors(left @ core.T.astype(tiles.dtype), right.astype(tiles.dtype))
        # a key is seen by the rows from some row on: prefixes of everything in reverse order
        basis = (left * self.weights[:, None]).astype(np.float64)[::-1]
        counts = tiles.n - np.searchsorted(tiles.counts, np.arange(tiles.m), side="right")
        right = fit_prefixes(basis, counts[::-1], moment[::-1], self.factors.right[::-1], find_ridge(basis))[
            ::-1
        ]
        factors = Factors(left, right.astype(tiles.dtype))
        return balance(factors) if self.passes % BALANCE == 0 else factors

    def _pull(self, rows: slice, tile: np.ndarray, product: np.ndarray, mean: float) -> np.ndarray:
        from rankcert.kernels.streaming import pull_rows

        errors = self.errors[rows]
        radius = SHRINK * self.tiles.target
        pull_rows(tile, product, self.tiles.counts[rows], radius, OVER, self.theta[rows], errors)
        self.weights[rows] *= np.sqrt(errors / mean + SPREAD)
        return product

    def _split(self, rows: slice, tile: np.ndarray, product: np.ndarray) -> np.ndarray:
        from rankcert.kernels.streaming import split_rows

        tiles, (left, right) = self.tiles, self.before
        state = np.matmul(left[rows], right[: tile.shape[1]].T, out=tiles.buffer("state", *tile.shape))
        dual = self.dual.setdefault(rows.start, np.zeros(tile.shape, np.int8))
        split_rows(
            tile,
            state,
            product,
            dual,
            self.scale[rows],
            tiles.counts[rows],
            RADIUS * tiles.target,
            RELAX[tiles.causal],
            self.theta[rows],
            self.errors[rows],
        )
        return state


def balance(factors: Factors) -> Factors:
    """The same product, right orthonormal, columns in order of their singular values."""
    key_basis, key_core = scipy.linalg.qr(factors.right, mode="economic", check_finite=False)
    query_basis, query_core = scipy.linalg.qr(factors.left, mode="economic", check_finite=False)
    u, values, vt = np.linalg.svd(query_core @ key_core.T)
    return Factors(query_basis @ (u * values), key_basis @ vt.T)


def _drop(rank: int, tried: int) -> int:
    """Ranks to go down after a rank that took so many passes."""
    share = 0.2 if tried <= 10 else 0.1 if tried <= 20 else 0.05 if tried <= 40 else 0.02
    return min(rank - 1, max(1, int(share * rank)))
