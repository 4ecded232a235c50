"""What a construction is: a plan that counts its rank first, and a build that spends the memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankcert.problem import AttentionProblem

__all__ = [
    "EFFORTS",
    "LARGEST_EXPONENT",
    "Construction",
    "Factorization",
    "Plan",
    "Search",
    "refuse_exponent",
    "refuse_memory",
    "refuse_rounding",
]


@dataclass(frozen=True, eq=False)
class Factorization:
    """left (n, r) and right (m, r), float64, with left right^T near P on the pairs that count.

    `details` say how it came about; `error_est` guesses max_i sum_j |P_ij - (left right^T)_ij|. `interrupted`: the
    search was stopped by Ctrl-C, and this is what it had. `otherwise`: factors of larger rank, should the checker not
    agree to these.
    """

    left: np.ndarray
    right: np.ndarray
    method: str
    details: Mapping[str, int | float | str]
    error_est: float | None = None
    interrupted: bool = False
    otherwise: "Factorization | None" = None

    @property
    def rank(self) -> int:
        return self.left.shape[1]


@dataclass(frozen=True, eq=False)
class Plan:
    """What a construction would do for one problem and eps.

    rank: the exact rank it would have, a Python int of any size; None when only building tells.
    refusal: one readable line on why it cannot be built, else None. A plan may know its rank and still refuse.
    state: whatever `build` needs, and nobody else reads.
    """

    rank: int | None
    refusal: str | None = None
    details: Mapping[str, int | float | str] = field(default_factory=dict)
    state: Any = None


class Construction(ABC):
    """One way to factorize attention matrices.

    `plan` allocates nothing of the size of the factors; `build` takes a plan without a refusal, made by the same
    object for the same problem and eps. Neither promises that the checker will agree.
    """

    name: str
    lemma: str  # where docs/THEORY.md proves it in exact arithmetic

    @abstractmethod
    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        """Count the rank, and refuse what needs more than `memory` bytes of dense arrays or more than float64."""

    @abstractmethod
    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        """The factors that `plan` describes."""


EFFORTS = ("fast", "balanced", "high", "max")


@dataclass(frozen=True, kw_only=True)
class Search(Construction):
    """A construction that can look longer for a smaller rank.

    effort: one of EFFORTS. seed: of its random starts; same seed, machine and threads: same factors. progress: called
    with (done, total) or None. A KeyboardInterrupt during `build` ends it with the best factors so far, if any.
    """

    effort: str = "balanced"
    seed: int = 0
    progress: Callable[[int, int], None] | None = None

    def set(self, **settings) -> "Search":
        """The same search with other settings."""
        return replace(self, **settings)


def refuse_rounding(problem: AttentionProblem, eps: float) -> str | None:
    """A refusal if rounding alone leaves nothing of eps, else None."""
    if problem.rounding_est < eps:
        return None
    return f"eps = {eps:g} is below the rounding of float64, about {problem.rounding_est:.1e}"


LARGEST_EXPONENT = 36.0  # of a factor of a row: beyond e^36 = 2^52 float64 has no digit left for the row


def refuse_exponent(exponent: float) -> str | None:
    """A refusal if factors of rows as large as e^exponent leave float64 no digit, else None."""
    if exponent > LARGEST_EXPONENT:
        return f"row factors would reach e^{exponent:.0f}, which drowns the row in rounding"
    return None


def refuse_memory(numbers: int, memory: int) -> str | None:
    """A refusal if that many float64 numbers exceed `memory` bytes, else None."""
    needed = 8 * numbers
    if needed <= memory:
        return None
    return f"needs {_size(needed)} of dense arrays, more than the {_size(memory)} allowed"


def _size(count: int) -> str:
    if count >= 2**60:
        return f"over 2^{count.bit_length() - 1} bytes"
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{count / unit:,.1f} {name}"
