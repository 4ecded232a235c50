"""Heads too large to hold P: its leading subspace found in passes over row tiles (CONSTRUCTIONS.md, C12)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.linalg

from rankcert.checker.engine import blas_threads
from rankcert.constructions.base import Factorization, Plan, Search, refuse_memory, refuse_rounding
from rankcert.constructions.descent import Budget, Descent, Factors, balance
from rankcert.constructions.tiles import HEIGHT, Tiles, accumulate
from rankcert.problem import AttentionProblem

__all__ = ["Start", "Subspace", "find_subspace"]

FIRST = 64  # columns of the first sketch
SAMPLE = 256  # rows that say whether a sketch is wide enough
WATCHED = 128  # rows added to those that a rank is searched on
ROOM = 1.05, 8  # columns refined for a rank of b: 1.05 b + 8
INDEPENDENT = 1e-2  # least part of a column, of norm 1, that those before it lack, for Cholesky's method
EVERY = 4  # keys of which one is looked at for the weights
SPREAD = 0.1  # of the typical row error, added to each before it becomes a weight


WIDE = 0.25  # eps from which the first aim is lower
AIMS = {  # first rank tried, as a share of the start's: (not causal, causal) below and from eps = WIDE
    False: (0.8, 0.35),
    True: (0.65, 0.2),
}
BUDGETS = {
    "balanced": Budget(40, 25, 15),
    "high": Budget(120, 60, 25),
    "max": Budget(600, 300, 100),
}
HOLD = 0.1  # of `memory`: P is kept between passes if it needs no more
BYTE = 1.1  # bytes a pair of the splitting's state


class Subspace(Search):
    """The leading right singular subspace of P with adaptive row weights, then smaller ranks from there.

    O((n + m) rank) memory: P is computed again by tiles in every pass, unless it is small beside the memory allowed.
    Effort "fast" stops at the truncated factorization, of about the rank of the truncated SVD. Others go on, with a
    splitting whose state is one byte a pair where that fits into memory; else, and under a causal mask, where it is
    slower, with a weighted polish.
    """

    name = "subspace"
    lemma = "CONSTRUCTIONS.md, C12"

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        refusal = refuse_rounding(problem, eps)
        if not refusal:
            least = min(FIRST, problem.n, problem.m)
            threads = problem.engine.thread_count
            refusal = refuse_memory(_bytes(problem.n, problem.m, least, threads, 8) // 8, memory)
        return Plan(None, refusal, state=memory)

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        memory = plan.state
        start = find_subspace(problem, eps, seed=self.seed, memory=memory)
        tiles = start.tiles
        details: dict[str, int | float | str] = {
            "precision": "single" if tiles.dtype == np.float32 else "double",
            "start_rank": start.rank,
            "start_passes": start.passes,
        }
        factors, feasible = Factors(start.left, start.right), start.error <= tiles.target
        start_error = float(start.error)
        del start
        descent, interrupted = None, False
        if self.effort != "fast" and feasible and factors.rank > 1:
            fits = BYTE * tiles.n * tiles.m + _held(tiles, factors.rank) <= memory
            one_byte = fits and not tiles.causal
            descent = Descent(tiles, factors, one_byte, BUDGETS[self.effort], self.progress)
            details["state"] = "one byte" if one_byte else "none"
            try:
                with blas_threads(tiles.threads):
                    descent.run(AIMS[eps >= WIDE][tiles.causal])
            except KeyboardInterrupt:
                interrupted = True
            details["passes"] = descent.passes
        made = None
        for candidate, error in [(factors, start_error), *(descent.found if descent else [])]:
            left, right = _exact(tiles, candidate)
            made = Factorization(left, right, self.name, details, error, interrupted, made)
        return made


def _exact(tiles: Tiles, factors: Factors) -> tuple[np.ndarray, np.ndarray]:
    """In float64 and over all keys; right (nearly) orthonormal, which keeps the checker's rounding term small."""
    factors = Factors(factors.left.astype(np.float64), factors.right.astype(np.float64))
    if tiles.causal:
        factors = balance(factors)
    right = np.zeros((tiles.problem.m, factors.rank))
    right[tiles.kept] = factors.right
    return factors.left, right


class Start(NamedTuple):
    """Factors of the smallest feasible rank, in order of (weighted) singular values; right (m', rank) is orthonormal.

    They are over the kept keys of `tiles`, in its dtype. error: of the worst row; above tiles.target if memory was too
    little. passes: how often P was computed.
    """

    tiles: Tiles
    left: np.ndarray
    right: np.ndarray
    error: float
    passes: int

    @property
    def rank(self) -> int:
        return self.right.shape[1]


def find_subspace(
    problem: AttentionProblem,
    eps: float,
    *,
    seed: int = 0,
    memory: int = 2**32,
) -> Start:
    """A truncated factorization of P within eps, of about the rank of the truncated SVD, in O((n + m) rank) memory.

    Threads are those of problem.engine. P is held only where it is small beside `memory`.
    """
    held = 8 * problem.n * problem.m  # at most
    hold = held <= memory * HOLD
    tiles = Tiles(problem, eps, hold=hold)
    finder = _Finder(tiles, np.random.default_rng(seed), _widest(tiles, memory - held if hold else memory))
    with blas_threads(tiles.threads):
        return finder.run()


def _bytes(n: int, m: int, width: int, threads: int, size: int) -> int:
    """Memory of the search at a sketch of that width, its numbers of `size` bytes; or of the factors in float64."""
    sketch = size * width * ((3 + threads) * m + 2 * n) + 40 * width**2
    return max(sketch, 16 * (n + m) * width) + 4 * size * threads * HEIGHT * m


def _held(tiles: Tiles, width: int) -> int:
    return _bytes(tiles.n, tiles.m, width, tiles.threads, tiles.dtype.itemsize)


def _widest(tiles: Tiles, memory: int) -> int:
    """The widest sketch that fits."""
    low, high = 0, min(tiles.n, tiles.m)
    while low < high:
        middle = (low + high + 1) // 2
        if _held(tiles, middle) <= memory:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class _Finder:
    """The state of `find_subspace`: an orthonormal basis (m', width), sketch = basis core, and the rows to test on."""

    tiles: Tiles
    random: np.random.Generator
    widest: int

    def __post_init__(self):
        tiles = self.tiles
        self.basis = np.empty((tiles.m, 0), tiles.dtype)
        self.core = np.empty((0, 0))
        self.sample = np.unique(np.linspace(0, tiles.n - 1, min(tiles.n, SAMPLE)).astype(np.int64))
        self.passes = 0

    def run(self) -> Start:
        tiles = self.tiles
        while True:
            guess = self._grow()
            width = min(self.basis.shape[1], int(ROOM[0] * guess) + ROOM[1])
            errors = self._refine(guess, width)
            left, right = self._project(self._weights(errors))
            rank, error = self._search(left, right, np.argsort(errors)[-WATCHED:])
            if error <= tiles.target or self.basis.shape[1] == self.widest:
                break
        if error > tiles.target and self.widest == min(tiles.n, tiles.m):
            left, right = self._everything()
            rank, error = self.widest, 0.0
        return Start(tiles, left[:, :rank], right[:, :rank], error, self.passes)

    def _grow(self) -> int:
        """Widen the basis until the sampled rows are within the target; the rank at which they are."""
        watched = self.tiles.rows(self.sample)
        counts = self.tiles.counts[self.sample]
        wide = self.basis.shape[1] == 0
        # Invariant: before each turn, `basis` is orthonormal, and does not suffice for the sample (or is empty).
        while True:
            width = self.basis.shape[1]
            if wide or not width:
                width = max(2 * width, FIRST)
            else:
                width += max(width // 3, FIRST)
            self._widen(min(width, self.widest))
            left = watched @ self.basis[: watched.shape[1]]
            error = _errors(watched, counts, left, self.basis).max()
            if error <= self.tiles.target or self.basis.shape[1] == self.widest:
                break
            wide = error > 2 * self.tiles.target
        self._sort()
        left = watched @ self.basis[: watched.shape[1]]
        return _first(watched, counts, left, np.ascontiguousarray(self.basis.T), 1, self.tiles.target)

    def _widen(self, width: int) -> None:
        """Add P^T P G to the sketch, G Gaussian less what the basis has of it."""
        tiles, old = self.tiles, self.basis
        fresh = self.random.standard_normal((tiles.m, width - old.shape[1]), dtype=tiles.dtype)
        fresh -= old @ (old.T @ fresh)
        fresh = self._gram_times(fresh)
        overlap = np.zeros((old.shape[1], fresh.shape[1]))
        for _ in range(2):  # once leaves rounding errors
            part = old.T @ fresh
            fresh -= old @ part
            overlap += part
        fresh, core = _orthonormal(fresh)
        self.basis = np.concatenate([old, fresh], axis=1)
        self.core = np.block([[self.core, overlap], [np.zeros(overlap.T.shape), core]])

    def _sort(self) -> None:
        """Rotate the basis to the order of the singular values of the sketch."""
        order = _leading((self.core @ self.core.T).astype(self.tiles.dtype))
        self.basis = self.basis @ order

    def _gram_times(self, columns: np.ndarray) -> np.ndarray:
        def visit(rows, tile, total):
            accumulate(total, tile, tile @ columns[: tile.shape[1]])

        return self._sum(visit, columns.shape)

    def _sum(self, visit, shape: tuple[int, int]) -> np.ndarray:
        self.passes += 1
        total, *others = self.tiles.sweep(lambda start: np.zeros(shape, self.tiles.dtype), visit)
        for other in others:
            total += other
        return total

    def _refine(self, rank: int, width: int) -> np.ndarray:
        """Replace the first `width` columns by a basis of P^T W^2 P times them; W gives weight to rows that `rank` of
        them fit badly. Returns the errors of the rows at `rank`, estimated from one key in EVERY."""
        tiles = self.tiles
        basis = np.ascontiguousarray(self.basis[:, :width])
        sampled = np.ascontiguousarray(basis[::EVERY, :rank])
        errors = np.empty(tiles.n, tiles.dtype)

        def visit(rows, tile, total):
            left = tile @ basis[: tile.shape[1]]
            seen = -(-tiles.counts[rows] // EVERY)
            errors[rows] = EVERY * _errors(
                np.ascontiguousarray(tile[:, ::EVERY]), seen, left[:, :rank], sampled
            )
            accumulate(total, tile, left * self._weights(errors[rows])[:, None] ** 2)

        self.basis, self.core = _orthonormal(self._sum(visit, basis.shape))
        return errors

    def _weights(self, errors: np.ndarray) -> np.ndarray:
        typical = self.tiles.target / 2
        return np.sqrt(errors / typical + SPREAD)

    def _project(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """left = P basis and right = basis, rotated to the order of the singular values of W left."""
        tiles, basis = self.tiles, self.basis
        left = np.empty((tiles.n, basis.shape[1]), tiles.dtype)

        def visit(rows, tile, gram):
            left[rows] = tile @ basis[: tile.shape[1]]
            weighted = (left[rows] * weights[rows, None]).astype(np.float64)
            gram += weighted.T @ weighted

        self.passes += 1
        grams = tiles.sweep(lambda start: np.zeros(2 * basis.shape[1:]), visit)
        rotation = _leading(sum(grams)).astype(tiles.dtype)
        return left @ rotation, basis @ rotation

    def _search(self, left: np.ndarray, right: np.ndarray, watched: np.ndarray) -> tuple[int, float]:
        """The first rank that all rows pass (all columns if none is), and its error."""
        tiles, full = self.tiles, left.shape[1]
        across = np.ascontiguousarray(right.T)
        watched, rank = np.sort(watched), 1
        # Invariant: every rank below `rank` is refused by some row.
        while True:
            tile = tiles.rows(watched)
            rank = _first(tile, tiles.counts[watched], left[watched], across, rank, tiles.target)
            errors = self._row_errors(left[:, :rank], right[:, :rank])
            error = float(errors.max())
            hard = np.argsort(errors)[-WATCHED:]
            hard = hard[errors[hard] > tiles.target]
            self.sample = np.union1d(self.sample, hard[-SAMPLE // 4 :])
            if error <= tiles.target or rank == full:
                return rank, error
            watched = np.union1d(watched, hard)

    def _row_errors(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        tiles = self.tiles
        errors = np.empty(tiles.n, tiles.dtype)

        def visit(rows, tile, _):
            product = tiles.buffer("product", *tile.shape)
            errors[rows] = _errors(tile, tiles.counts[rows], left[rows], right, product)

        self.passes += 1
        tiles.sweep(lambda start: None, visit)
        return errors

    def _everything(self) -> tuple[np.ndarray, np.ndarray]:
        """P itself, of full rank: what is left when no subspace will do."""
        tiles = self.tiles
        rows = np.zeros((tiles.n, tiles.m), tiles.dtype)
        for start in range(0, tiles.n, tiles.height):
            tile = tiles.rows(slice(start, start + tiles.height))
            rows[start : start + tiles.height, : tile.shape[1]] = tile
        if tiles.n <= tiles.m:
            return np.eye(tiles.n, dtype=tiles.dtype), rows.T
        return rows, np.eye(tiles.m, dtype=tiles.dtype)


def _orthonormal(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """columns = basis core, by Cholesky where no column nearly depends on those before it: in a third of QR's time."""
    size = np.sqrt(np.einsum("ij,ij->j", columns, columns, dtype=np.float64))
    if size.min(initial=np.inf) > 0.0:
        unit = (columns / size.astype(columns.dtype)).astype(np.float64)
        core, failed = scipy.linalg.lapack.dpotrf(unit.T @ unit)
        if not failed and core.diagonal().min(initial=1.0) > INDEPENDENT:
            core = core * size
            basis = scipy.linalg.solve_triangular(
                core.astype(columns.dtype), columns.T, trans="T", check_finite=False
            )
            return basis.T, core
    basis, core = scipy.linalg.qr(columns, mode="economic", overwrite_a=True, check_finite=False)
    return basis, core.astype(np.float64)


def _leading(gram: np.ndarray) -> np.ndarray:
    """Eigenvectors as columns, largest eigenvalue first."""
    return scipy.linalg.eigh(gram, check_finite=False)[1][:, ::-1]


def _errors(
    tile: np.ndarray, counts: np.ndarray, left: np.ndarray, right: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Row errors of left right^T; `out` takes the product."""
    from rankcert.kernels.streaming import measure_rows

    errors = np.empty(tile.shape[0], tile.dtype)
    measure_rows(tile, np.matmul(left, right[: tile.shape[1]].T, out=out), counts, errors)
    return errors


def _first(
    tile: np.ndarray, counts: np.ndarray, left: np.ndarray, right: np.ndarray, rank: int, target: float
) -> int:
    """The first rank >= `rank` at which all rows of the tile, used up, are within the target; all if there is none.

    Errors need not fall with the rank, under a causal mask least of all: so every rank is looked at, right (r, m).
    """
    from rankcert.kernels.streaming import trace_ranks

    tile -= left[:, : rank - 1] @ right[: rank - 1, : tile.shape[1]]
    worst = np.empty(right.shape[0] - rank + 1, tile.dtype)
    trace_ranks(tile, left[:, rank - 1 :], right[rank - 1 :], counts, worst)
    passed = np.flatnonzero(worst <= target)
    return rank + int(passed[0]) if passed.size else right.shape[0]
