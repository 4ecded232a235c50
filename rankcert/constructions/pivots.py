"""Kernel pivots: a Cholesky factorization of the Gaussian kernel with few pivots (CONSTRUCTIONS.md, C5 and C6).

e^<x, z> = e^(|x|^2 / 2) e^(-|x - z|^2 / 2) e^(|z|^2 / 2), and the middle factor is positive definite on queries and
keys together. So the residual of a pivoted Cholesky factorization is bounded by its own diagonal, and nothing of size
n x m is ever needed: `pivot_features` works for millions of tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.linalg

from rankcert.checker import read_inputs
from rankcert.constructions.base import (
    Construction,
    Factorization,
    Plan,
    refuse_exponent,
    refuse_memory,
    refuse_rounding,
)
from rankcert.constructions.levels import Levels, read_levels, recentre
from rankcert.constructions.svd import AttentionRows, find_rank
from rankcert.errors import CannotCertify
from rankcert.problem import AttentionProblem

__all__ = ["PivotFeatures", "Pivots", "pivot_features"]

LARGEST_DIMENSION = 8
LARGEST_RANK = 1024
SAMPLE = 4096  # points of either cloud among which pivots are looked for at first
WORST = 256  # points of either cloud that join them when others turn out to be worse
ROUNDS = 8
CAUTION = 0.85  # each round asks more of the sample by this factor
FLAT = 1e-13  # diagonal of the residual that is rounding
BLOCK_ROWS = 8192


class _Cloud(NamedTuple):
    """points (p, r) and log weights (p,): what the square root of a residual diagonal counts in the estimate."""

    points: np.ndarray
    log_weight: np.ndarray


class Pivots(Construction):
    """Pivots until the power-function estimate is within eps, then the fewest of them whose true error is.

    Refuses more than 8 visible dimensions, where it needs as many pivots as there are points.
    """

    name = "pivots"
    lemma = "CONSTRUCTIONS.md, C5 and C6"

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        refusal = refuse_rounding(problem, eps)
        if refusal:
            return Plan(None, refusal)
        if not problem.n:
            return Plan(0, "there are no queries")
        levels = read_levels(problem)
        details: dict[str, int | float | str] = {"dimension": levels.query.shape[1]}
        if levels.query.shape[1] > LARGEST_DIMENSION:
            reason = (
                f"{levels.query.shape[1]} visible dimensions; beyond {LARGEST_DIMENSION} pivots do not pay"
            )
            return Plan(None, reason, details)
        queries, keys = _clouds(levels)
        exponent = float((queries.log_weight + keys.log_weight.max()).max())
        refusal = refuse_exponent(exponent)
        if refusal:
            return Plan(None, refusal, details)
        limit = min(problem.n, problem.m, LARGEST_RANK)
        return Plan(
            None, refuse_memory(2 * (problem.n + problem.m) * limit, memory), details, (queries, keys, limit)
        )

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        queries, keys, limit = plan.state
        target = eps - problem.rounding_est
        attention = AttentionRows(problem)
        left, right, estimate = _factor(queries, keys, target, limit, own=False)
        allowed = attention.kept < problem.inputs.reach[:, None] if problem.inputs.causal else None
        found = find_rank(attention, left, right.T, allowed, target)
        every = np.zeros((problem.m, found.rank))
        every[attention.kept] = right[:, : found.rank]
        details = {**plan.details, "pivots": left.shape[1], "power_est": estimate}
        return Factorization(left[:, : found.rank], every, self.name, details, found.error)


@dataclass(frozen=True, eq=False)
class PivotFeatures:
    """left (n, rank), right (m, rank) with left right^T near the softmax matrix, divided by its own row sums.

    `bound_est` is C6's bound on every row's l1 error as computed in float64: a figure, not a proof.
    """

    left: np.ndarray
    right: np.ndarray
    bound_est: float

    @property
    def rank(self) -> int:
        return self.left.shape[1]


def pivot_features(
    q, k, *, eps: float, scale: float | None = None, key_bias=None, largest_rank: int = LARGEST_RANK
) -> PivotFeatures:
    """Factors of softmax(scale q k^T + key_bias) without any pass over pairs of tokens (C6).

    O((n + m) rank) memory and O((n + m) rank^2) time. Raises CannotCertify when `largest_rank` pivots leave an
    estimate above eps, InvalidInput as `rankcert.certify`.
    """
    x = read_inputs(q, k, scale=scale, key_bias=key_bias)
    kept = np.flatnonzero(x.kept_keys)
    nothing = PivotFeatures(np.zeros((x.n, 0)), np.zeros((x.m, 0)), 0.0)
    if not x.n:
        return nothing
    levels = Levels(*_balance(x.scale * x.query, x.key[kept]), np.zeros(x.n), x.key_bias[kept])
    # About the mean under the weights e^column, Jensen's inequality makes Z_i at least their sum.
    levels = recentre(levels, levels.query.mean(axis=0), np.zeros(levels.query.shape[1]))
    top = levels.column.max()
    weights = np.exp(levels.column - top)
    centre = weights @ levels.key / weights.sum()
    levels = levels._replace(key=levels.key - centre, row=np.full(x.n, -np.log(weights.sum()) - top))
    queries, keys = _weigh(levels)
    exponent = float(queries.log_weight.max() + keys.log_weight.max())
    refusal = refuse_exponent(exponent)
    if refusal:
        raise CannotCertify(refusal)
    left, right, estimate = _factor(queries, keys, eps, min(largest_rank, x.n + kept.size), own=True)
    if not estimate <= eps:
        raise CannotCertify(
            f"{left.shape[1]} pivots leave an error estimate of {estimate:.2g}", rank=left.shape[1]
        )
    left /= (left @ right.sum(axis=0))[:, None]
    if kept.size < x.m:
        every = np.zeros((x.m, right.shape[1]))
        every[kept] = right
        right = every
    return PivotFeatures(left, right, estimate)


def _clouds(levels: Levels) -> tuple[_Cloud, _Cloud]:
    kept = np.flatnonzero(levels.column > -np.inf)
    levels = levels._replace(key=levels.key[kept], column=levels.column[kept])
    return _weigh(recentre(levels, levels.query.mean(axis=0), levels.key.mean(axis=0)))


def _weigh(levels: Levels) -> tuple[_Cloud, _Cloud]:
    """P_ij = e^(weight_i + weight_j - |x_i - z_j|^2 / 2)"""
    return (
        _Cloud(levels.query, levels.row + (levels.query**2).sum(axis=1) / 2),
        _Cloud(levels.key, levels.column + (levels.key**2).sum(axis=1) / 2),
    )


def _balance(query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same inner products in coordinates in which both clouds are equally long, from their d x d moments."""
    centred = key - key.mean(axis=0)
    left, right = (np.linalg.qr(points, mode="r") for points in (query, centred))
    _, values, turn = np.linalg.svd(left @ right.T)
    # query = A left, centred = B right, left right^T = U S V^T: the coordinates are A U S^1/2 and B V S^1/2
    keep = values > values[:1].max(initial=0.0) * 1e-14
    roots = np.sqrt(values[keep])
    turn = turn[: values.size][keep]
    query = query @ (right.T @ turn.T / roots)
    key = centred @ np.linalg.lstsq(right, turn.T * roots, rcond=None)[0] if keep.any() else centred[:, :0]
    return query, key


def _factor(
    queries: _Cloud, keys: _Cloud, target: float, limit: int, *, own: bool
) -> tuple[np.ndarray, np.ndarray, float]:
    """Weighted Cholesky factors of queries and keys, and the largest C5 (own: C6) estimate of a row.

    Pivots are picked among a sample, which grows by the points that turn out to be worst.
    """
    some = [_spread(cloud.points.shape[0]) for cloud in (queries, keys)]
    for attempt in range(ROUNDS):
        sample = [
            _Cloud(cloud.points[s], cloud.log_weight[s])
            for cloud, s in zip((queries, keys), some, strict=True)
        ]
        # The sum over keys is a sample's, and so is that in the own normaliser.
        share = 1.0 if own else some[1].size / keys.points.shape[0]
        everything = some[0].size == queries.points.shape[0] and some[1].size == keys.points.shape[0]
        caution = 1.0 if everything else CAUTION ** (attempt + 1)
        pivots = _pick(*sample, target * share * caution, limit, own)
        left, right = (_expand(cloud, pivots) for cloud in (queries, keys))
        rest = [_residuals(factor) for factor in (left, right)]
        top = keys.log_weight.max()
        left *= np.exp(queries.log_weight + top)[:, None]
        right *= np.exp(keys.log_weight - top)[:, None]
        of_query = rest[0] * np.exp(queries.log_weight + top)
        of_key = rest[1] * np.exp(keys.log_weight - top)
        estimates = of_query * of_key.sum()
        if own:
            estimates = _divide(2 * estimates, left @ right.sum(axis=0))
        estimate = float(estimates.max())
        if estimate <= target or everything or pivots.shape[0] >= limit or attempt == ROUNDS - 1:
            break
        some = [
            np.union1d(s, np.argsort(-size, kind="stable")[:WORST])
            for s, size in zip(some, (estimates, of_key), strict=True)
        ]
    return left, right, estimate


def _spread(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int64))


def _divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, where=denominator > 0.0, out=np.full_like(numerator, np.inf))


def _pick(queries: _Cloud, keys: _Cloud, target: float, limit: int, own: bool) -> np.ndarray:
    """Pivots (s, r), greedily where the residual diagonal is largest, until the estimate is within the target."""
    points = np.concatenate([queries.points, keys.points])
    split = queries.points.shape[0]
    top = keys.log_weight.max()
    of_query, of_key = np.exp(queries.log_weight + top), np.exp(keys.log_weight - top)
    limit = min(limit, points.shape[0])
    factor = np.empty((limit, points.shape[0]))
    diagonal, sums = np.ones(points.shape[0]), np.zeros(split)
    chosen: list[int] = []
    while len(chosen) < limit:
        size = np.sqrt(np.maximum(diagonal, 0.0))
        estimates = of_query * size[:split] * (of_key @ size[split:])
        worst = (_divide(2 * estimates, sums) if own else estimates).max()
        if worst <= target:
            break
        pivot = int(np.argmax(diagonal))
        if diagonal[pivot] <= FLAT:
            break
        row = factor[len(chosen)]
        row[:] = _kernel(points, points[pivot, None])[:, 0]
        row -= factor[: len(chosen)].T @ factor[: len(chosen), pivot]
        row /= np.sqrt(diagonal[pivot])
        diagonal -= row * row
        diagonal[pivot] = 0.0
        sums += of_query * row[:split] * (of_key @ row[split:])
        chosen.append(pivot)
    return points[chosen]


def _kernel(points: np.ndarray, pivots: np.ndarray) -> np.ndarray:
    squares = (points**2).sum(axis=1)[:, None] + (pivots**2).sum(axis=1)
    return np.exp(np.minimum(points @ pivots.T - squares / 2, 0.0))


def _expand(cloud: _Cloud, pivots: np.ndarray) -> np.ndarray:
    """k(points, pivots) C^-T with k(pivots, pivots) = C C^T."""
    core = _kernel(pivots, pivots)
    core[np.diag_indices_from(core)] = 1.0 + 4 * np.finfo(float).eps * len(pivots)
    core = np.linalg.cholesky(core)
    out = np.empty((cloud.points.shape[0], len(pivots)))
    for start in range(0, out.shape[0], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        out[rows] = scipy.linalg.solve_triangular(core, _kernel(cloud.points[rows], pivots).T, lower=True).T
    return out


def _residuals(factor: np.ndarray) -> np.ndarray:
    """sqrt of the residual diagonal 1 - |row|^2, with room for its rounding."""
    out = np.empty(factor.shape[0])
    for start in range(0, out.size, BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        out[rows] = 1.0 - (factor[rows] ** 2).sum(axis=1)
    return np.sqrt(np.maximum(out, 0.0) + (factor.shape[1] + 4) * np.finfo(float).eps)
