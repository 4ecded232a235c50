"""Policy: which constructions to try, in which order, and which result to keep."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from rankcert.certificates import Candidate, Certificate, make_certificate
from rankcert.checker import Engine, Verdict, check_rows, read_eps
from rankcert.checker.engine import Progress
from rankcert.constructions import METHODS, Construction, Factorization, Plan
from rankcert.constructions.base import EFFORTS, Search
from rankcert.errors import CannotCertify, InvalidInput
from rankcert.geometry import visible
from rankcert.problem import AttentionProblem

__all__ = [
    "CURVE",
    "MEMORY",
    "Stage",
    "best_eps",
    "certify",
    "certify_problem",
    "check_options",
    "find_curve",
    "rank_curve",
    "read_problem",
    "read_tolerances",
]

Stage = Callable[[str], Progress | None]

MEMORY = 2**32
CURVE = (0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)  # tolerances of a curve
ROOM = 1e-9  # between the bound of a certificate of `best_eps` and its eps
FIRST = ("exact", "splitting", "subspace")  # what "auto" tries first: cheap to plan, or a search
COVERED = {
    "pivots": "recompress",
    "svd": "recompress",
}  # seldom of smaller rank than what stands on the right
CHEAP_SIDE = 1024  # min(n, m) up to which a dense decomposition is tried in any case
COSTLY = ("harmonic", "recompress")  # to plan: seconds, and in many dimensions for nothing
DIMENSIONS = 8  # visible ones up to which these are tried beside a search
HOPELESS = f"costly to plan, and behind a search beyond {DIMENSIONS} visible dimensions"
SEARCHED = "a search has proved a rank that it hardly ever beats; effort='max' tries it all the same"
SMALLEST = "no smaller rank than the 1 already proved can be within eps < 1"


def certify(
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
) -> Certificate:
    """A factorization of the softmax matrix P, of as small a rank as can be found, proved to be within `eps`.

    P = softmax(scale * q k^T + key_bias) over each row's kept keys. The certificate's `bound` is a proved upper
    bound on max_i sum_j |P_ij - (left right^T)_ij|, an absolute number, rounding included, and at most `eps`.

    Parameters
    ----------
    q, k : arrays (n, d) and (m, d) of one head; integers, float16, float32 or float64, taken exactly.
    eps : the tolerance, a positive number. From 1 on, the zero matrix (rank 0) is within it.
    scale : factor of the logits; None means 1/sqrt(d).
    key_bias : (m,) added to every row of logits; -inf masks a key, whose row of k may then hold anything.
    causal, offset : key j is allowed for row i iff j <= i + offset. Entries at disallowed pairs are then free, and
        the certificate is one of causal rank: `Certificate.apply` never uses them.
    method : "auto" tries what can pay and keeps the smallest proved rank; or one of rankcert.METHODS by name.
    effort : "fast", "balanced", "high" or "max": how long a search looks for a smaller rank once it has one.
    seed : of a search's random starts; same seed, machine and threads: same certificate, byte for byte.
    memory : bytes a construction may use for dense work; those that would need more say so and are skipped.
    threads : threads of the checker; None takes all processors.
    progress : progress(stage) is called as each stage begins and returns None or a callable(done, total).

    Raises InvalidInput (before any work) for arrays or options without meaning, and CannotCertify, carrying every
    candidate, when nothing within `memory` and float64 reaches eps. A rank as large as min(n, m) is a normal answer.
    Ctrl-C ends the search with the best certificate proved so far; KeyboardInterrupt passes on if there is none.

    >>> import numpy as np, rankcert
    >>> rng = np.random.default_rng(0)
    >>> certificate = rankcert.certify(rng.normal(size=(200, 2)), rng.normal(size=(300, 2)), eps=0.1)
    >>> certificate.rank < 200 and certificate.bound <= 0.1
    True

    Source: rankcert/checker/PROOFS.md (the bound); docs/THEORY.md (the constructions).
    """
    eps = read_eps(eps)
    check_options(method, effort, seed, memory)
    stage = progress or (lambda name: None)
    problem = read_problem(q, k, threads, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    return certify_problem(problem, eps, method, {"effort": effort, "seed": seed}, memory, stage)


def best_eps(
    q,
    k,
    *,
    rank: int,
    scale: float | None = None,
    key_bias=None,
    causal: bool = False,
    offset: int = 0,
    effort: str = "balanced",
    seed: int = 0,
    memory: int = MEMORY,
    threads: int | None = None,
    progress: Stage | None = None,
) -> Certificate:
    """The dual question: factors of at most `rank` columns with as small a proved bound as can be found.

    The certificate's `eps` is its `bound` times 1 + 1e-9. rank: a nonnegative integer; ranks beyond min(n, m) bring
    nothing. Rank 0, and any rank nothing better is found for, gives the zero matrix, whose bound is 1. Everything
    else as in `certify`, which also says what is raised; CannotCertify if the search needs more than `memory`.

    >>> import rankcert
    >>> head = rankcert.example_head()
    >>> certificate = rankcert.best_eps(head.q, head.k, rank=8, **head.options())
    >>> certificate.rank <= 8 and certificate.bound < 0.5
    True

    Source: docs/CONSTRUCTIONS.md, C10.
    """
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or rank < 0:
        raise InvalidInput(f"rank must be a nonnegative integer, got {rank!r}")
    check_options("splitting", effort, seed, memory)
    stage = progress or (lambda name: None)
    problem = read_problem(q, k, threads, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    search = METHODS["splitting"].set(effort=effort, seed=seed, progress=stage("splitting"))
    if rank == 0 or problem.n == 0:
        return _zero(problem, 1.0 + ROOM)
    refusal = search.refuse_rank(problem, memory)
    if refusal:
        raise CannotCertify(f"no search at a fixed rank: {refusal}")
    started = time.perf_counter()
    factors = search.find_eps(problem, int(rank))
    seconds = time.perf_counter() - started
    measured = _check(problem, factors, None, stage)
    if not measured.bound < 1.0:
        return _zero(problem, 1.0 + ROOM)
    eps = measured.bound * (1.0 + ROOM)
    verdict = _check(problem, factors, eps, stage)
    checking = time.perf_counter() - started - seconds
    candidate = Candidate(search.name, "proved", factors.rank, verdict.bound, seconds, "", checking)
    return _make(problem, eps, factors, verdict, [candidate])


def rank_curve(
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
) -> tuple[Certificate, ...]:
    """Rank against bound: the smallest certificate found for each tolerance, from the largest tolerance down.

    A certificate serves every larger tolerance too, so the ranks never fall along the result; one that serves several
    tolerances stands there several times, with its own `eps`. Options, errors and what is proved are those of
    `certify`, which this calls for every tolerance, with the shared work done once.

    >>> import rankcert
    >>> head = rankcert.example_head()
    >>> curve = rankcert.rank_curve(head.q, head.k, eps=[0.5, 0.2], **head.options())
    >>> curve[0].rank <= curve[1].rank and curve[0].bound <= 0.5 and curve[1].bound <= 0.2
    True
    """
    tolerances = read_tolerances(eps)
    check_options(method, effort, seed, memory)
    stage = progress or (lambda name: None)
    problem = read_problem(q, k, threads, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    return find_curve(problem, tolerances, method, {"effort": effort, "seed": seed}, memory, stage)


def find_curve(
    problem: AttentionProblem,
    tolerances: Sequence[float],
    method: str,
    settings: dict,
    memory: int,
    stage: Stage,
) -> tuple[Certificate, ...]:
    """`rank_curve` of a problem that was read, at descending tolerances."""
    curve: list[Certificate] = []
    for value in reversed(tolerances):
        found = certify_problem(
            problem, value, method, settings, memory, lambda name, at=value: stage(f"eps {at:g}: {name}")
        )
        better = not curve or found.rank < curve[-1].rank
        curve.append(found if better else curve[-1])
    return tuple(reversed(curve))


def read_tolerances(eps) -> list[float]:
    """The different tolerances of a curve, the largest first; InvalidInput if one is no positive number."""
    return sorted({read_eps(value) for value in np.atleast_1d(eps)}, reverse=True)


def check_options(
    method: str, effort: str, seed: int, memory: int, methods: Collection[str] = tuple(METHODS)
) -> None:
    """InvalidInput for options without meaning."""
    if method != "auto" and method not in methods:
        raise InvalidInput(f"method must be 'auto' or one of {', '.join(methods)}, got {method!r}")
    if effort not in EFFORTS:
        raise InvalidInput(f"effort must be one of {', '.join(EFFORTS)}, got {effort!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidInput(f"seed must be a nonnegative integer, got {seed!r}")
    if isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0:
        raise InvalidInput(f"memory must be a positive number of bytes, got {memory!r}")


def read_problem(q, k, threads: int | None, **options) -> AttentionProblem:
    """The head, to be checked with that many threads."""
    return AttentionProblem(q, k, engine=Engine(threads=threads), **options)


def certify_problem(
    problem: AttentionProblem, eps: float, method: str, settings: dict, memory: int, stage: Stage
) -> Certificate:
    """`certify` of a problem that was read, with options that were checked; settings: effort and seed."""
    if eps >= 1.0 or problem.n == 0:
        return _zero(problem, eps)
    attempt = _Attempt(problem, eps, memory, stage, settings)
    attempt.run(METHODS.values() if method == "auto" else [METHODS[method]])
    return attempt.result()


def _check(problem: AttentionProblem, factors: Factorization, eps: float | None, stage: Stage) -> Verdict:
    engine = Engine(threads=problem.engine.threads, progress=stage(f"checking {factors.method}"))
    return problem.check(factors.left, factors.right, eps=eps, engine=engine)


def _make(
    problem: AttentionProblem,
    eps: float,
    factors: Factorization,
    verdict: Verdict,
    candidates: Sequence[Candidate],
) -> Certificate:
    return make_certificate(
        problem.inputs,
        eps,
        factors.left,
        factors.right,
        problem.log_normaliser,
        method=factors.method,
        details=factors.details,
        verdict=verdict,
        candidates=candidates,
    )


class _Attempt:
    """Tries constructions on one problem; `best` is the smallest-rank factorization proved so far."""

    def __init__(self, problem: AttentionProblem, eps: float, memory: int, stage: Stage, settings: dict):
        self.problem, self.eps, self.memory, self.stage = problem, eps, memory, stage
        self.settings = settings  # of the constructions that search
        self.best: tuple[Factorization, Verdict] | None = None
        self.candidates: list[Candidate] = []
        self.built: set[str] = set()

    def run(self, constructions: Iterable[Construction]) -> None:
        """Try them; Ctrl-C ends that, and is passed on when nothing is proved yet."""
        try:
            self._run(constructions)
        except KeyboardInterrupt:
            if self.best is None:
                raise

    def _run(self, constructions: Iterable[Construction]) -> None:
        """First the searches and what is cheap to plan; then the others, if no search got anywhere or effort is max."""
        constructions = list(constructions)
        self._try_all([c for c in constructions if c.name in FIRST])
        others = [c for c in constructions if c.name not in FIRST]
        searched = self.best is not None and any(
            isinstance(c, Search) and c.name in self.built for c in constructions
        )
        if searched and self.settings["effort"] != "max":
            for construction in others:
                self._record(construction, None, time.perf_counter(), SEARCHED)
        else:
            self._try_all(others)

    def _try_all(self, constructions: Iterable[Construction]) -> None:
        """Plan all; try searches, then counted ranks from the smallest, then what only building tells: svd last."""
        planned: list[tuple[Construction, Plan, float]] = []
        for construction in constructions:
            started = time.perf_counter()
            if self.best is not None and self.best[1].rank <= 1:
                self._record(construction, None, started, SMALLEST)
                continue
            if self.best is not None and construction.name in COSTLY:
                if visible(self.problem).dimension > DIMENSIONS:
                    self._record(construction, None, started, HOPELESS)
                    continue
            planning = self.stage(f"planning {construction.name}")
            if isinstance(construction, Search):
                construction = construction.set(**self.settings, progress=planning)
            plan = construction.plan(self.problem, self.eps, memory=self.memory)
            entry = construction, plan, time.perf_counter() - started
            if plan.rank is not None and plan.rank <= 1 and not plan.refusal:
                self._try(*entry)
            else:
                planned.append(entry)
        for entry in sorted(planned, key=_order):
            self._try(*entry)

    def _try(self, construction: Construction, plan: Plan, seconds: float) -> None:
        """Build and check, unless that is of no use; `seconds` have gone into the plan."""
        started = time.perf_counter() - seconds
        reason = self._reason_to_skip(construction, plan)
        if reason:
            self._record(construction, plan.rank, started, reason)
            return
        building = self.stage(construction.name)
        if isinstance(construction, Search):
            construction = construction.set(progress=building)
        factors = construction.build(self.problem, plan, self.eps)
        seconds = time.perf_counter() - started
        self.built.add(construction.name)
        if self.best is not None and factors.rank >= self.best[1].rank:
            note = f"its rank is no smaller than the {self.best[1].rank} already proved"
            self._record(construction, factors.rank, started, note)
            return
        verdict = _check(self.problem, factors, self.eps, self.stage)
        while not verdict and factors.otherwise is not None:
            factors = factors.otherwise
            verdict = _check(self.problem, factors, self.eps, self.stage)
        status, note = ("proved", "") if verdict else ("unproved", verdict.reason)
        checking = time.perf_counter() - started - seconds
        self.candidates.append(
            Candidate(construction.name, status, factors.rank, verdict.bound, seconds, note, checking)
        )
        if verdict:
            self.best = factors, verdict
        if factors.interrupted:
            raise KeyboardInterrupt

    def _reason_to_skip(self, construction: Construction, plan: Plan) -> str | None:
        trivial = min(self.problem.n, self.problem.m)
        if plan.rank is not None and plan.rank > trivial:
            return f"its rank would exceed min(n, m) = {trivial}"
        if plan.refusal:
            return plan.refusal
        if self.best is None:
            return None
        if plan.rank is not None and plan.rank >= self.best[1].rank:
            return f"its rank is no smaller than the {self.best[1].rank} already proved"
        if self.best[1].rank <= 1:
            return SMALLEST
        if isinstance(construction, Search) and any(isinstance(METHODS[name], Search) for name in self.built):
            return "the search that holds P has proved a rank"
        by = COVERED.get(construction.name)
        if by in self.built and (construction.name != "svd" or trivial > CHEAP_SIDE):
            return f"{by} starts from as good an approximation, and was built"
        return None

    def _record(self, construction: Construction, rank: int | None, started: float, why: str) -> None:
        """A construction that was not checked."""
        seconds = time.perf_counter() - started
        self.candidates.append(Candidate(construction.name, "skipped", rank, None, seconds, why))

    def result(self) -> Certificate:
        if self.best is None:
            tried = "; ".join(f"{c.method}: {c.note}" for c in self.candidates)
            built = [c for c in self.candidates if c.bound is not None]
            closest = min(built, key=lambda c: c.bound, default=None)
            ranks = [c.rank for c in self.candidates if c.rank is not None]
            raise CannotCertify(
                f"no factorization could be proved within eps = {self.eps!r} ({tried})",
                bound=closest.bound if closest else None,
                rank=closest.rank if closest else min(ranks, default=None),
                candidates=self.candidates,
            )
        factors, verdict = self.best
        return _make(self.problem, self.eps, factors, verdict, self.candidates)


def _order(entry: tuple[Construction, Plan, float]) -> tuple[int, int]:
    """Searches; counted ranks ascending; those that stand in for others, others, and at last those stood in for."""
    construction, plan, _ = entry
    if isinstance(construction, Search):
        return -1, 0
    if plan.rank is not None:
        return 0, plan.rank
    if construction.name in COVERED:
        return 3, list(COVERED).index(construction.name)
    return (1, 0) if construction.name in COVERED.values() else (2, 0)


def _zero(problem: AttentionProblem, eps: float) -> Certificate:
    """Rank 0: every row of P sums to 1, so the zero matrix is within any eps >= 1."""
    left, right = np.zeros((problem.n, 0)), np.zeros((problem.m, 0))
    verdict = check_rows(problem.inputs, left, right, eps=eps)
    candidate = Candidate("zero", "proved", 0, verdict.bound, 0.0, "eps >= 1" if problem.n else "no queries")
    return make_certificate(
        problem.inputs,
        eps,
        left,
        right,
        np.zeros(problem.n),
        method="zero",
        details={},
        verdict=verdict,
        candidates=[candidate],
    )
