"""The two questions the checker answers: is this certificate true, and how wrong are these factors?"""

import os

import numpy as np

from rankcert.checker.claim import Claim, read_claim
from rankcert.checker.engine import Engine, Progress
from rankcert.checker.errors import InvalidInput
from rankcert.checker.exact import enclose_rows, flint_version
from rankcert.checker.inputs import Inputs, read_inputs
from rankcert.checker.rows import check_rows, factor_fault, read_eps, read_factors
from rankcert.checker.verdict import Verdict, conclude

__all__ = ["audit", "verify"]


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
