"""A few keys and rows as they are, and a construction for the rest (CONSTRUCTIONS.md, C7 and C8)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rankcert.constructions.base import Construction, Factorization, Plan, refuse_memory, refuse_rounding
from rankcert.constructions.cells import coarse, widest
from rankcert.constructions.levels import read_levels
from rankcert.geometry import once_per_problem
from rankcert.kernels.table import count_monomials
from rankcert.problem import AttentionProblem

__all__ = ["Compose", "Split", "compose", "rest_problem"]

MOST_KEYS = 64  # taken one by one, in the order in which they shrink half-ranges most
SHARPNESS = 16.0  # a row of half-range W has e^(SHARPNESS (W / largest W - 1)) votes on which key comes next
TRIED = 4  # splits for which bases are planned
BLOCK_ENTRIES = 2**21
LARGEST_DEGREE = 10


class Split(NamedTuple):
    """Exact keys and exact rows, ascending."""

    keys: np.ndarray
    rows: np.ndarray

    @property
    def rank(self) -> int:
        return self.keys.size + self.rows.size


class _Rest(NamedTuple):
    """The problem without the exact keys, on the rows from `first` on. share: of every row of those, the weight it
    keeps; 0 for exact rows, whose query in the problem is that of another row."""

    problem: AttentionProblem
    first: int
    share: np.ndarray


class _Choice(NamedTuple):
    split: Split
    rest: _Rest
    base: Construction
    plan: Plan
    eps: float


class Compose(Construction):
    """Exact keys and rows (attention sinks, hot rows), each at the price of one, and a base for what is left.

    Which keys: greedily those that shrink the widest half-ranges of logits. How many: by counting what a minimax
    polynomial would then cost, and planning every base on the few best counts.
    """

    name = "compose"
    lemma = "CONSTRUCTIONS.md, C7 and C8"

    def __init__(self, bases: Sequence[Construction]):
        self.bases = tuple(bases)

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        refusal = refuse_rounding(problem, eps)
        if refusal:
            return Plan(None, refusal)
        best: tuple[int, _Choice] | None = None
        for split in _splits(problem, coarse(eps - problem.rounding_est)):
            choice = self._plan_rest(problem, split, eps, memory)
            if choice and (best is None or split.rank + choice.plan.rank < best[0]):
                best = split.rank + choice.plan.rank, choice
        if best is None:
            return Plan(None, "no small set of exact keys and rows leaves a rest that counts a smaller rank")
        rank, choice = best
        details: dict[str, int | float | str] = {
            "base": choice.base.name,
            "exact_keys": choice.split.keys.size,
            "exact_rows": choice.split.rows.size,
        }
        details |= {f"base_{name}": value for name, value in choice.plan.details.items()}
        return Plan(rank, refuse_memory((problem.n + problem.m) * rank, memory), details, choice)

    def _plan_rest(self, problem: AttentionProblem, split: Split, eps: float, memory: int) -> _Choice | None:
        rest = rest_problem(problem, split)
        if rest is None:
            return None
        allowed = min(eps / max(float(rest.share.max(initial=0.0)), eps), 0.99)
        best = None
        for base in self.bases:
            plan = base.plan(rest.problem, allowed, memory=memory)
            if plan.refusal is None and plan.rank is None:  # only building tells
                rank = base.build(rest.problem, plan, allowed).rank
                plan = Plan(rank, None, plan.details, plan.state)
            if (
                plan.refusal is None
                and plan.rank is not None
                and (best is None or plan.rank < best.plan.rank)
            ):
                best = _Choice(split, rest, base, plan, allowed)
        return best

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        choice: _Choice = plan.state
        base = choice.base.build(choice.rest.problem, choice.plan, choice.eps)
        factors = compose(problem, choice.split, choice.rest, base)
        return Factorization(factors.left, factors.right, self.name, plan.details, factors.error_est)


def compose(problem: AttentionProblem, split: Split, rest: _Rest, base: Factorization) -> Factorization:
    """C7's factors: exact keys, exact rows, and a factorization of the rest, scaled by each row's share."""
    x = problem.inputs
    left = np.zeros((problem.n, split.rank + base.rank))
    right = np.zeros((problem.m, split.rank + base.rank))
    keys, rows = slice(0, split.keys.size), slice(split.keys.size, split.rank)
    logits = (
        x.scale * (x.query @ x.key[split.keys].T) + x.key_bias[split.keys] - problem.log_normaliser[:, None]
    )
    left[:, keys] = np.exp(np.where(split.keys < x.reach[:, None], logits, -np.inf))
    left[split.rows, keys] = 0.0
    right[split.keys, np.arange(split.keys.size)] = 1.0
    left[split.rows, np.arange(rows.start, rows.stop)] = 1.0
    right[:, rows] = problem.attention_rows(split.rows).T
    left[rest.first :, split.rank :] = base.left * rest.share[:, None]
    right[:, split.rank :] = base.right
    estimate = None if base.error_est is None else base.error_est * float(rest.share.max(initial=0.0))
    return Factorization(left, right, "compose", {"base": base.method}, estimate)


def rest_problem(problem: AttentionProblem, split: Split) -> _Rest | None:
    """The problem with the exact keys masked, or None if they are all that any row keeps.

    Rows that keep nothing else are the first ones, as reach grows with the row: they are left off. Exact rows take
    the query of the first row that is not exact, so that they make nothing harder.
    """
    x = problem.inputs
    bias = x.key_bias.copy()
    bias[split.keys] = -np.inf
    left_over = np.flatnonzero(bias > -np.inf)
    first = int(np.searchsorted(x.reach, left_over[0] + 1)) if left_over.size else problem.n
    ordinary = np.setdiff1d(np.arange(first, problem.n), split.rows)
    if not ordinary.size:
        return None
    query = x.query.copy()
    query[split.rows] = query[ordinary[0]]
    rest = AttentionProblem(
        query[first:],
        x.key,
        scale=x.scale,
        key_bias=bias,
        causal=x.causal,
        offset=x.offset + first if x.causal else 0,
        engine=problem.engine,
    )
    share = np.zeros(problem.n)
    share[ordinary] = np.exp(rest.log_normaliser[ordinary - first] - problem.log_normaliser[ordinary])
    return _Rest(rest, first, share[first:])


def _splits(problem: AttentionProblem, target: float) -> list[Split]:
    """The few splits after which a minimax polynomial counts the smallest ranks, without repeating a count of keys."""
    if not problem.n:
        return []
    dimension = read_levels(problem).query.shape[1]
    trivial = min(problem.n, problem.m)
    order, ranges = _order_keys(problem)
    alone, counted = trivial, []
    for keys, half_range in enumerate(ranges):
        falling = np.sort(half_range)[::-1]
        for degree in range(LARGEST_DEGREE + 1):
            base = count_monomials(dimension, degree)
            if keys + base >= trivial:
                break
            rows = int(np.count_nonzero(falling > widest(degree, target)))
            if keys + rows:
                counted.append((keys + rows + base, keys, rows))
            else:
                alone = min(alone, base)
    splits, taken = [], set()
    for rank, keys, rows in sorted(counted):
        if rank < alone and keys not in taken:
            taken.add(keys)
            worst = np.argsort(-ranges[keys], kind="stable")[:rows]
            splits.append(Split(np.sort(order[:keys]), np.sort(worst)))
        if len(splits) == TRIED:
            break
    return splits


@once_per_problem
def _order_keys(problem: AttentionProblem) -> tuple[np.ndarray, list[np.ndarray]]:
    """Keys in greedy order, and the half-ranges of all rows once the first 0, 1, 2, .. of them are taken out."""
    levels = read_levels(problem)
    depth = min(MOST_KEYS, problem.m - 1) + 1
    highest, lowest = (np.zeros((problem.n, depth), dtype=np.int64) for _ in range(2))
    high, low = np.empty((problem.n, depth)), np.empty((problem.n, depth))
    for rows, logits, hidden in _logit_blocks(problem, levels):
        for sign, index, value in ((1.0, highest, high), (-1.0, lowest, low)):
            signed = np.where(hidden, -np.inf, sign * logits)
            some = np.argpartition(-signed, depth - 1, axis=1)[:, :depth]
            there = np.take_along_axis(signed, some, axis=1)
            place = np.argsort(-there, axis=1, kind="stable")
            index[rows] = np.take_along_axis(some, place, axis=1)
            value[rows] = sign * np.take_along_axis(there, place, axis=1)
    # Rows see different numbers of keys; beyond a row's own there is -inf in `high` and +inf in `low`.
    everyone, gone = np.arange(problem.n), np.zeros(problem.m, dtype=bool)
    top, bottom = np.zeros((2, problem.n), dtype=np.int64)
    order: list[int] = []
    ranges: list[np.ndarray] = []
    while True:
        wide = np.maximum(high[everyone, top] - low[everyone, bottom], 0.0)
        wide[~np.isfinite(wide)] = 0.0
        ranges.append(wide / 2)
        if len(order) == depth - 1 or not wide.any():
            return np.array(order, dtype=np.int64), ranges
        say = np.exp(SHARPNESS * (wide / wide.max() - 1.0))
        votes = np.zeros(problem.m)
        for index, value, at in ((highest, high, top), (lowest, low, bottom)):
            following = _next_present(index, gone, at + 1)
            with np.errstate(invalid="ignore"):  # a row that keeps nothing any more
                gain = np.abs(value[everyone, at] - value[everyone, following])
            votes += np.bincount(
                index[everyone, at],
                weights=say * np.where(np.isfinite(gain), gain, wide),
                minlength=problem.m,
            )
        chosen = int(np.argmax(votes))
        gone[chosen] = True
        order.append(chosen)
        top, bottom = _next_present(highest, gone, top), _next_present(lowest, gone, bottom)


def _next_present(index: np.ndarray, gone: np.ndarray, at: np.ndarray) -> np.ndarray:
    """For each row the first place >= at whose key is not gone (the last place at the latest)."""
    at = np.minimum(at, index.shape[1] - 1)
    everyone = np.arange(at.size)
    while True:
        stale = gone[index[everyone, at]] & (at < index.shape[1] - 1)
        if not stale.any():
            return at
        at = at + stale


def _logit_blocks(problem: AttentionProblem, levels) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    height = max(1, BLOCK_ENTRIES // problem.m)
    keys = np.arange(problem.m)
    masked = np.isneginf(levels.column)
    for start in range(0, problem.n, height):
        rows = slice(start, min(start + height, problem.n))
        yield rows, levels.query[rows] @ levels.key.T, masked | (keys >= problem.inputs.reach[rows, None])
