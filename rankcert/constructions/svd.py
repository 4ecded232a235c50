"""The truncated singular value decomposition of P, at the smallest rank that is within eps (THEORY.md, Lemma 10)."""

from typing import NamedTuple

import numpy as np
import scipy.linalg

from rankcert.constructions.base import Construction, Factorization, Plan, refuse_memory, refuse_rounding
from rankcert.problem import AttentionProblem

__all__ = ["AttentionRows", "Found", "TruncatedSVD", "find_rank"]

LARGEST_SIDE = 4096
DENSE_ARRAYS = 6  # P, its copy inside LAPACK, both factors, and room for the search
WATCHED = 32  # rows added to the watch after each full check
BLOCK_ENTRIES = 2**21


class TruncatedSVD(Construction):
    """The baseline: U_r S_r V_r^T with the smallest r whose largest row error is at most eps less rounding.

    The error is not monotone in r. The search finds the first r that passes, exactly: from below, refusing an r as
    soon as one row refuses it. Under a causal mask P is decomposed with zeros above the mask, and only allowed
    pairs count.
    """

    name = "svd"
    lemma = "Lemma 10"

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        n, m = problem.n, problem.m
        if min(n, m) > LARGEST_SIDE:
            return Plan(
                None, f"a dense SVD of {n} x {m} takes minutes; min(n, m) may be {LARGEST_SIDE} at most"
            )
        return Plan(None, refuse_memory(DENSE_ARRAYS * n * m, memory) or refuse_rounding(problem, eps))

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        x = problem.inputs
        kept = np.flatnonzero(x.kept_keys)
        attention = problem.attention_rows(slice(0, problem.n))[:, kept]
        u, values, vt = _decompose(attention)
        allowed = kept < x.reach[:, None] if x.causal else None
        target = eps - problem.rounding_est
        # The l2 norm of an error row is at most its l1 norm; with pairs that do not count it says nothing.
        first = _first_within_l2(u * values, target) if allowed is None else 0
        found = find_rank(attention, u * values, vt, allowed, target, first)
        right = np.zeros((problem.m, found.rank))
        right[kept] = vt[: found.rank].T
        details = {"full_checks": found.checks, "watched_rows": found.watched}
        return Factorization(
            u[:, : found.rank] * values[: found.rank], right, self.name, details, found.error
        )


def _decompose(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        return np.linalg.svd(matrix, full_matrices=False)
    except np.linalg.LinAlgError:
        # the divide-and-conquer driver fails now and then where QR iteration does not
        return scipy.linalg.svd(matrix, full_matrices=False, lapack_driver="gesvd")


class Found(NamedTuple):
    """The rank, its largest row error, how often all rows were looked at, and how many were watched in between."""

    rank: int
    error: float
    checks: int
    watched: int


class AttentionRows:
    """P restricted to the kept keys, as an array of which rows are computed when asked for."""

    def __init__(self, problem: AttentionProblem):
        self._problem = problem
        self.kept = np.flatnonzero(problem.inputs.kept_keys)
        self.shape = (problem.n, self.kept.size)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        return self._problem.attention_rows(rows)[:, self.kept]


def find_rank(
    attention: np.ndarray | AttentionRows,
    left: np.ndarray,
    right: np.ndarray,
    allowed: np.ndarray | None,
    target: float,
    first: int = 0,
) -> Found:
    """The first rank >= first whose truncation left[:, :rank] right[:rank] has row errors <= target.

    Full rank if none has. `allowed` marks the pairs that count (None: all).
    """
    full = left.shape[1]
    rank = first
    watched = np.empty(0, dtype=np.int64)
    checks = 0
    # Invariant: every rank from `first` to below `rank` is refused by some row.
    while True:
        checks += 1
        errors = _row_errors(attention, left[:, :rank], right[:rank], allowed)
        error = float(errors.max(initial=0.0))
        if error <= target or rank == full:
            return Found(rank, error, checks, watched.size)
        worst = np.argsort(errors)[-WATCHED:]
        watched = np.union1d(watched, worst[errors[worst] > target])
        residual = attention[watched] - left[watched, :rank] @ right[:rank]
        while rank < full:
            residual -= np.outer(left[watched, rank], right[rank])
            rank += 1
            if _row_l1(residual, allowed, watched).max() <= target:
                break


def _first_within_l2(left: np.ndarray, target: float) -> int:
    """The first rank from which on every error row has l2 norm <= target, read off the rows of U S."""
    tail = np.zeros(left.shape[0])
    for rank in range(left.shape[1] - 1, -1, -1):
        tail += left[:, rank] ** 2
        if tail.max(initial=0.0) > (1.0 + 1e-9) * target**2:
            return rank + 1
    return 0


def _row_errors(
    attention: np.ndarray | AttentionRows, left: np.ndarray, right: np.ndarray, allowed: np.ndarray | None
) -> np.ndarray:
    errors = np.empty(attention.shape[0])
    height = max(1, BLOCK_ENTRIES // attention.shape[1])
    for start in range(0, errors.size, height):
        rows = slice(start, start + height)
        errors[rows] = _row_l1(attention[rows] - left[rows] @ right, allowed, rows)
    return errors


def _row_l1(residual: np.ndarray, allowed: np.ndarray | None, rows: slice | np.ndarray) -> np.ndarray:
    return np.abs(residual).sum(axis=1, where=True if allowed is None else allowed[rows])
