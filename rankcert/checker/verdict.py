"""What a check says, and the places where proved numbers become a verdict."""

from dataclasses import dataclass

import numpy as np

from rankcert.checker.inputs import Inputs

__all__ = ["BracketVerdict", "LowerVerdict", "Verdict", "conclude", "conclude_bracket", "conclude_lower"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """The outcome of a check, about the caller's inputs.

    status: PROVED (bound <= eps), REFUTED (the error certainly exceeds eps), UNDECIDED (neither could be shown;
    `reason` says why), or MEASURED (no eps was asked; `bound` holds). `bool(verdict)` is "certainly proved".

    bound: a proved upper bound on max_i sum_j |P_ij - (U V^T)_ij| (inf when nothing is proved);
    bound_lower: a proved lower bound on the same number; row_bounds, row_bounds_lower: the same for each row.
    breakdown: the terms of the worst row's bound, which add up to it.
    notion: "rank", or "causal rank" when entries above a causal mask were free.
    engine: how it was computed, hence what is trusted; exact_rows: rows enclosed in ball arithmetic.
    """

    status: str
    eps: float | None
    bound: float
    bound_lower: float
    reason: str
    row_bounds: np.ndarray
    row_bounds_lower: np.ndarray
    worst_row: int | None
    breakdown: dict[str, float]
    rank: int
    notion: str
    shape: tuple[int, int, int]
    scale: float
    causal: bool
    offset: int
    digests: dict[str, str]
    engine: str
    exact_rows: int

    def __bool__(self) -> bool:
        return self.status == "PROVED"

    def to_dict(self) -> dict:
        """Plain numbers and strings, for JSON; per-row bounds left out, non-finite bounds as None."""
        return {
            "status": self.status,
            "eps": self.eps,
            "bound": _finite(self.bound),
            "bound_lower": _finite(self.bound_lower),
            "reason": self.reason,
            "worst_row": self.worst_row,
            "breakdown": {name: _finite(value) for name, value in self.breakdown.items()},
            "rank": self.rank,
            "notion": self.notion,
            "n": self.shape[0],
            "m": self.shape[1],
            "d": self.shape[2],
            "scale": self.scale,
            "causal": self.causal,
            "offset": self.offset,
            **self.digests,
            "engine": self.engine,
            "exact_rows": self.exact_rows,
        }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def conclude(
    inputs: Inputs,
    rank: int,
    eps: float | None,
    upper: np.ndarray,
    lower: np.ndarray,
    *,
    engine: str,
    breakdown: dict[str, np.ndarray] | None = None,
    fault: str = "",
    exact_rows: int = 0,
) -> Verdict:
    """The verdict on row errors known to lie in [lower, upper]; with a `fault` nothing is known and it is UNDECIDED.

    The comparisons are written so that NaN proves and refutes nothing.
    """
    if fault:
        upper, lower, breakdown = np.full(inputs.n, np.inf), np.full(inputs.n, -np.inf), None
    upper = np.where(np.isnan(upper), np.inf, upper)
    bound = float(upper.max(initial=0.0))
    bound_lower = float(np.fmax(lower, 0.0).max(initial=0.0))
    worst = None if fault or not inputs.n else int(np.argmax(upper))
    if fault:
        status, reason = "UNDECIDED", fault
    elif eps is None:
        status, reason = (
            ("MEASURED", "no eps was asked") if bound < np.inf else ("UNDECIDED", "no finite bound")
        )
    elif bound <= eps:
        status, reason = "PROVED", f"every row is within eps = {eps!r}"
    elif bound_lower > eps:
        status, reason = (
            "REFUTED",
            f"row {int(np.nanargmax(lower))} is certainly off by more than eps = {eps!r}",
        )
    else:
        slack = {name: at[worst] for name, at in (breakdown or {}).items() if name != "factor error"}
        blame = f" (its largest slack: {max(slack, key=slack.get)})" if slack else ""
        status, reason = "UNDECIDED", f"it stays open whether row {worst} is within eps = {eps!r}{blame}"
    return Verdict(
        status=status,
        eps=eps,
        bound=bound,
        bound_lower=bound_lower,
        reason=reason,
        row_bounds=upper,
        row_bounds_lower=lower,
        worst_row=worst,
        breakdown={} if worst is None else {name: float(at[worst]) for name, at in (breakdown or {}).items()},
        rank=rank,
        notion="causal rank" if inputs.causal else "rank",
        shape=(inputs.n, inputs.m, inputs.d),
        scale=inputs.scale,
        causal=inputs.causal,
        offset=inputs.offset,
        digests=inputs.digests,
        engine=engine,
        exact_rows=exact_rows,
    )


@dataclass(frozen=True, eq=False)
class LowerVerdict:
    """The outcome of a check that a rank is needed, about the caller's inputs.

    status: PROVED (every matrix within eps of the softmax matrix has rank at least `rank`) or UNDECIDED (the witness
    does not show it; `reason` says why). A bad witness refutes nothing. `bool(verdict)` is "certainly proved".

    rank: the rank proved to be needed, 0 when nothing is proved. eps_below: this witness proves the rank it speaks of
    for every eps below this number (0 if for none, inf if for all); PROVED means eps < eps_below.
    kind: "bernstein", "leakage", or "rule" for the empty witness, which proves rank 0 without arithmetic.
    breakdown: the numbers that eps_below was computed from. notion: "rank", or "causal rank" when entries above a
    causal mask are free. engine: how it was computed, hence what is trusted.
    """

    status: str
    kind: str
    rank: int
    eps: float
    eps_below: float
    reason: str
    breakdown: dict[str, float]
    notion: str
    shape: tuple[int, int, int]
    scale: float
    causal: bool
    offset: int
    digests: dict[str, str]
    engine: str

    def __bool__(self) -> bool:
        return self.status == "PROVED"

    def to_dict(self) -> dict:
        """Plain numbers and strings, for JSON; non-finite numbers as None."""
        return {
            "status": self.status,
            "kind": self.kind,
            "rank": self.rank,
            "eps": self.eps,
            "eps_below": _finite(self.eps_below),
            "reason": self.reason,
            "breakdown": {name: _finite(value) for name, value in self.breakdown.items()},
            "notion": self.notion,
            "n": self.shape[0],
            "m": self.shape[1],
            "d": self.shape[2],
            "scale": self.scale,
            "causal": self.causal,
            "offset": self.offset,
            **self.digests,
            "engine": self.engine,
        }


def conclude_lower(
    inputs: Inputs,
    kind: str,
    rank: int,
    eps: float,
    eps_below: float,
    *,
    engine: str,
    breakdown: dict[str, float] | None = None,
    fault: str = "",
) -> LowerVerdict:
    """The verdict on a witness known to prove `rank` for every eps below `eps_below`; with a `fault`, for none.

    The comparison is written so that NaN proves nothing, and an exact tie neither.
    """
    eps_below = float(eps_below) if not fault and eps_below > 0.0 else 0.0
    proved = eps < eps_below
    if proved:
        reason = (
            f"every matrix within eps = {eps!r} has {'causal ' if inputs.causal else ''}rank {rank} or more"
        )
    else:
        reason = fault or f"this witness proves rank {rank} for eps below {eps_below!r} only"
    return LowerVerdict(
        status="PROVED" if proved else "UNDECIDED",
        kind=kind,
        rank=rank if proved else 0,
        eps=eps,
        eps_below=eps_below,
        reason=reason,
        breakdown={} if fault else dict(breakdown or {}),
        notion="causal rank" if inputs.causal else "rank",
        shape=(inputs.n, inputs.m, inputs.d),
        scale=inputs.scale,
        causal=inputs.causal,
        offset=inputs.offset,
        digests=inputs.digests,
        engine=engine,
    )


@dataclass(frozen=True, eq=False)
class BracketVerdict:
    """The outcome of checking both ends of a bracket: lower.rank <= the smallest rank within eps <= upper.rank.

    status: PROVED if both ends are, else UNDECIDED, and `reason` says which is not. The ends are verdicts of their
    own, about the same inputs and the same eps; they hold by themselves.
    """

    status: str
    reason: str
    lower: LowerVerdict
    upper: Verdict

    def __bool__(self) -> bool:
        return self.status == "PROVED"

    def to_dict(self) -> dict:
        """Plain numbers and strings, for JSON."""
        return {
            "status": self.status,
            "reason": self.reason,
            "lower": self.lower.to_dict(),
            "upper": self.upper.to_dict(),
        }


def conclude_bracket(lower: LowerVerdict, upper: Verdict) -> BracketVerdict:
    """The verdict on two verdicts about the same inputs and eps."""
    faults = [f"{name}: {end.reason}" for name, end in (("lower", lower), ("upper", upper)) if not end]
    reason = "; ".join(faults) or (
        f"at eps = {upper.eps!r} the smallest {upper.notion} is from {lower.rank} to {upper.rank}"
    )
    return BracketVerdict("UNDECIDED" if faults else "PROVED", reason, lower, upper)
