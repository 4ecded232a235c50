"""The search for the smallest rank: a matrix both of rank r and within eps in every row (CONSTRUCTIONS.md, C10).

Two sets have cheap projections: matrices of rank r (a step of subspace iteration) and matrices all of whose rows are
within eps of P's (a soft threshold a row). Douglas-Rachford splitting walks towards a matrix in both. Its state
outlives a change of rank, so that it descends from the truncated singular value decomposition one rank after another.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from rankcert.constructions.base import Factorization, Plan, Search, refuse_memory, refuse_rounding
from rankcert.constructions.states import State, open_state
from rankcert.constructions.subspace import find_subspace
from rankcert.constructions.svd import LARGEST_SIDE, Dense, decompose, hold, spread
from rankcert.problem import AttentionProblem

__all__ = ["Splitting"]

HELD_ARRAYS = 6  # of n x m float64 numbers: P, its decomposition, target and state
LARGEST_DENSE = 1024  # min(n, m) up to which the walk begins at a dense decomposition
SINGLE = 1e-3  # eps from which on single precision carries the state
MARGIN, MARGIN_ROUNDING = 1e-5, 5e-7  # relative and absolute: what single precision may add to a row error
FIRST, FIRST_COARSE = 0.85, 0.65  # first rank tried, in units of the SVD's; from eps = COARSE on
FIRST_PREFIX, FIRST_PREFIX_COARSE = 0.2, 0.09  # the same under a causal mask
COARSE = 0.25
DROPS = ((5, 0.1), (15, 0.05), (40, 0.025))  # (steps it took, share of the rank to drop next); else one
GROWTH = 1.25  # of the rank after a failure with nothing feasible yet
LOWERINGS = ((8, 0.9), (25, 0.96))  # (steps it took, next eps in units of the one reached); else SLOWEST
SLOWEST = 0.99
RESOLUTION = 0.002  # of eps at which `find_eps` stops
KEPT = 3  # factors of the smallest ranks found, kept until one holds in double precision
BETTER = 0.99  # of the worst row that counts as an improvement


class Patience(NamedTuple):
    """Steps at one rank, and steps without a better worst row after which that rank is given up."""

    steps: int
    stall: int


PATIENCE = {
    "fast": Patience(20, 10),
    "balanced": Patience(60, 25),
    "high": Patience(360, 120),
    "max": Patience(1500, 400),
}


# One walk each: (power of a column's maximum in the metric, share of the usual overstep). Which of them gets furthest,
# by a rank or two, is chance.
METRICS = {
    "fast": ((-0.25, 1.0),),
    "balanced": ((-0.25, 1.0),),
    "high": ((-0.25, 1.0),),
    "max": ((-0.25, 1.0), (-0.5, 1.0), (-0.25, 0.95)),
}


class Splitting(Search):
    """Factors of much smaller rank than the truncated singular value decomposition's, where it starts.

    Under a causal mask only allowed pairs are fitted. Works in single precision for eps >= 1e-3, else in double. Holds
    P; beyond min(n, m) = 1024 it starts where `subspace` would stop.
    """

    name = "splitting"
    lemma = "CONSTRUCTIONS.md, C10"

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        if min(problem.n, problem.m) > LARGEST_DENSE and self.effort == "fast":
            return Plan(None, f"beyond min(n, m) = {LARGEST_DENSE} a fast search is that of subspace")
        refusal = refuse_memory(HELD_ARRAYS * problem.n * problem.m, memory)
        return Plan(None, refusal or refuse_rounding(problem, eps), state=memory)

    def refuse_rank(self, problem: AttentionProblem, memory: int) -> str | None:
        """A refusal if the head is too large for `find_eps`, else None."""
        if min(problem.n, problem.m) > LARGEST_SIDE:
            return f"it starts from a dense SVD, of which min(n, m) may be {LARGEST_SIDE} at most"
        return refuse_memory(HELD_ARRAYS * problem.n * problem.m, memory)

    def _start(self, problem: AttentionProblem, eps: float, memory: int) -> tuple[Dense, int, float]:
        """P, the truncated decomposition to begin with, its rank and its largest row error."""
        if min(problem.n, problem.m) <= LARGEST_DENSE:
            dense = decompose(problem)
            found = dense.find_rank(eps - problem.rounding_est)
            return dense, found.rank, found.error
        start = find_subspace(problem, eps, seed=self.seed, memory=memory)
        factors = start.left.astype(np.float64), start.right.astype(np.float64)
        return hold(problem, *factors), start.rank, start.error

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        target = eps - problem.rounding_est
        dense, start, error = self._start(problem, eps, plan.state)
        floor = max(1, _count_peaks(dense, eps))
        best = search = _Walk(self, dense)
        for metric in METRICS[self.effort] if start > floor else ():
            search = _Walk(self, dense)
            with _state(problem, dense, target, metric) as state, search.until_interrupted():
                search.lower_rank(state, target, start, floor)
            best = search if search.rank < best.rank else best
            if search.interrupted or best.rank == floor:
                break
        left, right, error = best.best(target) or (*dense.truncate(start), error)
        return self._pack(problem, search, left, right, error, {"start_rank": start})

    def find_eps(self, problem: AttentionProblem, rank: int) -> Factorization:
        """Factors of a given rank >= 1 whose worst row error is as small as can be found."""
        dense = decompose(problem)
        rank = min(rank, dense.left.shape[1])
        left, right = dense.truncate(rank)
        error = dense.error(left, right)
        search = _Walk(self, dense)
        if error > 4 * problem.rounding_est:
            with (
                _state(problem, dense, min(error, 1.0), METRICS[self.effort][0]) as state,
                search.until_interrupted(),
            ):
                search.lower_eps(state, min(error, 1.0), rank)
        left, right, error = search.best(error) or (left, right, error)
        return self._pack(problem, search, left, right, error, {})

    def _pack(self, problem, search: "_Walk", left, right, error: float, details: dict) -> Factorization:
        left, right = _balance(left, right)
        right = spread(right, search.dense.kept, problem.m)
        details |= {"steps": search.steps, "effort": self.effort}
        return Factorization(left, right, self.name, details, error, search.interrupted)


class _Walk:
    """One walk: `found` are the factors of the last ranks or tolerances that were reached, the best one last."""

    def __init__(self, settings: Splitting, dense: Dense):
        self.patience, self.progress = PATIENCE[settings.effort], settings.progress
        self.dense = dense
        self.found: list[tuple[np.ndarray, np.ndarray]] = []
        self.steps = 0
        self.interrupted = False

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Ctrl-C ends the walk and keeps what it has found."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupted = True

    def best(self, target: float) -> tuple[np.ndarray, np.ndarray, float] | None:
        """The last factors found that hold in double precision, with their error."""
        while self.found:
            left, right = self.found.pop()
            error = self.dense.error(left, right)
            if error <= target:
                return left, right, error
        return None

    @property
    def rank(self) -> float:
        """The smallest rank found, infinite if none is."""
        return self.found[-1][0].shape[1] if self.found else math.inf

    def lower_rank(self, state: State, eps: float, start: int, floor: int) -> None:
        """Descend from below rank `start`, down to `floor` at most."""
        rank = self._begin(state, max(floor, int(_first_share(eps, self.dense) * start)))
        while True:
            took, _ = self._go(state, eps)
            if took:
                self._keep(state)
                if self.progress:
                    self.progress(start - rank, start - floor)
                if rank == floor:
                    return
                share = next((share for steps, share in DROPS if took <= steps), 0.0)
                rank = max(floor, rank - max(1, int(share * rank)))
                state.cut(rank)
            elif self.found:
                return
            elif rank == start - 1:
                return
            else:
                rank = self._begin(state, min(max(int(rank * GROWTH), rank + 1), start - 1))

    def lower_eps(self, state: State, error: float, rank: int) -> None:
        """Descend from a row error that the truncated decomposition has, at a fixed rank."""
        self._begin(state, rank)
        reached, eps = error, error * LOWERINGS[0][1]
        while eps < reached * (1.0 - RESOLUTION):
            took, worst = self._go(state, eps)
            if took:
                self._keep(state)
                reached = worst
                eps = worst * next((share for steps, share in LOWERINGS if took <= steps), SLOWEST)
                state.project()
            else:
                eps = math.sqrt(eps * reached)
            if self.progress:
                self.progress(self.steps, self.steps + self.patience.steps)

    def _begin(self, state: State, rank: int) -> int:
        state.begin(*self.dense.truncate(rank))
        return rank

    def _keep(self, state: State) -> None:
        self.found = [*self.found[1 - KEPT :], state.factors()]

    def _go(self, state: State, eps: float) -> tuple[int, float]:
        """Steps it took until all rows were within eps (0: they never were), and the largest row error then."""
        allowed = eps if state.dtype == np.float64 else eps * (1.0 - MARGIN) - MARGIN_ROUNDING
        lowest, since = math.inf, 0
        for step in range(1, self.patience.steps + 1):
            worst = state.advance(eps)
            self.steps += 1
            if worst <= allowed:
                return step, worst
            lowest, since = (worst, 0) if worst < BETTER * lowest else (lowest, since + 1)
            if since > self.patience.stall:
                break
            state.project()
        return 0, worst


def _state(problem: AttentionProblem, dense: Dense, eps: float, metric: tuple[float, float]):
    reach = np.searchsorted(dense.kept, problem.inputs.reach)
    dtype = np.float32 if eps >= SINGLE else np.float64
    return open_state(dense, reach, metric, dtype, problem.engine.thread_count)


def _first_share(eps: float, dense: Dense) -> float:
    if dense.allowed is None:
        return FIRST_COARSE if eps >= COARSE else FIRST
    return FIRST_PREFIX_COARSE if eps >= COARSE else FIRST_PREFIX


def _count_peaks(dense: Dense, eps: float) -> int:
    """Keys on which some row puts more than (1 + eps) / 2: no smaller rank is within eps (CONSTRUCTIONS.md, C11)."""
    if dense.allowed is not None:
        return 0  # disallowed entries are free, and the argument needs whole rows
    peaked = dense.attention.max(axis=1) > (1.0 + eps) / 2.0
    return np.unique(dense.attention[peaked].argmax(axis=1)).size


def _balance(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same product with an orthonormal right factor: no products larger than they must be."""
    basis, core = np.linalg.qr(right)
    return left @ core.T, basis
