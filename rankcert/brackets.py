"""Both ends of the rank: proved lower bounds, and brackets [lower, upper] of what a head needs at a tolerance."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankcert.certificates import (
    Candidate,
    Certificate,
    bracket_pieces,
    lower_pieces,
    make_lower_claim,
    write_pieces,
)
from rankcert.certification import (
    CURVE,
    MEMORY,
    Stage,
    certify_problem,
    check_options,
    find_curve,
    read_problem,
    read_tolerances,
)
from rankcert.checker import (
    BracketVerdict,
    Engine,
    LowerClaim,
    LowerVerdict,
    check_bernstein,
    check_leakage,
    read_bracket,
    read_eps,
    read_lower,
)
from rankcert.checker.verdict import conclude_bracket
from rankcert.lowerbounds import (
    WITNESSES,
    Found,
    FoundLeakage,
    find_bernstein,
    find_leakage,
    sweep_bernstein,
)
from rankcert.problem import AttentionProblem

__all__ = [
    "Bracket",
    "LowerBound",
    "bracket",
    "bracket_curve",
    "load_bracket",
    "load_lower",
    "lower_bound",
    "lower_curve",
    "lower_problem",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class LowerBound(LowerClaim):
    """A witness that no matrix within `eps` of a head's softmax matrix has a rank below `rank`.

    rank, eps: what `verdict` proves; on a lower bound that was loaded and not verified, what the file claims. kind
    "bernstein": rows (rank,), groups (m,) and weights (K, rank), as in `rankcert.checker.check_bernstein`; kind
    "leakage": rows only. Under a causal mask it is about the causal rank. `candidates` says what else was tried; what
    they proved is their `rank`.
    """

    verdict: LowerVerdict | None = None
    candidates: tuple[Candidate, ...] = ()

    def to_bytes(self) -> bytes:
        """The file's bytes: the same record gives the same bytes."""
        return b"".join(lower_pieces(self))

    def save(self, path: str | os.PathLike) -> None:
        """Write the file (checker/FORMAT.md); an existing one is replaced only once the new one is complete."""
        write_pieces(path, lower_pieces(self))


@dataclass(frozen=True, eq=False)
class Bracket:
    """The eps-rank of a head is from `lower` to `upper`: the two proofs, about the same head and eps."""

    lower_bound: LowerBound
    certificate: Certificate

    @property
    def lower(self) -> int:
        """No matrix within eps has a smaller rank."""
        return self.lower_bound.rank

    @property
    def upper(self) -> int:
        """The rank of the factorization in `certificate`."""
        return self.certificate.rank

    @property
    def eps(self) -> float:
        """The tolerance both ends are about."""
        return self.certificate.eps

    @property
    def verdict(self) -> BracketVerdict | None:
        """The checker's word on both ends; None on a bracket that was loaded and not verified."""
        if self.lower_bound.verdict is None or self.certificate.verdict is None:
            return None
        return conclude_bracket(self.lower_bound.verdict, self.certificate.verdict)

    def to_bytes(self) -> bytes:
        """The file's bytes: the same record gives the same bytes."""
        return b"".join(bracket_pieces(self.certificate, self.lower_bound))

    def save(self, path: str | os.PathLike) -> None:
        """Write both proofs into one file (checker/FORMAT.md), an existing one being replaced only at the end."""
        write_pieces(path, bracket_pieces(self.certificate, self.lower_bound))


def load_lower(path: str | os.PathLike) -> LowerBound:
    """Read a saved lower bound; `rankcert.verify_lower` proves it again from the inputs.

    Raises MalformedCertificate naming the broken rule of the format, OSError if the path cannot be read.
    """
    return LowerBound(**vars(read_lower(path)))


def load_bracket(path: str | os.PathLike) -> Bracket:
    """Read a saved bracket; `rankcert.verify_bracket` proves both ends again from the inputs.

    Errors as in `load_lower`.
    """
    upper, lower = read_bracket(path)
    return Bracket(LowerBound(**vars(lower)), Certificate(**vars(upper)))


def lower_bound(
    q,
    k,
    *,
    eps: float,
    scale: float | None = None,
    key_bias=None,
    causal: bool = False,
    offset: int = 0,
    method: str = "auto",
    effort: str = "balanced",
    seed: int = 0,
    memory: int = MEMORY,
    threads: int | None = None,
    progress: Stage | None = None,
) -> LowerBound:
    """A rank that every matrix within `eps` of the softmax matrix P has at least, as large as can be found and proved.

    "Within" is max_i sum_j |P_ij - B_ij| <= eps, P = softmax(scale * q k^T + key_bias) over each row's kept keys. Under
    a causal mask only allowed pairs count, and the result is about the causal rank: the smallest rank of U V^T, whose
    entries at disallowed pairs are free.

    q, k, eps, scale, key_bias, causal, offset, seed, memory, threads, progress : as in `rankcert.certify`.
    method : "auto" keeps the best of all searches; or "bernstein" (rows and weights, the strong one), or "leakage"
        (rows alone, in one pass, for heads of any length).
    effort : "fast", "balanced", "high" or "max": how long to search.

    Returns a LowerBound, proved; its rank is 0 for eps >= 1 or no queries, where the zero matrix will do. Raises
    InvalidInput for arrays or options without meaning. Ctrl-C ends the search with the best proved so far.

    >>> import rankcert
    >>> head = rankcert.example_head()
    >>> found = rankcert.lower_bound(head.q, head.k, eps=0.5, effort="fast", **head.options())
    >>> found.rank > 1 and bool(rankcert.verify_lower(found, head.q, head.k, **head.options()))
    True

    Source: rankcert/checker/PROOFS.md, Theorems 9 and 10 (what is proved); docs/LOWERBOUNDS.md (the searches).
    """
    eps = read_eps(eps)
    check_options(method, effort, seed, memory, WITNESSES)
    stage = progress or (lambda name: None)
    problem = read_problem(q, k, threads, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    return lower_problem(problem, eps, method, {"effort": effort, "seed": seed}, memory, stage)


def lower_curve(
    q,
    k,
    *,
    eps: Sequence[float] = CURVE,
    scale: float | None = None,
    key_bias=None,
    causal: bool = False,
    offset: int = 0,
    effort: str = "balanced",
    seed: int = 0,
    memory: int = MEMORY,
    threads: int | None = None,
    progress: Stage | None = None,
) -> tuple[LowerBound, ...]:
    """A lower bound for each tolerance, from the largest tolerance down, by one sweep over the ranks.

    A witness proves its rank at every smaller tolerance too, so the ranks never fall along the result. One sweep finds
    witnesses of many ranks, each with the tolerances it serves; `lower_bound` at one tolerance can find more. Options
    and errors as in `lower_bound`.

    >>> import rankcert
    >>> head = rankcert.example_head()
    >>> curve = rankcert.lower_curve(head.q, head.k, eps=[0.5, 0.2], effort="fast", **head.options())
    >>> curve[0].rank <= curve[1].rank
    True
    """
    tolerances = read_tolerances(eps)
    check_options("auto", effort, seed, memory, WITNESSES)
    stage = progress or (lambda name: None)
    problem = read_problem(q, k, threads, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    return _find_lower_curve(problem, tolerances, {"effort": effort, "seed": seed}, memory, stage)


def bracket(
    q,
    k,
    *,
    eps: float,
    scale: float | None = None,
    key_bias=None,
    causal: bool = False,
    offset: int = 0,
    method: str = "auto",
    effort: str = "balanced",
    seed: int = 0,
    memory: int = MEMORY,
    threads: int | None = None,
    progress: Stage | None = None,
) -> Bracket:
    """The rank that a head needs at `eps`, from both sides: a proved lower bound and a proved factorization.

    method : the construction of the upper end, as in `rankcert.certify`. Everything else is given to both `certify`
    and `lower_bound`, which also say what is raised.

    >>> import rankcert
    >>> head = rankcert.example_head()
    >>> found = rankcert.bracket(head.q, head.k, eps=0.5, effort="fast", **head.options())
    >>> 1 < found.lower <= found.upper, found.verdict.status
    (True, 'PROVED')
    """
    eps = read_eps(eps)
    check_options(method, effort, seed, memory)
    stage = progress or (lambda name: None)
    problem = read_problem(q, k, threads, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    settings = {"effort": effort, "seed": seed}
    certificate = certify_problem(problem, eps, method, settings, memory, stage)
    lower = lower_problem(problem, eps, "auto", settings, memory, stage, certificate.rank)
    return Bracket(lower, certificate)


def bracket_curve(
    q,
    k,
    *,
    eps: Sequence[float] = CURVE,
    scale: float | None = None,
    key_bias=None,
    causal: bool = False,
    offset: int = 0,
    method: str = "auto",
    effort: str = "balanced",
    seed: int = 0,
    memory: int = MEMORY,
    threads: int | None = None,
    progress: Stage | None = None,
) -> tuple[Bracket, ...]:
    """`rankcert.rank_curve` and `lower_curve` together: a bracket for each tolerance, from the largest down.

    >>> import rankcert
    >>> head = rankcert.example_head()
    >>> curve = rankcert.bracket_curve(head.q, head.k, eps=[0.5, 0.2], effort="fast", **head.options())
    >>> [point.eps for point in curve], all(point.lower <= point.upper for point in curve)
    ([0.5, 0.2], True)
    """
    tolerances = read_tolerances(eps)
    check_options(method, effort, seed, memory)
    stage = progress or (lambda name: None)
    problem = read_problem(q, k, threads, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    settings = {"effort": effort, "seed": seed}
    uppers = find_curve(problem, tolerances, method, settings, memory, stage)
    lowers = _find_lower_curve(problem, tolerances, settings, memory, stage)
    return tuple(
        Bracket(lower, _at(problem, upper, value))
        for lower, upper, value in zip(lowers, uppers, tolerances, strict=True)
    )


def _at(problem: AttentionProblem, certificate: Certificate, eps: float) -> Certificate:
    """A certificate for a larger eps than its own."""
    if certificate.eps == eps:
        return certificate
    verdict = problem.check(certificate.left, certificate.right, eps=eps, engine=problem.engine)
    return replace(certificate, eps=eps, verdict=verdict)


def lower_problem(
    problem: AttentionProblem,
    eps: float,
    method: str,
    settings: dict,
    memory: int,
    stage: Stage,
    most: int | None = None,
) -> LowerBound:
    """`lower_bound` of a problem that was read, with options that were checked; settings: effort and seed.

    most: a rank that is known to be enough; a search that reaches it ends.
    """
    best = _nothing(problem, eps)
    if eps >= 1.0 or problem.n == 0:
        return best
    candidates: list[Candidate] = []
    for name in WITNESSES if method == "auto" else [method]:
        if best.rank == most:
            candidates.append(
                Candidate(name, "skipped", None, None, 0.0, f"rank {most} is known to be enough")
            )
            continue
        started = time.perf_counter()
        if name == "bernstein":
            found = find_bernstein(problem, eps, **settings, memory=memory, most=most, progress=stage(name))
        else:
            found = find_leakage(problem, eps, progress=stage(name))
        seconds = time.perf_counter() - started
        if found is None:
            candidates.append(Candidate(name, "skipped", None, None, seconds, "no witness was found"))
            continue
        made, candidate = _prove(problem, found, eps, settings, stage)
        candidates.append(replace(candidate, seconds=seconds))
        if made.verdict and made.rank > best.rank:
            best = made
        if found.interrupted:
            break
    return replace(best, candidates=tuple(candidates))


def _find_lower_curve(
    problem: AttentionProblem, tolerances: Sequence[float], settings: dict, memory: int, stage: Stage
) -> tuple[LowerBound, ...]:
    """`lower_curve` of a problem that was read, at descending tolerances."""
    below_one = [value for value in tolerances if value < 1.0]
    found = list(sweep_bernstein(problem, below_one, **settings, memory=memory, progress=stage("bernstein")))
    found.sort(key=lambda witness: -witness.rank)
    curve = []
    for value in tolerances:
        point = _nothing(problem, value)
        for witness in found:
            if witness.eps_est > value:
                made, _ = _prove(problem, witness, value, settings, stage)
                if made.verdict:
                    point = made
                    break
        curve.append(point)
    return tuple(curve)


def _prove(
    problem: AttentionProblem, found: Found | FoundLeakage, eps: float, settings: dict, stage: Stage
) -> tuple[LowerBound, Candidate]:
    """A witness with the checker's word on it."""
    started = time.perf_counter()
    leakage = isinstance(found, FoundLeakage)
    kind = "leakage" if leakage else "bernstein"
    engine = Engine(threads=problem.engine.threads, progress=stage(f"checking {kind}"))
    if leakage:
        verdict = check_leakage(problem.inputs, found.rows, eps=eps, engine=engine)
        made = _make(problem, eps, verdict, "leakage", {}, kind=kind, rows=found.rows)
    else:
        witness = {"rows": found.rows, "groups": found.groups, "weights": found.weights}
        verdict = check_bernstein(problem.inputs, **witness, eps=eps, engine=engine)
        made = _make(problem, eps, verdict, "bernstein", settings, kind=kind, **witness)
    seconds = time.perf_counter() - started
    status, note = ("proved", "") if verdict else ("unproved", verdict.reason)
    return made, Candidate(kind, status, verdict.rank, None, 0.0, note, seconds)


def _make(
    problem: AttentionProblem, eps: float, verdict: LowerVerdict, method: str, details: dict, **witness
) -> LowerBound:
    claim = make_lower_claim(
        problem.inputs, eps=eps, rank=verdict.rank, method=method, details=dict(details), **witness
    )
    return LowerBound(**vars(claim), verdict=verdict)


def _nothing(problem: AttentionProblem, eps: float) -> LowerBound:
    """Rank 0, which every matrix has."""
    witness = {
        "rows": np.empty(0, np.int64),
        "groups": np.full(problem.m, -1),
        "weights": np.empty((0, 0), np.int8),
    }
    verdict = check_bernstein(problem.inputs, **witness, eps=eps)
    return _make(problem, eps, verdict, "rule", {}, kind="bernstein", **witness)
