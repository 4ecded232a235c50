"""The search for Bernstein witnesses: rows S and weights G with P_S G = I and rows of small l1 norm (LOWERBOUNDS.md).

For given rows the best G is a convex problem, and Douglas-Rachford splitting between {P_S G = I} and a product of l1
balls, one a key, decides within a hundredth of a second whether they will do. Its state outlives a change of rows. So
the search is a walk over sets of rows: from too many of them down to enough, then up again by swaps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.sparse

from rankcert.checker.engine import blas_threads
from rankcert.constructions.base import EFFORTS
from rankcert.errors import InvalidInput
from rankcert.lowerbounds.blocks import Block, open_block, try_splits
from rankcert.lowerbounds.witness import SAFETY, Found, quantise, threshold
from rankcert.problem import AttentionProblem

__all__ = ["find_bernstein", "sweep_bernstein"]

POWER = 0.5  # of a key's largest weight in the metric
FAINT = 1e-12  # weight below which keys are not told apart, so that single precision holds the metric
BETA = np.float32(1.8)  # over-relaxation of the splitting
MARGIN = 1e-3  # of eps, for single precision and for rounding to integers
SLACK = 4e-3  # more of it that is tried for where that is not enough
LONG = 500  # steps of the splitting where they are worth it
STEPS, STALL = 60, 20  # of the splitting for one set of rows, and without a better worst key
GAIN = 0.995  # of the worst key that counts as better
STARTS = (1.0, 1.5)  # singular values above eps / one of them say how many rows to begin with
SHED = 0.5  # how fast rows are given up at the beginning
NUMERIC = 1e-12  # squared size of what is left of a row beside the chosen ones, below which it is rounding
EXACT_NEAR = 1.04  # a set that missed by less is worth a linear program
EXACT_SIZE = 4000  # of at most that many weights
TENURE = 8  # swaps during which a row that moved stays where it is
PATIENCE = 60  # swaps without a better worst key after which a set of rows is left
PROGRESS = 0.998  # of the worst key that keeps a chain of swaps alive
RETURN = 1.02  # of the lowest worst key of a chain, beyond which it goes back there
PLACE = 1.5  # mean place, about, of the row that moves, in order of promise
CALL = 2e6  # what a call costs beside its arithmetic, in floating-point operations
GROWTH = 0.75  # of the work with the number of pairs beyond 2^16: linear would be hours at n = 2048
FLOPS = 3e10  # of the walk in a second on one core, about
SIDE = {
    "fast": 1024,
    "balanced": 1024,
    "high": 2048,
    "max": 2048,
}  # rows and groups of keys looked at, at most
SPLIT = 0.05  # of the work, for the block of each split
SWEEP = 0.25  # of the work of one eps, for each of a sweep
GRID = tuple(float(x) for x in np.round(np.geomspace(0.9, 0.02, 24), 4))
WORK = {"fast": 0.3, "balanced": 3.8, "high": 15.0, "max": 80.0}  # seconds at n = m = 256, about


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
    best: _Kept | None = None  # the largest set that will do
    nearest: float = np.inf  # the lowest worst key at one more
    missed: _Kept | None = None  # and the set that has it
    covered: float = np.inf  # the largest l1 norm of what the span of P_S leaves of a row

    def __post_init__(self):
        from rankcert.kernels.reflect import reflect_rows  # loads numba

        self.total = self.work
        self._reflect = reflect_rows
        self.limit = (1.0 - MARGIN) / self.eps
        size = np.maximum(self.attention.max(axis=0), FAINT) ** POWER
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
                self._keep(self.snapshot())
                return True
            self.worst, since = (worst, 0) if worst < GAIN * self.worst else (self.worst, since + 1)
            if since > STALL:
                break
        return False

    def _keep(self, kept: _Kept) -> None:
        if len(kept.rows) > self.rank:
            self.best, self.nearest, self.missed = kept, np.inf, None

    def snapshot(self) -> _Kept:
        return _Kept(self.rows, self.state.copy(), self.weights, self.threshold.copy())

    def restore(self, kept: _Kept) -> None:
        self.put(list(kept.rows), kept.state.copy())
        self.weights, self.threshold = kept.weights, kept.threshold.copy()

    def finish_exactly(self) -> None:
        """Solve the linear program for the set that came nearest to one row more, if it is small and came near."""
        missed = self.missed
        if self.nearest > EXACT_NEAR or missed is None or missed.weights.size > EXACT_SIZE:
            return
        weights = solve_exactly(self.attention[missed.rows])
        if weights is None or np.abs(weights).sum(axis=1).max() > self.limit:
            return
        single = (weights * self.size[:, None]).astype(np.float32)
        self._keep(missed._replace(state=single, weights=single))

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

    @property
    def rank(self) -> int:
        """Rows of the largest set that will do, 0 if none will."""
        return len(self.best.rows) if self.best else 0

    @property
    def merit(self) -> tuple[int, float]:
        """What tells better walks: the rank, then how near it came to one more."""
        return self.rank, -self.nearest

    def climb(self, most: int | None, progress: Callable[[int, int], None] | None) -> None:
        """One row more than the best set, then swaps until the set will do; from the best set again and again."""
        total = max(self.work, 1.0)
        while self.work > 0 and self.best and (most is None or self.rank < most):
            self.restore(self.best)
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
                if lowest < self.nearest:
                    self.nearest, self.missed = lowest, best
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
    most: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Found | None:
    """A Bernstein witness for as large a rank as can be found at eps, 0 < eps < 1; None if there is none.

    effort: "fast", "balanced", "high" or "max". seed: of its random choices; same seed, machine and threads: same
    witness. memory: bytes of arrays it may hold; longer heads are searched on a sample of rows and groups of keys.
    most: a rank known to be enough, where it stops. progress: called with (done, total). Ctrl-C returns the best so
    far. Under a causal mask the witness is for the causal rank. Raises InvalidInput for another eps or effort. Nothing
    is proved before the checker agrees. Source: docs/LOWERBOUNDS.md, L1.

    >>> import numpy as np
    >>> problem = AttentionProblem(9.0 * np.eye(3), np.eye(3), scale=1.0)
    >>> find_bernstein(problem, 0.5).rank
    3
    """
    _require(eps, effort)
    if not problem.n:
        return None
    return _Search(problem, effort, seed, memory, most, progress).run(eps)


def sweep_bernstein(
    problem: AttentionProblem,
    grid: Sequence[float] = GRID,
    *,
    effort: str = "balanced",
    seed: int = 0,
    memory: int = 2**32,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Found]:
    """Witnesses for a curve of eps-rank against eps, one for each eps of the grid that has one, largest eps first.

    Each proves its rank for every eps below its `eps_est`, which is above its eps of the grid. Work of the effort, in
    all, is what `find_bernstein` does for a quarter of the grid. Other arguments and errors: as there. After Ctrl-C it
    yields the best so far, marked, and ends. Source: docs/LOWERBOUNDS.md, L1.
    """
    for eps in grid:
        _require(eps, effort)
    if not problem.n:
        return
    search = _Search(problem, effort, seed, memory, None, None)
    search.work *= SWEEP
    falling = sorted(set(grid), reverse=True)
    for done, eps in enumerate(falling):
        found = search.run(eps)
        if found is not None:
            yield found
            if found.interrupted:
                return
        if progress:
            progress(done + 1, len(falling))


def _require(eps: float, effort: str) -> None:
    if not 0.0 < eps < 1.0:
        raise InvalidInput(f"eps must lie between 0 and 1, got {eps!r}")
    if effort not in EFFORTS:
        raise InvalidInput(f"effort must be one of {', '.join(EFFORTS)}, got {effort!r}")


class _Search:
    """The search on one head: its blocks, and the rows that did for the last eps, good for every smaller one."""

    def __init__(self, problem: AttentionProblem, effort: str, seed: int, memory: int, most, progress):
        self.problem, self.seed, self.memory = problem, seed, memory
        self.side, self.work = SIDE[effort], WORK[effort] * FLOPS
        self.exact = effort in ("high", "max")
        self.most, self.progress = most, progress
        self.blocks: dict[int, Block] = {}
        self.before: dict[int, list[int]] = {}

    def run(self, eps: float) -> Found | None:
        walks: dict[int, _Walk] = {}

        def visit(first: int):
            walks[first] = self._open(first, eps)
            self._start(first, walks[first])
            return walks[first].merit

        interrupted = False
        with blas_threads(self.problem.engine.thread_count):
            try:
                try_splits(self.problem, visit)
                best = max(walks.values(), key=lambda walk: walk.merit)
                best.work -= sum(walk.total - walk.work for walk in walks.values() if walk is not best)
                best.climb(self.most, self.progress)
                if self.exact:
                    best.finish_exactly()
            except KeyboardInterrupt:
                interrupted = True
            for first in sorted(walks, key=lambda first: walks[first].merit, reverse=True):
                if walks[first].best:
                    self.before[first] = walks[first].best.rows
                found = _finish(self.blocks[first], walks[first], eps)
                if found:
                    return found.marked(interrupted)
        return None

    def _open(self, first: int, eps: float) -> "_Walk":
        if first not in self.blocks:
            self.blocks[first] = open_block(self.problem, first, self.side, self.memory, self.seed)
        attention = self.blocks[first].attention
        work = self.work * max(1.0, attention.size / 2**16) ** GROWTH
        return _Walk(attention, eps, np.random.default_rng(self.seed), work)

    def _start(self, first: int, walk: "_Walk") -> None:
        """A set of rows that will do, grown a while if there are other blocks."""
        for rows in _first_rows(walk.attention, walk.eps):
            walk.descend(rows)
        before = self.before.get(first, [])
        if len(before) > walk.rank:
            walk.put(list(before))
            walk.go(LONG)
        if self.problem.inputs.causal:
            spare = (1.0 - SPLIT) * walk.work
            walk.work -= spare
            walk.climb(self.most, None)
            walk.work += spare


def solve_exactly(seen: np.ndarray) -> np.ndarray | None:
    """G (K, N) with seen G = I and the smallest largest l1 norm of a row, by linear programming; None if HiGHS fails.

    seen (N, K). Interior points: N K unknowns of either sign take about a second for N K = 4000.
    """
    count, keys = seen.shape
    # unknowns: the positive parts of G, the negative parts, and t; P_S G = I, and row sums of both at most t
    solves = scipy.sparse.kron(scipy.sparse.csr_matrix(seen), scipy.sparse.eye(count))
    solves = scipy.sparse.hstack([solves, -solves, scipy.sparse.csr_matrix((count * count, 1))])
    sums = scipy.sparse.kron(scipy.sparse.eye(keys), np.ones((1, count)))
    sums = scipy.sparse.hstack([sums, sums, -np.ones((keys, 1))])
    cost = np.zeros(2 * keys * count + 1)
    cost[-1] = 1.0
    found = scipy.optimize.linprog(
        cost,
        A_ub=sums.tocsc(),
        b_ub=np.zeros(keys),
        A_eq=solves.tocsc(),
        b_eq=np.eye(count).ravel(),
        method="highs-ipm",
    )
    if found.x is None:
        return None
    parts = found.x[:-1].reshape(2, keys, count)
    return parts[0] - parts[1]


def _first_rows(attention: np.ndarray, eps: float) -> list[np.ndarray]:
    """Sets of rows to give up from: pivots of the leading left singular vectors, for each of STARTS."""
    left, values, _ = np.linalg.svd(attention, full_matrices=False)
    counts = {max(1, int((values > eps / start).sum())) for start in STARTS}
    return [
        scipy.linalg.qr(left[:, :count].T, mode="economic", pivoting=True, check_finite=False)[2][:count]
        for count in sorted(counts)
    ]


def _finish(block: Block, walk: _Walk, eps: float) -> Found | None:
    """The best set of the walk in integers; with a smaller G, then with a row less, until it survives the rounding."""
    if walk.best:
        walk.restore(walk.best)
        made = _round(block, walk, eps)
        while made is None and len(walk.rows) > 1:
            walk.radius *= np.float32(1.0 - SLACK)
            if walk.go(LONG):
                made = _round(block, walk, eps)
            if made is None:
                walk.drop(np.argmax(walk.loads(), keepdims=True))
        if made:
            return made
    # one row and ones: rank 1 for every eps below what the row puts on the block
    mass = block.attention.sum(axis=1)
    row = int(mass.argmax())
    ones = np.ones((block.attention.shape[1], 1), np.int8)
    reached = threshold(block.attention[[row]], ones)
    return Found(block.rows[[row]], block.groups, ones, reached) if reached * (1.0 - SAFETY) > eps else None


def _round(block: Block, walk: _Walk, eps: float) -> Found | None:
    order = np.argsort(walk.rows)
    rows = np.array(walk.rows)[order]
    weights = (walk.weights.astype(np.float64) / walk.size[:, None])[:, order]
    made = quantise(block.attention[rows], weights, eps)
    return made and Found(block.rows[rows], block.groups, *made)
