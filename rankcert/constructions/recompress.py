"""Any factorization, made as thin as its own singular values allow (CONSTRUCTIONS.md, C9)."""

from collections.abc import Iterator, Sequence

import numpy as np

from rankcert.constructions.base import Construction, Factorization, Plan, refuse_memory, refuse_rounding
from rankcert.constructions.svd import AttentionRows, Found, find_rank
from rankcert.problem import AttentionProblem

__all__ = ["Recompress", "recompress"]

SHARE = 0.1  # of eps for the base; a smaller one leaves more to truncate, from a thicker base
SWEEPS = 12  # of reweighting, at most
PATIENCE = 4  # sweeps without a smaller rank before it is left at that
LEAP = 0.7  # share of the rank found so far below which a sweep does not look
LARGEST_HELD = 2**24  # entries of P kept in memory; of larger ones, rows are computed again when needed
WORK = 4e9  # (n + m) rank^2 over all sweeps: thick bases get fewer
LARGEST_DENSE = 512  # min(n, m) up to which the base may be a dense decomposition


class Recompress(Construction):
    """`recompress` on top of the counted construction of smallest rank at a tenth of eps.

    Where none counts below a quarter of min(n, m), on top of the first of `uncounted` that gets there.
    """

    name = "recompress"
    lemma = "CONSTRUCTIONS.md, C9"

    def __init__(self, counted: Sequence[Construction], uncounted: Sequence[Construction]):
        self.counted, self.uncounted = tuple(counted), tuple(uncounted)

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        refusal = refuse_rounding(problem, eps * SHARE)
        if refusal:
            return Plan(None, refusal)
        trivial = min(problem.n, problem.m)
        best: tuple[Construction, Plan] | None = None
        for base in self.counted:
            plan = base.plan(problem, eps * SHARE, memory=memory)
            if not plan.refusal and plan.rank < (best[1].rank if best else trivial):
                best = base, plan
        usable = [best] if best else []
        if best is None or best[1].rank > trivial // 4:
            usable = [*self._plan_uncounted(problem, eps, memory), *usable]
        if not usable:
            return Plan(
                None, "nothing to recompress: no construction counts a rank below min(n, m) within memory"
            )
        thickness = max(trivial if plan.rank is None else plan.rank for _, plan in usable)
        refusal = refuse_memory(4 * (problem.n + problem.m) * thickness, memory)
        return Plan(None, refusal, {"base": usable[0][0].name}, usable)

    def _plan_uncounted(
        self, problem: AttentionProblem, eps: float, memory: int
    ) -> Iterator[tuple[Construction, Plan]]:
        for base in self.uncounted:
            if base.name == "svd" and min(problem.n, problem.m) > LARGEST_DENSE:
                continue
            plan = base.plan(problem, eps * SHARE, memory=memory)
            if not plan.refusal:
                yield base, plan

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        for base, base_plan in plan.state:
            thick = base.build(problem, base_plan, eps * SHARE)
            if thick.error_est is None or thick.error_est <= eps * SHARE:
                break  # else the next may fare better: what is not counted may fail
        thin = recompress(thick, problem, eps)
        return Factorization(thin.left, thin.right, self.name, thin.details, thin.error_est)


def recompress(factorization: Factorization, problem: AttentionProblem, eps: float) -> Factorization:
    """A factorization of no larger rank, whose error measured on dense rows is at most eps less rounding.

    Truncates row-weighted singular value decompositions of left right^T at the first rank that is within eps; rows
    with large errors gain weight from sweep to sweep. When no truncation is, the factorization comes back as it is.
    """
    target = eps - problem.rounding_est
    details: dict[str, int | float | str] = {"base": factorization.method, "base_rank": factorization.rank}
    unchanged = Factorization(
        factorization.left, factorization.right, "recompress", details, factorization.error_est
    )
    if not problem.n or not factorization.rank:
        return unchanged
    attention = AttentionRows(problem)
    rows = _hold(attention)
    allowed = attention.kept < problem.inputs.reach[:, None] if problem.inputs.causal else None
    key_basis, key_core = np.linalg.qr(factorization.right[attention.kept])
    query_part = factorization.left @ key_core.T
    weights = np.ones(problem.n)
    best: tuple[Found, np.ndarray, np.ndarray] | None = None
    idle = sweeps = 0
    most = min(SWEEPS, int(WORK / ((problem.n + problem.m) * query_part.shape[1] ** 2)) + 1)
    while sweeps < most and idle < PATIENCE:
        left, right = _decompose(query_part, weights)
        right = right @ key_basis.T
        ceiling = left.shape[1] if best is None else best[0].rank
        first = 0 if best is None else int(LEAP * best[0].rank)
        found = find_rank(rows, left[:, :ceiling], right[:ceiling], allowed, target, first)
        if sweeps == 0:
            details["truncated"] = found.rank
        sweeps, idle = sweeps + 1, idle + 1
        if found.error <= target and (best is None or found.rank < best[0].rank):
            best, idle = (found, left[:, : found.rank], right[: found.rank]), 0
        if best is None or best[0].rank <= 1:
            break
        errors = _row_errors(rows, left[:, : best[0].rank - 1], right[: best[0].rank - 1], allowed)
        weights *= np.sqrt(np.maximum(errors / errors.max(), 0.05))
        weights /= weights.max()
    if best is None or best[0].rank >= factorization.rank:
        return unchanged
    found, left, right = best
    every = np.zeros((problem.m, found.rank))
    every[attention.kept] = right.T
    return Factorization(left, every, "recompress", details | {"sweeps": sweeps}, found.error)


def _hold(attention: AttentionRows) -> np.ndarray | AttentionRows:
    n, m = attention.shape
    if n * m > LARGEST_HELD:
        return attention
    dense = np.empty((n, m))
    for start in range(0, n, 256):
        dense[start : start + 256] = attention[start : start + 256]
    return dense


def _decompose(matrix: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """left, right with left right = matrix, whose first r columns and rows are its best weighted rank-r truncation."""
    basis, core = np.linalg.qr(matrix * weights[:, None])
    u, values, vt = np.linalg.svd(core, full_matrices=False)
    return (basis @ (u * values)) / weights[:, None], vt


def _row_errors(
    attention: np.ndarray | AttentionRows, left: np.ndarray, right: np.ndarray, allowed: np.ndarray | None
) -> np.ndarray:
    errors = np.empty(left.shape[0])
    height = max(1, 2**21 // right.shape[1])
    for start in range(0, errors.size, height):
        rows = slice(start, start + height)
        residual = np.abs(attention[rows] - left[rows] @ right)
        errors[rows] = residual.sum(axis=1, where=True if allowed is None else allowed[rows])
    return errors
