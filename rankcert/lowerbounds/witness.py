"""What a search for a lower bound returns: integers, ready for the checker."""

from dataclasses import dataclass, replace

import numpy as np

__all__ = ["Found", "quantise", "threshold"]

LEVELS = (np.int8, np.int16)  # kinds of weights, the smallest that serves is taken
SAFETY = 1e-9  # relative distance from a tie that leaves room for the checker's rounding


@dataclass(frozen=True, eq=False)
class Found:
    """A witness for eps-rank >= rank, untrusted.

    rows (N,) int64: distinct queries, ascending. groups (m,) int64: the group of each key, -1 for none. weights (K, N)
    int8 or int16: one row a group. eps_est: the witness should prove its rank for every eps below this.
    interrupted: the search was stopped by Ctrl-C, and this is the best it had.
    """

    rows: np.ndarray
    groups: np.ndarray
    weights: np.ndarray
    eps_est: float
    interrupted: bool = False

    @property
    def rank(self) -> int:
        """N, the rank it is about."""
        return self.rows.size

    def marked(self, interrupted: bool) -> "Found":
        """The same, saying whether its search was interrupted."""
        return replace(self, interrupted=interrupted)


def threshold(seen: np.ndarray, weights: np.ndarray) -> float:
    """The eps below which weights (K, N) prove rank N, where seen (N, K) is P_S summed over groups; 0.0 if none.

    1 / max_j ||(G (P_S G)^-1)_j||_1 in float64 (LOWERBOUNDS.md, L1).
    """
    weights = weights.astype(np.float64)
    try:
        inverse = np.linalg.inv(seen @ weights)
    except np.linalg.LinAlgError:
        return 0.0
    largest = np.abs(weights @ inverse).sum(axis=1).max()
    return float(1.0 / largest) if np.isfinite(largest) else 0.0


def quantise(seen: np.ndarray, weights: np.ndarray, eps: float) -> tuple[np.ndarray, float] | None:
    """Integer weights that still prove rank N at eps, and their threshold; None if rounding is too much for eps.

    Only the span of the columns of the weights counts. In the gauge P_S G = I, whose columns are brought to full
    scale, P_S times the integers is near a diagonal matrix, so that its inverse loses no digits.
    """
    solved = weights @ np.linalg.inv(seen @ weights)
    scale = np.abs(solved).max(axis=0)
    for kind in LEVELS:
        integers = np.rint(solved * (np.iinfo(kind).max / scale)).astype(kind)
        reached = threshold(seen, integers)
        if reached * (1.0 - SAFETY) > eps:
            return integers, reached
    return None
