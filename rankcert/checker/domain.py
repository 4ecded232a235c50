"""Bounds for heads whose queries and keys lie in two balls: for all of them (PROOFS.md, Theorem 6), and for the
answers of one stream of keys, from what was measured on the way (Theorem 7).
"""

import math
import os
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from rankcert.checker.claim import COUNT, MAX_HEADER, NUMBER, POSITIVE, TEXT, Tensor, read_file, take_fields
from rankcert.checker.errors import InvalidInput
from rankcert.checker.inputs import SIZE_LIMIT, VALUE_LIMIT, exact_float64
from rankcert.checker.kernel import EPS_M, exponentials, require_safe_arithmetic
from rankcert.checker.rows import read_eps
from rankcert.checker.suprema import relative_error_upper

__all__ = [
    "DOMAIN_FORMAT",
    "DOMAIN_VERSION",
    "MAX_KEYS",
    "Domain",
    "DomainClaim",
    "DomainVerdict",
    "check_domain",
    "features_in_range",
    "norms_upper",
    "read_domain",
    "read_domain_claim",
    "read_domain_fields",
    "stream_row_bounds",
    "verify_domain",
]

DOMAIN_FORMAT = "rankcert domain certificate"
DOMAIN_VERSION = 1
MAX_DEGREE = 2**12

MAX_KEYS = 2**30
NORMALISERS = ("own", "exact")
KEY_WEIGHTS = 2.0**-42  # relative error of a computed e^(b_j - max b)
EXACT = 500  # powers of two within 2^+-EXACT multiply without rounding
REACH_LIMIT = 300.0  # binary digits that features may be larger than 1 (Theorems 6 and 7)
UNDERFLOW = 1e-60  # of a row's sums, and all keys of weight below e^-700 (Theorem 7)
UP = 1 + 64 * EPS_M  # Lemma 6


@dataclass(frozen=True)
class Domain:
    """Which heads a domain statement is about.

    Queries of norm at most `query_radius`, keys within `key_radius` of a centre, both in `dim` dimensions; logits
    scale <q, k> plus any key biases; at most `max_keys` keys. normaliser: "own" (rows divided by their own sums) or
    "exact" (rows divided by the exact softmax normaliser).
    """

    dim: int
    query_radius: float
    key_radius: float
    scale: float
    max_keys: int = MAX_KEYS
    normaliser: str = "own"

    @property
    def half_width(self) -> float:
        """W: centred logits of admitted tokens lie in [-W, W].

        A token is admitted when its computed norm is within its radius up to rounding (Theorem 6), hence the factor.
        """
        return abs(self.scale) * self.query_radius * self.key_radius * (1 + (8 * self.dim + 100) * EPS_M)

    @property
    def balance(self) -> float:
        """A power of two that keys are multiplied by, and scaled queries divided by, so that both are about as long.

        Powers of unlike tokens would leave the range of float64 where their products do not.
        """
        if self.scale == 0.0:
            return 1.0
        ratio = math.log2(abs(self.scale)) + math.log2(self.query_radius) - math.log2(self.key_radius)
        return 2.0 ** round(ratio / 2)


@dataclass(frozen=True, eq=False)
class DomainClaim:
    """The polynomial with these coefficients makes features within `eps` of softmax attention on the whole domain."""

    domain: Domain
    eps: float
    coefficients: np.ndarray


@dataclass(frozen=True)
class DomainVerdict:
    """The outcome of `check_domain`: status PROVED, UNDECIDED or MEASURED (no eps asked); as in `Verdict`."""

    status: str
    eps: float | None
    bound: float
    reason: str
    breakdown: dict[str, float]
    rank: int
    domain: Domain

    def __bool__(self) -> bool:
        return self.status == "PROVED"


def read_domain(dim, query_radius, key_radius, scale, max_keys=MAX_KEYS, normaliser="own") -> Domain:
    """A `Domain`, or InvalidInput naming the number and its limit. scale None means 1/sqrt(dim)."""
    for name, value, limit in (("dim", dim, 2**20), ("max_keys", max_keys, MAX_KEYS)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= limit:
            raise InvalidInput(f"{name} must be an integer from 1 to {limit}, got {value!r}")
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    numbers = {}
    for name, value in (("query_radius", query_radius), ("key_radius", key_radius), ("scale", scale)):
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise InvalidInput(f"{name} must be a number, got {value!r}") from None
        if not abs(numbers[name]) <= VALUE_LIMIT:
            raise InvalidInput(f"{name} must be finite and at most 2**100, got {value!r}")
    for name in ("query_radius", "key_radius"):
        if not numbers[name] > 0.0:
            raise InvalidInput(f"{name} must be positive, got {numbers[name]!r}")
    if normaliser not in NORMALISERS:
        raise InvalidInput(f"normaliser must be one of {', '.join(NORMALISERS)}, got {normaliser!r}")
    return Domain(int(dim), **numbers, max_keys=int(max_keys), normaliser=normaliser)


def check_domain(domain: Domain, coefficients, eps: float | None = None) -> DomainVerdict:
    """Bound the row l1 error of the polynomial features with these coefficients over the whole domain.

    `coefficients` (degree + 1,) float64 are those of p in powers of the centred logit; the features and the way they
    are rounded are those of PROOFS.md, Theorem 6. inf where nothing is proved.
    """
    require_safe_arithmetic()
    a = exact_float64("coefficients", coefficients, 1)
    if not a.size:
        raise InvalidInput("a polynomial needs at least one coefficient")
    width, degree = domain.half_width, a.size - 1
    rank = math.comb(domain.dim + degree, degree)
    rho = _polynomial_error(a.tobytes(), width)
    # spread: the largest sum of absolute values of one entry's terms, over the smallest weight of the domain
    spread = _absolute_sum_upper(a, width) * _exp_upper(width)
    features = (10 * degree + 4) * EPS_M * spread
    relative = UP * (rho + features + KEY_WEIGHTS + rho * KEY_WEIGHTS)
    breakdown = {"polynomial": rho, "features": features, "key weights": KEY_WEIGHTS}
    bound = math.inf
    if rank <= SIZE_LIMIT and features_in_range(domain, degree) and relative < 1.0:  # false for NaN
        if domain.normaliser == "exact":
            bound = math.nextafter(UP * (relative + 2 * EPS_M), math.inf)
        else:
            own = _own_upper(relative)
            sums = UP * (domain.max_keys + rank) * EPS_M * spread * (1 + relative) / (1 - UP * relative)
            breakdown["normaliser sums"] = sums
            if 0.0 <= sums < 0.5:
                bound = math.nextafter(UP * (own + UP * sums / (1 - sums) + 2 * EPS_M), math.inf)
    if eps is None:
        status, reason = (
            ("MEASURED", "no eps was asked") if bound < math.inf else ("UNDECIDED", "nothing is proved")
        )
    elif bound <= eps:
        status, reason = "PROVED", f"every head of the domain is within eps = {eps!r}"
    else:
        status, reason = (
            "UNDECIDED",
            f"the bound proved over the whole domain is {bound!r}, above eps = {eps!r}",
        )
    return DomainVerdict(status, eps, bound, reason, breakdown, rank, domain)


def features_in_range(domain: Domain, degree: int) -> bool:
    """Whether no feature of a token of the domain overflows, and what underflows is negligible (Theorems 6 and 7)."""
    balance = domain.balance
    scale = abs(domain.scale) / balance
    reach = math.sqrt(domain.dim) * max(1.0, scale * domain.query_radius, domain.key_radius * balance)
    exact = 2.0**-EXACT <= balance <= 2.0**EXACT and (scale == 0.0 or scale >= 2.0**-EXACT)
    return exact and degree * math.log2(reach) <= REACH_LIMIT


def norms_upper(computed: np.ndarray, dim: int) -> np.ndarray:
    """At least the Euclidean norms of tokens in `dim` dimensions, each coordinate rounded once (Lemma 5)."""
    return computed * (1 + (dim + 8) * EPS_M) + 1e-80


def stream_row_bounds(
    domain: Domain,
    coefficients,
    query_norms: np.ndarray,
    moments: np.ndarray,
    normalisers: np.ndarray,
    *,
    depth: int,
    counted: int,
) -> np.ndarray:
    """Bound what answers of a stream are off by, rounding included: (n,), in units of the largest norm of a value.

    query_norms (n,) and the key norms in moments (degree + 1,), moments[t] = sum_j weight_j (balance |k_j|)^t, are
    upper bounds (`norms_upper`); normalisers (n,) are the computed row sums, NaN in rows whose answer is not finite.
    depth: how many roundings any key's terms have met in sums, products with values and rescalings, the moments' as
    well. counted: roundings in the sense of Theorem 6. The smaller one of the bound from these numbers (Theorem 7, a)
    and that of the domain where it applies (b); inf where nothing is proved.
    """
    verdict = check_domain(domain, coefficients)  # reads the coefficients and refuses unsafe arithmetic
    a = exact_float64("coefficients", coefficients, 1)
    degree, rho = a.size - 1, verdict.breakdown["polynomial"]
    relative = UP * (rho + KEY_WEIGHTS + rho * KEY_WEIGHTS)
    usable = (
        relative < 1.0
        and max(verdict.rank, depth) <= SIZE_LIMIT
        and features_in_range(domain, degree)
        and domain.normaliser == "own"
    )
    if not usable:  # also for NaN
        return np.full(normalisers.shape, math.inf)
    roundings = 10.0 * np.arange(degree + 1) + (2 + depth + verdict.rank)
    reach = query_norms * (abs(domain.scale) / domain.balance * (1 + 4 * EPS_M))
    error = np.zeros(normalisers.shape)
    for term in (roundings * np.abs(a) * moments)[::-1].tolist():
        error = error * reach + term
    error = EPS_M * error * (1 + (depth + 4 * degree + 16) * EPS_M) + UNDERFLOW
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        upper = np.nextafter(UP * (_own_upper(relative) + UP * 2 * error / normalisers + 2 * EPS_M), math.inf)
    upper = np.where((normalisers > 0.0) & (upper < math.inf), upper, math.inf)  # NaN: inf
    if verdict.bound < math.inf and counted <= domain.max_keys:
        sums = verdict.breakdown["normaliser sums"]
        prior = math.nextafter(UP * (verdict.bound + UP * sums / (1 - sums) + EPS_M), math.inf)
        upper = np.where(np.isnan(normalisers), upper, np.minimum(upper, prior))
    return upper


@lru_cache(maxsize=64)
def _polynomial_error(coefficients: bytes, width: float) -> float:
    """rho of Theorem 5; a stream asks for it again and again."""
    a = np.frombuffer(coefficients)
    return relative_error_upper(a, width) if np.isfinite(a).all() else math.inf


def _own_upper(relative: float) -> float:
    """At least the row error of weights within this relative distance, divided by their own sum (Theorem 6)."""
    return UP * 2 * relative / (1 + math.sqrt(max(0.0, 1 - UP * relative * relative)))


def _absolute_sum_upper(coefficients: np.ndarray, width: float) -> float:
    """At least sum_t |a_t| W^t."""
    total = 0.0
    for c in np.abs(coefficients[::-1]).tolist():
        total = total * width + c
    return total * (1 + 4 * coefficients.size * EPS_M)


def _exp_upper(x: float) -> float:
    """At least e^x (inf above 700); Theorem 1."""
    return float(exponentials(np.array([x]))[0]) * (1 + 2 * EPS_M)


FIELDS = {
    "dim": COUNT,
    "query_radius": POSITIVE,
    "key_radius": POSITIVE,
    "scale": NUMBER,
    "max_keys": COUNT,
    "normaliser": (lambda x: x in NORMALISERS, '"own" or "exact"'),
    "degree": (lambda x: type(x) is int and 0 <= x <= MAX_DEGREE, "an integer from 0 to 2**12"),
    "eps": POSITIVE,
    "writer": TEXT,
}


def read_domain_fields(text: str) -> dict:
    """The fields of the metadata string, each as FORMAT.md wants it, or MalformedCertificate."""
    return take_fields(text, DOMAIN_FORMAT, DOMAIN_VERSION, FIELDS)


def read_domain_claim(source: str | os.PathLike | bytes) -> DomainClaim:
    """Read a domain certificate from a path or its bytes. MalformedCertificate names the broken rule of FORMAT.md."""
    most = 8 + MAX_HEADER + 8 * (MAX_DEGREE + 1)
    said, arrays = read_file(
        source, read_domain_fields, lambda f: {"coefficients": Tensor((f["degree"] + 1,))}, most
    )
    domain = Domain(**{field.name: said[field.name] for field in fields(Domain)})
    return DomainClaim(domain, said["eps"], arrays["coefficients"])


def verify_domain(
    certificate: DomainClaim | str | os.PathLike | bytes,
    *,
    dim: int,
    query_radius: float,
    key_radius: float,
    eps: float,
    scale: float | None = None,
    max_keys: int = MAX_KEYS,
    normaliser: str = "own",
) -> DomainVerdict:
    """Prove a domain certificate again, for the domain and tolerance given here.

    A certificate made for another domain or eps is not checked: UNDECIDED, its reason begins "other domain". scale
    None means 1/sqrt(dim). Raises MalformedCertificate, InvalidInput. Source: PROOFS.md, Theorem 6.
    """
    eps = read_eps(eps)
    domain = read_domain(dim, query_radius, key_radius, scale, max_keys, normaliser)
    claim = certificate if isinstance(certificate, DomainClaim) else read_domain_claim(certificate)
    ours = {field.name: getattr(domain, field.name) for field in fields(Domain)} | {"eps": eps}
    theirs = {field.name: getattr(claim.domain, field.name) for field in fields(Domain)} | {"eps": claim.eps}
    for name, value in ours.items():
        if theirs[name] != value:
            reason = f"other domain: {name}: the certificate says {theirs[name]!r}, the caller {value!r}"
            rank = math.comb(domain.dim + claim.coefficients.size - 1, domain.dim)
            return DomainVerdict("UNDECIDED", eps, math.inf, reason, {}, rank, domain)
    return check_domain(domain, claim.coefficients, eps)
