"""P itself, factored through its distinct columns or its distinct rows (THEORY.md, Lemma 9)."""

from typing import NamedTuple

import numpy as np

from rankcert.constructions.base import Construction, Factorization, Plan, refuse_memory
from rankcert.problem import AttentionProblem, Classes

__all__ = ["Exact"]

SPAN = 2.0  # under a causal mask, the logarithms of the factors within one group spread by less


class _Groups(NamedTuple):
    """Rows (or columns) of P that agree up to a factor: `first` and `of` as in Classes; member x of group g has the
    factor exp(level[x] - top[g]), at most 1."""

    first: np.ndarray
    of: np.ndarray
    top: np.ndarray


class Exact(Construction):
    """Rank min(#distinct queries, #distinct kept keys), exact up to rounding.

    Under a causal mask a group need not agree where no entry counts, and what stands there would be as large as the
    factors of a group are far apart. So groups are split until these spread by less than e^SPAN: rounding stays
    small, and the rank is larger where key biases or normalisers of equal rows differ much.
    """

    name = "exact"
    lemma = "Lemma 9"

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        sides = {
            "keys": _group(problem, problem.key_classes, problem.inputs.key_bias),
            "queries": _group(problem, problem.query_classes, -problem.log_normaliser),
        }
        side = min(sides, key=lambda name: sides[name].first.size)
        rank = sides[side].first.size
        return Plan(
            rank, refuse_memory((problem.n + problem.m) * rank, memory), {"distinct": side}, sides[side]
        )

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        through = _through_keys if plan.details["distinct"] == "keys" else _through_queries
        left, right = through(problem, plan.state)
        return Factorization(left, right, self.name, plan.details, problem.rounding_est)


def _group(problem: AttentionProblem, classes: Classes, level: np.ndarray) -> _Groups:
    member = np.flatnonzero(classes.of >= 0)
    level = level[member]
    first, of = classes.first, classes.of[member]
    top = _largest(level, of, first.size)
    if problem.inputs.causal:
        tier = np.floor((top[of] - level) / SPAN)
        _, index, of = np.unique(np.column_stack([of, tier]), axis=0, return_index=True, return_inverse=True)
        first, of = member[index], of.ravel()
        top = _largest(level, of, first.size)
    every = np.full(classes.of.size, -1)
    every[member] = of
    return _Groups(first, every, top)


def _largest(values: np.ndarray, of: np.ndarray, groups: int) -> np.ndarray:
    top = np.full(groups, -np.inf)
    np.maximum.at(top, of, values)
    return top


def _through_keys(problem: AttentionProblem, groups: _Groups) -> tuple[np.ndarray, np.ndarray]:
    x = problem.inputs
    left = x.query @ x.key[groups.first].T
    left *= x.scale
    left -= problem.log_normaliser[:, None]
    left += groups.top
    left[groups.first >= x.reach[:, None]] = -np.inf  # no member is within the row's reach
    return np.exp(left, out=left), _memberships(groups, x.key_bias)


def _through_queries(problem: AttentionProblem, groups: _Groups) -> tuple[np.ndarray, np.ndarray]:
    x = problem.inputs
    right = x.key @ x.query[groups.first].T
    right *= x.scale
    right += x.key_bias[:, None]
    right += groups.top
    reach = _largest(x.reach, groups.of, groups.first.size)
    right[np.arange(x.m)[:, None] >= reach] = -np.inf  # beyond what any member sees
    return _memberships(groups, -problem.log_normaliser), np.exp(right, out=right)


def _memberships(groups: _Groups, level: np.ndarray) -> np.ndarray:
    """One row a member: its factor in the column of its group, zeros elsewhere."""
    out = np.zeros((groups.of.size, groups.first.size))
    member = np.flatnonzero(groups.of >= 0)
    of = groups.of[member]
    out[member, of] = np.exp(level[member] - groups.top[of])
    return out
