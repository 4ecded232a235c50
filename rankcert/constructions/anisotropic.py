"""Taylor polynomials in several variables, with as many monomials as pay (CONSTRUCTIONS.md, C1 and C2)."""

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rankcert.constructions.base import (
    Construction,
    Factorization,
    Plan,
    refuse_exponent,
    refuse_memory,
    refuse_rounding,
)
from rankcert.constructions.levels import Levels, read_levels, recentre
from rankcert.errors import CannotCertify
from rankcert.geometry import once_per_problem
from rankcert.problem import AttentionProblem

__all__ = ["Anisotropic", "grow"]

LARGEST_LOGIT = 30.0  # of sum_l |x_l z_l|: the terms cancel from e^30 down, and float64 has 36 to give
LARGEST_SET = 1024  # monomials
CHUNK = 64  # monomials looked at together
BLOCK_ENTRIES = 2**21


class _Rows(NamedTuple):
    """Mid-range centred levels, and per row the exponential sums of C1 divided by Z'_i: sum_j w_j e^<|x|, |z|>."""

    levels: Levels
    absolute: np.ndarray


class Anisotropic(Construction):
    """The monomials x^alpha z^alpha / alpha! of largest weight, the fewest whose error estimate is within eps.

    The estimate is a bound in exact arithmetic, row by row. It adds absolute values: this pays where a_l =
    max |x_l| max |z_l| is small or falls off quickly with l.
    """

    name = "anisotropic"
    lemma = "CONSTRUCTIONS.md, C1 and C2"

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        refusal = refuse_rounding(problem, eps)
        if refusal:
            return Plan(None, refusal)
        try:
            rows = _measure_rows(problem)
        except CannotCertify as reason:
            return Plan(None, str(reason))
        scales = _scales(rows.levels)
        details: dict[str, int | float | str] = {"dimension": int(np.count_nonzero(scales))}
        limit = min(min(problem.n, problem.m), LARGEST_SET)
        chosen, error = _choose(problem, rows, scales, eps - problem.rounding_est, limit)
        if error > eps - problem.rounding_est:
            return Plan(None, f"{limit} monomials leave an error estimate of {error:.2g}", details)
        details |= {"largest_degree": int(chosen.sum(axis=1).max(initial=0)), "error_est": error}
        rank = len(chosen)
        return Plan(rank, refuse_memory((problem.n + problem.m) * rank, memory), details, (chosen, error))

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        chosen, error = plan.state
        levels = _measure_rows(problem).levels
        top = levels.column.max()
        left = _monomials(levels.query, chosen) * np.exp(levels.row + top)[:, None]
        right = _monomials(levels.key, chosen) * np.exp(levels.column - top)[:, None]
        return Factorization(left, right, self.name, plan.details, error)


def grow(scales: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Multi-indices by falling weight prod a_l^alpha_l / alpha_l!, a_l = scales > 0, from the mode floor(a_l) on.

    The weight is unimodal in every coordinate, so an index is reached through a neighbour nearer to the mode that
    weighs at least as much (C2). Endless.
    """
    mode = tuple(math.floor(a) for a in scales)
    # In logarithms relative to the mode's weight, negative because heapq yields the smallest.
    heap, known = [(0.0, mode)], {mode}
    while heap:
        light, alpha = heapq.heappop(heap)
        yield alpha
        for v, (a, middle) in enumerate(zip(alpha, mode, strict=True)):
            for step in (1, -1):
                if (a < middle if step > 0 else a > middle) or a + step < 0:
                    continue  # towards the mode, or nowhere
                near = (*alpha[:v], a + step, *alpha[v + 1 :])
                if near not in known:
                    known.add(near)
                    change = math.log(scales[v] / (a + 1)) if step > 0 else math.log(a / scales[v])
                    heapq.heappush(heap, (light - change, near))


@once_per_problem
def _measure_rows(problem: AttentionProblem) -> _Rows:
    levels = read_levels(problem)
    kept = levels.column > -np.inf
    if not problem.n:
        return _Rows(levels, np.empty(0))
    levels = recentre(levels, _middle(levels.query), _middle(levels.key[kept]))
    levels.key[~kept] = 0.0
    largest = float(_scales(levels).sum())
    exponent = float((levels.row + levels.column.max()).max())
    if largest > LARGEST_LOGIT and (largest := _largest(levels)) > LARGEST_LOGIT:
        raise CannotCertify(
            f"sum |x_l z_l| reaches {largest:.3g}, beyond {LARGEST_LOGIT:g}: the monomials cancel in float64"
        )
    refusal = refuse_exponent(exponent)
    if refusal:
        raise CannotCertify(refusal)
    absolute = np.empty(problem.n)
    weight = np.exp(levels.column - levels.column.max())
    for rows, block in _blocks(levels):
        np.exp(block, out=block)
        block *= weight
        block[np.arange(problem.m) >= problem.inputs.reach[rows, None]] = 0.0
        absolute[rows] = block.sum(axis=1)
    return _Rows(levels, absolute * np.exp(levels.row + levels.column.max()))


def _middle(points: np.ndarray) -> np.ndarray:
    return (points.min(axis=0) + points.max(axis=0)) / 2


def _largest(levels: Levels) -> float:
    return max(float(block.max()) for _, block in _blocks(levels))


def _blocks(levels: Levels):
    """(rows, <|x_i|, |z_j|> of those rows)"""
    query, key = np.abs(levels.query), np.abs(levels.key)
    height = max(1, BLOCK_ENTRIES // key.shape[0])
    for start in range(0, query.shape[0], height):
        rows = slice(start, start + height)
        yield rows, query[rows] @ key.T


def _scales(levels: Levels) -> np.ndarray:
    return np.abs(levels.query).max(axis=0, initial=0.0) * np.abs(levels.key).max(axis=0, initial=0.0)


def _choose(
    problem: AttentionProblem, rows: _Rows, scales: np.ndarray, target: float, limit: int
) -> tuple[np.ndarray, float]:
    """The first prefix of `grow` whose worst-row estimate is within the target, at most `limit` long, and it."""
    levels, reach = rows.levels, problem.inputs.reach
    used = np.flatnonzero(scales > 0.0)
    indices = grow(scales[used])
    top = levels.column.max(initial=-np.inf)
    factor, weight = np.exp(levels.row + top), np.exp(levels.column - top)
    query, key = np.abs(levels.query), np.abs(levels.key)
    left = rows.absolute.copy()
    chosen: list[np.ndarray] = []
    error = float(left.max(initial=0.0))
    # Invariant: `left` is what the monomials chosen so far leave of C1's numerator over Z'_i, row by row.
    while error > target and sum(map(len, chosen)) < limit:
        room = min(CHUNK, limit - sum(map(len, chosen)))
        some = np.zeros((room, scales.size), dtype=np.int64)
        found = [alpha for alpha, _ in zip(indices, range(room), strict=False)]
        some = some[: len(found)]
        some[:, used] = np.array(found, dtype=np.int64).reshape(len(found), used.size)
        terms = _monomials(key, some) * weight[:, None]
        sums = np.cumsum(terms, axis=0)[reach - 1] if problem.inputs.causal else terms.sum(axis=0)
        kept = _monomials(query, some) * sums * factor[:, None]
        rest = np.maximum(left[:, None] - np.cumsum(kept, axis=1), 0.0)
        worst = rest.max(axis=0)
        passing = np.flatnonzero(worst <= target)
        take = int(passing[0]) + 1 if passing.size else len(found)
        chosen.append(some[:take])
        left, error = rest[:, take - 1], float(worst[take - 1])
        if not used.size:
            break
    none = np.zeros((0, scales.size), dtype=np.int64)
    return np.concatenate([none, *chosen]), error


def _monomials(points: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """points^alpha / sqrt(alpha!), (points, len(chosen))."""
    out = np.ones((len(chosen), points.shape[0]))
    for v in range(points.shape[1]):
        present = np.flatnonzero(chosen[:, v])
        if present.size:
            exponents = np.arange(chosen[:, v].max() + 1)
            roots = np.exp(-0.5 * np.array([math.lgamma(a + 1.0) for a in exponents]))
            powers = points[:, v] ** exponents[:, None] * roots[:, None]
            out[present] *= powers[chosen[present, v]]
    return np.ascontiguousarray(out.T)
