"""The questions the checker answers: is this certificate true, is this lower bound, how wrong are these factors?"""

import os
from dataclasses import replace

import numpy as np

from rankcert.checker.claim import Claim, read_claim
from rankcert.checker.engine import Engine, Progress
from rankcert.checker.errors import InvalidInput
from rankcert.checker.exact import (
    enclose_bernstein_limit,
    enclose_leakage_sum,
    enclose_rows,
    flint_version,
)
from rankcert.checker.inputs import Inputs, read_inputs
from rankcert.checker.lower import (
    check_bernstein,
    check_leakage,
    conclude_leakage,
    read_rows,
    read_weights,
    support_fault,
)
from rankcert.checker.lower_claim import LowerClaim, read_bracket, read_lower
from rankcert.checker.rows import check_rows, factor_fault, read_eps, read_factors
from rankcert.checker.verdict import (
    BracketVerdict,
    LowerVerdict,
    Verdict,
    conclude,
    conclude_bracket,
    conclude_lower,
)

__all__ = ["audit", "verify", "verify_bracket", "verify_lower"]


def verify(
    certificate: Claim | str | os.PathLike | bytes,
    q,
    k,
    *,
    scale: float | None = None,
    key_bias=None,
    causal: bool = False,
    offset: int = 0,
    eps: float | None = None,
    gemm: str = "blas",
    exact: bool = False,
    exact_rows: int = 0,
    threads: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """Prove a certificate again, from the caller's own inputs.

    `certificate` is a record, a path, or the bytes of a file. The verdict is about the head given here: q (n, d),
    k (m, d), scale (None: 1/sqrt(d)), key_bias (m,), causal with offset. A certificate made for anything else, in
    any of these, is not checked at all: the verdict is UNDECIDED and its reason begins "other inputs". The target
    is the certificate's eps, which must equal `eps` when you give it. No stored number is believed.

    gemm: "blas" or "portable" (own loops). exact: decide by ball arithmetic alone (python-flint). exact_rows=K:
    also enclose the K worst and K random rows (chosen by `seed`). threads: None uses all processors.
    progress: called as progress(rows done, rows in all).

    Raises MalformedCertificate for a file that breaks the format, InvalidInput for arrays that are no head.
    Source: rankcert/checker/PROOFS.md, Theorems 2 and 3.

    >>> import numpy as np, rankcert
    >>> q = k = np.random.default_rng(0).normal(size=(20, 3))
    >>> certificate = rankcert.certify(q, k, eps=0.5)
    >>> rankcert.verify(certificate, q, k).status
    'PROVED'
    >>> rankcert.verify(certificate, q, 2 * k).reason
    "other inputs: key_sha256: the caller's keys are not those of the certificate"
    """
    engine = Engine(gemm=gemm, threads=threads, progress=progress)
    _check_exact_options(exact, exact_rows)
    if eps is not None:
        eps = read_eps(eps)
    inputs = read_inputs(q, k, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    claim = certificate if isinstance(certificate, Claim) else read_claim(certificate)
    return _verify_claim(inputs, claim, eps, engine, exact, exact_rows, seed)


def verify_lower(
    lower: LowerClaim | str | os.PathLike | bytes,
    q,
    k,
    *,
    scale: float | None = None,
    key_bias=None,
    causal: bool = False,
    offset: int = 0,
    eps: float | None = None,
    gemm: str = "blas",
    exact: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> LowerVerdict:
    """Prove a lower bound again, from the caller's own inputs: that no matrix of smaller rank is within eps.

    `lower` is a record, a path, or the bytes of a file. The verdict is PROVED if the witness shows that every matrix
    whose rows are within eps, in l1, of those of the softmax matrix has the rank claimed, or more; else UNDECIDED. Its
    `rank` is what was proved, its `eps_below` up to where. It is about the head given here; a lower bound made for
    another one, or another `eps` when you give it, is not checked: its reason begins "other inputs". Arguments and
    errors as in `verify`; exact: by ball arithmetic alone.

    Source: rankcert/checker/PROOFS.md, Theorems 9 and 10.

    >>> import numpy as np, rankcert
    >>> from rankcert.certificates import make_lower_claim
    >>> from rankcert.checker import read_inputs
    >>> q, k = 4.0 * np.eye(3), 4.0 * np.eye(3)
    >>> lower = make_lower_claim(
    ...     read_inputs(q, k), kind="bernstein", eps=0.5, rank=3, rows=np.arange(3), groups=np.arange(3),
    ...     weights=np.eye(3, dtype=np.int8), method="hand", details={},
    ... )
    >>> verdict = rankcert.verify_lower(lower, q, k)
    >>> verdict.status, verdict.rank, verdict.notion
    ('PROVED', 3, 'rank')
    >>> rankcert.verify_lower(lower, q, k, eps=0.25).reason
    'other inputs: eps: the lower bound says 0.5, the caller 0.25'
    """
    engine = Engine(gemm=gemm, threads=threads, progress=progress)
    _check_exact_options(exact, 0)
    if eps is not None:
        eps = read_eps(eps)
    inputs = read_inputs(q, k, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    claim = lower if isinstance(lower, LowerClaim) else read_lower(lower)
    return _verify_lower_claim(inputs, claim, eps, engine, exact)


def verify_bracket(
    bracket: tuple[Claim, LowerClaim] | str | os.PathLike | bytes,
    q,
    k,
    *,
    scale: float | None = None,
    key_bias=None,
    causal: bool = False,
    offset: int = 0,
    eps: float | None = None,
    gemm: str = "blas",
    exact: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> BracketVerdict:
    """Prove both ends of a bracket again: a rank that is enough within eps, and one that is needed.

    `bracket` is a path, the bytes of a file, or the two records (certificate, lower bound) about one eps. The verdict
    is PROVED if `verify` proves the one and `verify_lower` the other; their verdicts are its `upper` and `lower`.
    Arguments and errors as in these two.

    >>> import numpy as np, rankcert
    >>> from rankcert.certificates import make_lower_claim
    >>> from rankcert.checker import read_inputs
    >>> q, k = 4.0 * np.eye(3), 4.0 * np.eye(3)
    >>> lower = make_lower_claim(
    ...     read_inputs(q, k), kind="bernstein", eps=0.5, rank=3, rows=np.arange(3), groups=np.arange(3),
    ...     weights=np.eye(3, dtype=np.int8), method="hand", details={},
    ... )
    >>> rankcert.verify_bracket((rankcert.certify(q, k, eps=0.5), lower), q, k).reason
    'at eps = 0.5 the smallest rank is from 3 to 3'
    """
    engine = Engine(gemm=gemm, threads=threads, progress=progress)
    _check_exact_options(exact, 0)
    if eps is not None:
        eps = read_eps(eps)
    inputs = read_inputs(q, k, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    upper, lower = bracket if isinstance(bracket, tuple) else read_bracket(bracket)
    if upper.eps != lower.eps:
        raise InvalidInput(f"the two ends of a bracket need one eps, got {upper.eps!r} and {lower.eps!r}")
    return conclude_bracket(
        _verify_lower_claim(inputs, lower, eps, engine, exact),
        _verify_claim(inputs, upper, eps, engine, exact, 0, 0),
    )


def audit(
    q,
    k,
    left,
    right,
    *,
    eps: float | None = None,
    scale: float | None = None,
    key_bias=None,
    causal: bool = False,
    offset: int = 0,
    log_normaliser=None,
    gemm: str = "blas",
    exact: bool = False,
    exact_rows: int = 0,
    threads: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verdict:
    """The proved worst-row l1 error of anybody's factors: max_i sum_j |P_ij - (left right^T)_ij|.

    P = softmax(scale q k^T + key_bias) over each row's kept keys; left (n, r), right (m, r). With `eps` the verdict
    is PROVED, REFUTED or UNDECIDED; without, its status is MEASURED and its `bound` holds. `log_normaliser` (n,) is
    advice that saves one of two sweeps and is never believed; left out, it is found here. Entries at masked keys
    count as errors; entries above a causal mask do not. Other arguments and errors as in `verify`.

    >>> import numpy as np, rankcert
    >>> q, k = np.zeros((4, 2)), np.zeros((8, 2))
    >>> verdict = rankcert.audit(q, k, np.ones((4, 1)), np.full((8, 1), 0.125))
    >>> verdict.status, verdict.bound < 1e-12
    ('MEASURED', True)
    """
    engine = Engine(gemm=gemm, threads=threads, progress=progress)
    _check_exact_options(exact, exact_rows)
    inputs = read_inputs(q, k, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    return _decide(inputs, left, right, eps, log_normaliser, engine, exact, exact_rows, seed)


def _check_exact_options(exact: bool, exact_rows: int) -> None:
    if isinstance(exact_rows, bool) or not isinstance(exact_rows, int) or exact_rows < 0:
        raise InvalidInput(f"exact_rows must be a nonnegative integer, got {exact_rows!r}")
    if exact or exact_rows:
        flint_version()  # fail before any work when python-flint is absent


def _verify_claim(
    inputs: Inputs, claim: Claim, eps: float | None, engine: Engine, exact: bool, exact_rows: int, seed: int
) -> Verdict:
    difference = next(claim.mismatches(inputs, eps), None)
    if difference is not None:
        nothing = np.empty(0)
        return conclude(
            inputs,
            claim.rank,
            claim.eps,
            nothing,
            nothing,
            fault=f"other inputs: {difference}",
            engine=engine.describe(),
        )
    return _decide(
        inputs, claim.left, claim.right, claim.eps, claim.log_normaliser, engine, exact, exact_rows, seed
    )


def _verify_lower_claim(
    inputs: Inputs, claim: LowerClaim, eps: float | None, engine: Engine, exact: bool
) -> LowerVerdict:
    difference = next(claim.mismatches(inputs, eps), None)
    if difference is not None:
        return conclude_lower(
            inputs,
            claim.kind,
            claim.rank,
            claim.eps,
            0.0,
            fault=f"other inputs: {difference}",
            engine=engine.describe(),
        )
    if exact and claim.rows.size:
        verdict = _decide_lower_exactly(inputs, claim, engine.progress)
    elif claim.kind == "bernstein":
        verdict = check_bernstein(
            inputs, claim.rows, claim.groups, claim.weights, eps=claim.eps, engine=engine
        )
    else:
        verdict = check_leakage(inputs, claim.rows, eps=claim.eps, engine=engine)
    if verdict and verdict.rank < claim.rank:
        reason = f"the witness proves rank {verdict.rank}, not the {claim.rank} claimed"
        return replace(verdict, status="UNDECIDED", reason=reason)
    return verdict


def _decide_lower_exactly(inputs: Inputs, claim: LowerClaim, progress: Progress | None) -> LowerVerdict:
    rows = read_rows(inputs, claim.rows)
    if claim.kind == "leakage":
        held, _ = enclose_leakage_sum(inputs, rows, progress)
        return conclude_leakage(inputs, rows.size, claim.eps, held, 0.0, engine=_ball_engine())
    groups, weights = read_weights(inputs, rows, claim.groups, claim.weights)
    fault, limit = support_fault(inputs, rows, groups), 0.0
    if not fault:
        limit, _ = enclose_bernstein_limit(inputs, rows, groups, weights, progress)
    return conclude_lower(inputs, claim.kind, rows.size, claim.eps, limit, engine=_ball_engine(), fault=fault)


def _decide(
    inputs: Inputs, left, right, eps, hint, engine: Engine, exact: bool, exact_rows: int, seed: int
) -> Verdict:
    left, right = read_factors(inputs, left, right)
    trivial = inputs.n == 0 or left.shape[1] == 0
    if exact and not trivial:
        lower, upper = enclose_rows(inputs, left, right, np.arange(inputs.n), engine.progress)
        return conclude(
            inputs,
            left.shape[1],
            None if eps is None else read_eps(eps),
            upper,
            lower,
            fault=factor_fault(left, right),
            engine=_ball_engine(),
            exact_rows=inputs.n,
        )
    verdict = check_rows(inputs, left, right, eps=eps, log_normaliser=hint, engine=engine)
    if trivial or not exact_rows or not np.isfinite(verdict.bound):
        return verdict
    worst = np.argsort(-verdict.row_bounds, kind="stable")[:exact_rows]
    others = np.random.default_rng(seed).permutation(inputs.n)[:exact_rows]
    rows = np.union1d(worst, others)
    ball_lower, ball_upper = enclose_rows(inputs, left, right, rows, engine.progress)
    lower, upper = verdict.row_bounds_lower.copy(), verdict.row_bounds.copy()
    fault = (
        ""
        if (ball_lower <= upper[rows]).all() and (lower[rows] <= ball_upper).all()
        else ("the float64 bounds and the ball arithmetic contradict each other: one of them is broken here")
    )
    lower[rows], upper[rows] = np.fmax(lower[rows], ball_lower), np.fmin(upper[rows], ball_upper)
    return conclude(
        inputs,
        verdict.rank,
        verdict.eps,
        upper,
        lower,
        fault=fault,
        exact_rows=rows.size,
        engine=f"{engine.describe()}; {rows.size} rows by {_ball_engine()}",
    )


def _ball_engine() -> str:
    return f"ball arithmetic (python-flint {flint_version()})"
