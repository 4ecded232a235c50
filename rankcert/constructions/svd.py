"""The truncated singular value decomposition of P, at the smallest rank that is within eps (THEORY.md, Lemma 10)."""

from typing import NamedTuple

import numpy as np
import scipy.linalg

from rankcert.constructions.base import Construction, Factorization, Plan, refuse_memory, refuse_rounding
from rankcert.geometry import once_per_problem
from rankcert.problem import AttentionProblem

__all__ = ["AttentionRows", "Dense", "Found", "TruncatedSVD", "decompose", "find_rank", "hold", "spread"]

LARGEST_SIDE = 4096
DENSE_ARRAYS = 6  # P, its copy inside LAPACK, both factors, and room for the search
WATCHED = 32  # rows added to the watch after each full check
BLOCK_ENTRIES = 2**21
HEIGHT = 512  # rows of P made at once


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
        dense = decompose(problem)
        found = dense.find_rank(eps - problem.rounding_est)
        details = {"full_checks": found.checks, "watched_rows": found.watched}
        left, right = dense.truncate(found.rank)
        return Factorization(left, spread(right, dense.kept, problem.m), self.name, details, found.error)


class Dense(NamedTuple):
    """P on the kept keys and its singular value decomposition: attention = left right^T, right orthonormal.

    attention (n, kept), left (n, k), singular values included, right (kept, k), perhaps the leading ones only; `kept`
    are the positions of the kept keys. allowed (n, kept) marks the pairs that count, None if all do.
    """

    attention: np.ndarray
    left: np.ndarray
    right: np.ndarray
    kept: np.ndarray
    allowed: np.ndarray | None

    def find_rank(self, target: float) -> "Found":
        """The smallest rank of a truncation whose row errors are at most `target`."""
        # The l2 norm of an error row is at most its l1 norm; with pairs that do not count it says nothing.
        first = _first_within_l2(self.left, target) if self.allowed is None else 0
        return find_rank(self.attention, self.left, self.right.T, self.allowed, target, first)

    def error(self, left: np.ndarray, right: np.ndarray) -> float:
        """The largest row error of left right^T."""
        return float(_row_errors(self.attention, left, right.T, self.allowed).max(initial=0.0))

    def truncate(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """The factors of the leading singular triplets, (n, rank) and (kept, rank)."""
        return self.left[:, :rank], self.right[:, :rank]


@once_per_problem
def decompose(problem: AttentionProblem) -> Dense:
    """The dense decomposition of P, zeros at pairs that are not allowed, computed once a problem."""
    dense = hold(problem, np.empty((problem.n, 0)), np.empty((problem.m, 0)))
    try:
        u, values, vt = np.linalg.svd(dense.attention, full_matrices=False)
    except np.linalg.LinAlgError:
        # the divide-and-conquer driver fails now and then where QR iteration does not
        u, values, vt = scipy.linalg.svd(dense.attention, full_matrices=False, lapack_driver="gesvd")
    return dense._replace(left=u * values, right=vt.T)


def hold(problem: AttentionProblem, left: np.ndarray, right: np.ndarray) -> Dense:
    """P as it stands, with factors (n, k) and (kept, k) that came from elsewhere: leading ones, in singular order."""
    x = problem.inputs
    kept = np.flatnonzero(x.kept_keys)
    attention = np.empty((problem.n, kept.size))
    for start in range(0, problem.n, HEIGHT):
        rows = slice(start, start + HEIGHT)
        attention[rows] = problem.attention_rows(rows)[:, kept]
    return Dense(attention, left, right, kept, kept < x.reach[:, None] if x.causal else None)


def spread(right: np.ndarray, kept: np.ndarray, m: int) -> np.ndarray:
    """A factor of the kept keys (kept, r) as one of all m keys, zero at the others."""
    out = np.zeros((m, right.shape[1]))
    out[kept] = right
    return out


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
