"""The search for Bernstein witnesses: rows S and weights G with P_S G = I and rows of small l1 norm (LOWERBOUNDS.md).

For given rows the best G is a convex problem, and Douglas-Rachford splitting between {P_S G = I} and a product of l1
balls, one a key, decides within a hundredth of a second whether they will do. Its state outlives a change of rows. So
the search is a walk over sets of rows: from too many of them down to enough, then up again by swaps.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import scipy.linalg

from rankcert.checker.engine import blas_threads
from rankcert.constructions.base import EFFORTS
from rankcert.errors import InvalidInput
from rankcert.lowerbounds.blocks import Block, open_block
from rankcert.lowerbounds.witness import Found, quantise, threshold
from rankcert.problem import AttentionProblem

__all__ = ["find_bernstein", "sweep_bernstein"]

POWER = 0.5  # of a key's largest weight in the metric
BETA = np.float32(1.8)  # over-relaxation of the splitting
MARGIN = 1e-3  # of eps, for single precision and for rounding to integers
SLACK, POLISH = 4e-3, 500  # more of it that is tried for where that is not enough, and steps of the splitting for it
KEPT = 4  # sets of rows kept until one survives the rounding
STEPS, STALL = 60, 20  # of the splitting for one set of rows, and without a better worst key
GAIN = 0.995  # of the worst key that counts as better
START = 1.5  # singular values above eps / START say how many rows to begin with
SHED = 0.5  # how fast rows are given up at the beginning
NUMERIC = 1e-12  # squared size of what is left of a row beside the chosen ones, below which it is rounding
TENURE = 8  # swaps during which a row that moved stays where it is
PATIENCE = 60  # swaps without a better worst key after which a set of rows is left
PROGRESS = 0.998  # of the worst key that keeps a chain of swaps alive
RETURN = 1.02  # of the lowest worst key of a chain, beyond which it goes back there
PLACE = 1.5  # mean place, about, of the row that moves, in order of promise
CALL = 2e6  # what a call costs beside its arithmetic, in floating-point operations
FLOPS = 3e10  # of the walk in a second on one core, about
WORK = {"fast": 0.3, "balanced": 3.0, "high": 12.0, "max": 60.0}  # seconds at n = m = 256, about


class _Kept(NamedTuple):
    """A feasible set of rows with the state that showed it."""

    rows: list[int]
    state: np.ndarray
    weights: np.ndarray
    threshold: np.ndarray


@dataclass
class _Walk:
    """Sets of rows S of a block and the splitting for them, in the metric G -> diag(size) G."""

    attention: np.ndarray
    eps: float
    random: np.random.Generator
    work: float  # that may still be done, in floating-point operations
    rows: list[int] = field(default_factory=list)
    kept: list[_Kept] = field(default_factory=list)
    covered: float = np.inf  # the largest l1 norm of what the span of P_S leaves of a row

    def __post_init__(self):
        from rankcert.kernels.reflect import reflect_rows  # loads numba

        self._reflect = reflect_rows
        self.limit = (1.0 - MARGIN) / self.eps
        size = self.attention.max(axis=0) ** POWER
        self.size = size / size.mean()
        self.scaled = self.attention / self.size
        self.single = self.scaled.astype(np.float32)
        keys = self.size.size
        self.radius = (self.limit * self.size).astype(np.float32)
        self.threshold = np.zeros(keys, np.float32)
        self.norms = np.zeros(keys, np.float32)

    def put(self, rows: list[int], state: np.ndarray | None = None) -> None:
        """Take these rows; the state (keys, N) defaults to the G of least l2 norm."""
        self.rows = rows
        keys, count = self.size.size, len(rows)
        basis, core = scipy.linalg.qr(self.scaled[rows].T, mode="economic", check_finite=False)
        self.basis64, self.basis = basis, basis.astype(np.float32)
        self.across = np.ascontiguousarray(self.basis.T)
        inverse = scipy.linalg.solve_triangular(core, np.eye(count), trans="T", check_finite=False)
        self.target = inverse.astype(np.float32)
        self.state = self.basis @ self.target if state is None else np.ascontiguousarray(state)
        self._zero = np.zeros((keys, count), np.float32)
        self._ones, self._rest = np.ones(count, np.float32), np.empty(count, np.float32)
        self._reach = np.full(keys, count)
        self.work -= 12 * keys * count**2 + 4 * CALL

    def go(self, steps: int = STEPS) -> bool:
        """Split until P_S G = I has a G within the limit; else `worst` is the smallest norm seen, in units of it."""
        self.worst, since = np.inf, 0
        for _ in range(steps):
            self.solve()
            self._reflect(
                self._zero,
                self.weights,
                self.state,
                self._ones,
                self._reach,
                self.radius,
                BETA,
                self.threshold,
                self.norms,
                self._rest,
            )
            worst = float((self.norms / self.radius).max())
            self.work -= 4 * self._zero.size * (len(self.rows) + 8) + CALL
            if worst <= 1.0:
                self.kept = [*self.kept[1 - KEPT :], self.snapshot()]
                return True
            self.worst, since = (worst, 0) if worst < GAIN * self.worst else (self.worst, since + 1)
            if since > STALL:
                break
        return False

    def snapshot(self) -> _Kept:
        return _Kept(self.rows, self.state.copy(), self.weights, self.threshold.copy())

    def restore(self, kept: _Kept) -> None:
        self.put(list(kept.rows), kept.state.copy())
        self.weights, self.threshold = kept.weights, kept.threshold.copy()

    def polish(self) -> None:
        """Look for a better G for the last set that will do, one that bears more rounding."""
        self.restore(self.kept.pop())
        best = self.snapshot()
        self.radius *= np.float32(1.0 - SLACK)
        if not self.go(POLISH):
            self.kept.append(best)
        self.radius /= np.float32(1.0 - SLACK)

    def solve(self) -> None:
        """weights = the nearest point to the state with P_S G = I."""
        gap = self.across @ self.state
        gap -= self.target
        self.weights = self.state - self.basis @ gap

    def loads(self) -> np.ndarray:
        """How much each row of S adds to the keys that are over the limit."""
        return (self.threshold * self.size.astype(np.float32)) @ np.abs(self.weights)

    def drop(self, places: np.ndarray) -> None:
        """Give up the rows at these places of S. What is left of G still solves."""
        # From G, not from the state: while S will not do, the state drifts away from both sets, the longer the
        # further, and would have to come all the way back.
        keep = np.setdiff1d(np.arange(len(self.rows)), places)
        self.put([self.rows[place] for place in keep], self.weights[:, keep])

    def offers(self) -> tuple[np.ndarray, np.ndarray]:
        """What adding each row would cost the keys over the limit (inf: impossible), and what S leaves of the rows."""
        rest = self.scaled - (self.scaled @ self.basis64) @ self.basis64.T
        self.covered = float((np.abs(rest) @ self.size).max())
        square = (rest * rest).sum(axis=1)
        possible = square > NUMERIC
        possible[self.rows] = False
        price = self.threshold + 1e-3 * self.threshold.mean() + 1e-12
        price = price / self.size / price.sum()
        weight = 1.0 + np.abs(self.single @ self.weights).sum(axis=1)
        cost = np.full(square.size, np.inf)
        np.divide((np.abs(rest) @ price) * weight, square, out=cost, where=possible)
        rest[possible] /= square[possible, None]
        self.work -= self.scaled.size * (6 * len(self.rows) + 20) + 4 * CALL
        return cost, rest

    def add(self, row: int, rest: np.ndarray) -> None:
        """Take one more row, with G' = [G - g P_i G, g], g orthogonal to P_S and P_i g = 1."""
        fresh = rest[row].astype(np.float32)
        state = self.state - np.outer(fresh, self.single[row] @ self.state)
        self.put([*self.rows, row], np.concatenate([state, fresh[:, None]], axis=1))

    def descend(self, rows: np.ndarray) -> None:
        """Give up the rows with the largest loads until the rest will do."""
        self.put(list(rows))
        while not self.go():
            count = len(self.rows)
            if count == 1:
                break
            shed = max(1, int(SHED * count * (1.0 - self.worst**-0.5)))
            self.drop(np.argsort(-self.loads())[:shed])

    def climb(self, progress: Callable[[int, int], None] | None = None) -> None:
        """One row more than the best set, then swaps until the set will do; from the best set again and again."""
        total = self.work
        while self.work > 0:
            self.restore(self.kept[-1])
            cost, rest = self.offers()
            if not np.isfinite(cost).any():
                return
            if self.covered < self.eps:
                return  # P is within eps of its projection to the span of P_S, of rank N: no larger rank is proved
            self.add(self._choose(cost), rest)
            self._swap()
            if progress:
                progress(int(total - max(self.work, 0)), int(total))

    def _choose(self, cost: np.ndarray) -> int:
        """One of the cheapest, at a random place in order of cost."""
        possible = int(np.isfinite(cost).sum())
        place = min(int(self.random.exponential(PLACE)), possible - 1)
        return int(np.argpartition(cost, place)[place])

    def _swap(self) -> None:
        """Swap rows until S will do or nothing is gained any more."""
        moved: dict[int, int] = {}  # row: the turn up to which it stays
        lowest, turn, since, best = np.inf, 0, 0, None
        while self.work > 0 and not self.go():
            turn += 1
            if self.worst < PROGRESS * lowest:
                lowest, since, best = self.worst, turn, self.snapshot()
            elif self.worst > RETURN * lowest:
                self.restore(best)
            if turn - since > PATIENCE:
                return
            held = [row for row, until in moved.items() if until > turn]
            loads = np.where(np.isin(self.rows, held), np.inf, -self.loads())
            if not np.isfinite(loads).any():
                return
            place = self._choose(loads)
            gone = self.rows[place]
            self.drop(np.array([place]))
            self.solve()
            cost, rest = self.offers()
            cost[[*held, gone]] = np.inf
            if not np.isfinite(cost).any():
                return
            row = self._choose(cost)
            moved[gone] = moved[row] = turn + TENURE
            self.add(row, rest)


def find_bernstein(
    problem: AttentionProblem,
    eps: float,
    *,
    effort: str = "balanced",
    seed: int = 0,
    memory: int = 2**32,
    progress: Callable[[int, int], None] | None = None,
) -> Found | None:
    """A Bernstein witness for as large a rank as can be found at eps, 0 < eps < 1; None if there are no queries.

    effort: "fast", "balanced", "high" or "max". seed: of its random choices; same seed, machine and threads: same
    witness. memory: bytes of arrays it may hold. progress: called with (done, total). Ctrl-C returns the best so far.
    Raises InvalidInput for another eps or effort. Source: docs/LOWERBOUNDS.md.
    """
    if not 0.0 < eps < 1.0:
        raise InvalidInput(f"eps must lie between 0 and 1, got {eps!r}")
    if effort not in EFFORTS:
        raise InvalidInput(f"effort must be one of {', '.join(EFFORTS)}, got {effort!r}")
    if not problem.n:
        return None
    block = open_block(problem)
    interrupted = False
    with blas_threads(problem.engine.thread_count):
        walk = _Walk(block.attention, eps, np.random.default_rng(seed), WORK[effort] * FLOPS)
        try:
            walk.descend(_first_rows(block.attention, eps))
            if walk.kept:
                walk.climb(progress)
        except KeyboardInterrupt:
            interrupted = True
        found = _finish(block, walk, eps)
    return found and found.marked(interrupted)


def _first_rows(attention: np.ndarray, eps: float) -> np.ndarray:
    left, values, _ = np.linalg.svd(attention, full_matrices=False)
    count = max(1, int((values > eps / START).sum()))
    return scipy.linalg.qr(left[:, :count].T, mode="economic", pivoting=True, check_finite=False)[2][:count]


def _finish(block: Block, walk: _Walk, eps: float) -> Found | None:
    """The largest set of the walk that survives rounding to integers."""
    while walk.kept:
        kept = walk.kept[-1]
        made = _round(block, walk, kept, eps)
        if made is None:
            walk.polish()
            made = _round(block, walk, walk.kept[-1], eps)
        if made is not None:
            return made
        walk.kept.pop()
    return None


def _round(block: Block, walk: _Walk, kept: _Kept, eps: float) -> Found | None:
    order = np.argsort(kept.rows)
    rows = np.array(kept.rows)[order]
    weights = (kept.weights.astype(np.float64) / walk.size[:, None])[:, order]
    made = quantise(block.attention[rows], weights, eps)
    return made and Found(block.rows[rows], block.groups, *made)


def sweep_bernstein(problem: AttentionProblem) -> Iterator[Found]:
    raise NotImplementedError
