"""The search for leakage witnesses: rows that put much on keys of their own, in passes over P (LOWERBOUNDS.md, L4)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rankcert.errors import InvalidInput
from rankcert.lowerbounds.blocks import try_splits
from rankcert.problem import AttentionProblem

__all__ = ["FoundLeakage", "find_leakage"]

HEIGHT = 64  # rows of P made at once
PASSES = 8
SHED = 0.5  # share of the rows not worth their eps that a pass gives up


@dataclass(frozen=True, eq=False)
class FoundLeakage:
    """rows (N,) int64, ascending: a witness, untrusted, that should prove rank `rank_est`."""

    rows: np.ndarray
    rank_est: int
    interrupted: bool = False


def find_leakage(
    problem: AttentionProblem, eps: float, *, progress: Callable[[int, int], None] | None = None
) -> FoundLeakage | None:
    """Rows S with a large sum_j max_{i in S} P_ij - eps |S|, 0 < eps < 1; None if nothing would be proved.

    O(nmd) time and O(n + m) memory, beside 64 rows of P. progress: called with (done, total) passes. Ctrl-C returns
    the best so far. Raises InvalidInput for another eps. Source: docs/LOWERBOUNDS.md, L4.

    >>> import numpy as np
    >>> find_leakage(AttentionProblem(9.0 * np.eye(3), np.eye(3), scale=1.0), 0.2).rank_est
    2
    """
    if not 0.0 < eps < 1.0:
        raise InvalidInput(f"eps must lie between 0 and 1, got {eps!r}")
    if not problem.n:
        return None
    best: tuple[float, np.ndarray] = (0.0, np.empty(0, dtype=np.int64))

    def visit(first: int) -> float:
        nonlocal best
        found = _search(problem, eps, first, progress)
        best = max(best, found, key=lambda pair: pair[0])
        return found[0]

    interrupted = False
    try:
        try_splits(problem, visit)
    except KeyboardInterrupt:
        interrupted = True
    value, rows = best
    return FoundLeakage(rows, int(np.ceil(value / (1.0 + eps))), interrupted) if rows.size else None


def _search(problem: AttentionProblem, eps: float, first: int, progress) -> tuple[float, np.ndarray]:
    """The best value sum_j max_{i in S} P_ij - eps |S| seen, and its S, among rows from `first` on."""
    reach = int(problem.inputs.reach[first])
    rows = np.arange(first, problem.n)
    best = (0.0, rows[:0])
    # Invariant: what a row adds to the sum only grows when others go, so a row worth its eps stays worth it.
    for turn in range(PASSES):
        held, gains = _pass(problem, rows, reach)
        value = held - eps * rows.size
        best = max(best, (value, rows), key=lambda pair: pair[0])
        if progress:
            progress(turn + 1, PASSES)
        order = np.argsort(gains)
        poor = order[: int((gains < eps).sum())]
        if not poor.size:
            break
        gone = poor[: max(int((gains == 0.0).sum()), int(np.ceil(SHED * poor.size)))]
        rows = np.delete(rows, gone)
        if not rows.size:
            break
    return best


def _pass(problem: AttentionProblem, rows: np.ndarray, reach: int) -> tuple[float, np.ndarray]:
    """sum_j max_i P_ij over the first `reach` keys, and what each row adds to it."""
    largest, second = np.zeros(reach), np.zeros(reach)
    owner = np.zeros(reach, dtype=np.int64)
    for start in range(0, rows.size, HEIGHT):
        tile = problem.attention_rows(rows[start : start + HEIGHT])[:, :reach]
        top = tile.argmax(axis=0)
        most = np.take_along_axis(tile, top[None], axis=0)[0]
        np.put_along_axis(tile, top[None], -1.0, axis=0)
        following = tile.max(axis=0)
        wins = most > largest
        second = np.maximum(np.where(wins, largest, most), np.maximum(second, following))
        owner[wins] = start + top[wins]
        largest = np.maximum(largest, most)
    gains = np.bincount(owner, largest - second, minlength=rows.size)
    return float(largest.sum()), gains
