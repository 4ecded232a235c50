"""Certificates for every head at once: queries and keys anywhere in two balls (checker/PROOFS.md, Theorem 6)."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from rankcert.approximants import minimax
from rankcert.certificates import file_pieces, write_pieces
from rankcert.checker import read_eps
from rankcert.checker.domain import (
    DOMAIN_FORMAT,
    DOMAIN_VERSION,
    MAX_KEYS,
    Domain,
    DomainClaim,
    DomainVerdict,
    check_domain,
    read_domain,
    read_domain_claim,
    read_domain_fields,
)
from rankcert.checker.inputs import exact_float64
from rankcert.constructions.polynomial import monomials
from rankcert.errors import CannotCertify, InvalidInput
from rankcert.kernels.table import count_monomials, monomial_table

__all__ = ["DomainCertificate", "DomainStream", "certify_domain", "load_domain"]

MOST_FEATURES = 2**24
TILE_NUMBERS = 2**18  # feature entries held at any one time: 2 MiB


@dataclass(frozen=True, eq=False)
class DomainCertificate(DomainClaim):
    """Feature maps phi, psi whose products are within `bound` of softmax attention on a whole domain.

    For queries with |q| <= query_radius and at most max_keys keys with |k - centre| <= key_radius (centre: any vector,
    the caller's), whatever the key biases, the matrix with entries phi(q_i) . psi(k_j) e^b_j over its row sum (or over
    the exact normaliser, see `domain.normaliser`) has max_i sum_j |P_ij - entry| <= bound, computed features and key
    sums included. rank is the number of features. Tokens outside the balls are refused, never extrapolated.
    """

    verdict: DomainVerdict | None = None

    @property
    def degree(self) -> int:
        """Degree of the polynomial."""
        return self.coefficients.size - 1

    @property
    def rank(self) -> int:
        """Number of features, hence the rank of every matrix they make."""
        return count_monomials(self.domain.dim, self.degree)

    @property
    def bound(self) -> float | None:
        """The bound proved over the whole domain; None on a loaded certificate before `verify_domain`."""
        return None if self.verdict is None else self.verdict.bound

    def query_features(self, q) -> np.ndarray:
        """phi of each query: (n, rank) from q (n, dim). Refuses queries beyond query_radius."""
        q = self._tokens("q", q, None, self.domain.query_radius)
        out = monomials(self.domain.scale * q, self.degree)
        out *= self.coefficients[monomial_table(self.domain.dim, self.degree).degree]
        return out

    def key_features(self, k, *, centre=None) -> np.ndarray:
        """psi of each key: (m, rank) from k (m, dim). Refuses keys farther than key_radius from the centre."""
        return monomials(self._tokens("k", k, centre, self.domain.key_radius), self.degree)

    def factors(self, q, k, *, key_bias=None, centre=None) -> tuple[np.ndarray, np.ndarray]:
        """left (n, rank), right (m, rank) with left right^T within `bound` of P, divided by their own row sums.

        For heads small enough to hold them; `apply` and `stream` never do. normaliser "own" only.
        """
        self._require_own()
        weights = _weights(key_bias, len(k))
        right = self.key_features(k, centre=centre) * weights[:, None]
        left = self.query_features(q)
        left /= (left @ right.sum(axis=0))[:, None]
        return left, right

    def apply(self, q, k, values, *, key_bias=None, centre=None) -> np.ndarray:
        """Approximate attention output (n, d_v) from values (m, d_v), in O((n + m) rank d_v) time, tile by tile."""
        stream = self.stream(centre=centre)
        stream.add(k, values, key_bias=key_bias)
        return stream.query(q)

    def stream(self, *, centre=None) -> "DomainStream":
        """An empty running sum over keys; see `DomainStream`."""
        self._require_own()
        return DomainStream(self, centre)

    def to_bytes(self) -> bytes:
        """The certificate file's bytes (checker/FORMAT.md)."""
        return b"".join(bytes(piece) for piece in self._pieces())

    def save(self, path: str | os.PathLike) -> None:
        """Write the certificate file; an existing file is replaced only once the new one is complete."""
        write_pieces(path, self._pieces())

    def _pieces(self) -> list[bytes | np.ndarray]:
        from rankcert import __version__

        said = {field.name: getattr(self.domain, field.name) for field in fields(Domain)} | {
            "format": DOMAIN_FORMAT,
            "format_version": DOMAIN_VERSION,
            "degree": self.degree,
            "eps": self.eps,
            "writer": f"rankcert {__version__}",
        }
        text = json.dumps(said, sort_keys=True, allow_nan=False)
        read_domain_fields(text)  # what the reader would refuse is not written
        return file_pieces(text, {"coefficients": self.coefficients})

    def _require_own(self) -> None:
        if self.domain.normaliser != "own":
            raise InvalidInput(
                "this certificate divides by the exact normaliser, which features alone do not give; "
                'certify_domain(..., normaliser="own") does'
            )

    def _tokens(self, name: str, tokens, centre, radius: float) -> np.ndarray:
        x = exact_float64(name, tokens, 2)
        if x.shape[1] != self.domain.dim:
            raise InvalidInput(f"{name} must have {self.domain.dim} columns, got shape {x.shape}")
        if centre is not None:
            centre = exact_float64("centre", centre, 1)
            if centre.shape != (self.domain.dim,):
                raise InvalidInput(f"centre must have shape ({self.domain.dim},), got {centre.shape}")
            x = x - centre
        norms = np.sqrt((x * x).sum(axis=1))
        # A token on the sphere must pass whatever its computed norm; the bound covers this much beyond (Theorem 6).
        outside = ~(norms <= radius * (1.0 + (self.domain.dim + 8) * 2.0**-52))
        if outside.any():
            i = int(np.argmax(outside))
            raise InvalidInput(
                f"{name}[{i}] has norm {norms[i]:.17g}, outside the certified radius {radius:.17g}"
            )
        return x


def load_domain(path: str | os.PathLike) -> DomainCertificate:
    """Read a domain certificate. Its `bound` is None until `rankcert.verify_domain` proves one.

    Raises MalformedCertificate naming the broken rule of the format, OSError if the path cannot be read.
    """
    return DomainCertificate(**vars(read_domain_claim(path)))


class DomainStream:
    """Running sums over keys: each token costs O(rank), each query O(rank), whatever came before.

    `add(k, values)` takes new keys with their values, `query(q)` answers from all keys so far. Sums are kept relative
    to the largest bias seen. More than domain.max_keys keys are refused, because the bound counts their rounding.
    """

    def __init__(self, certificate: DomainCertificate, centre=None):
        self.certificate, self.centre = certificate, centre
        self.keys = 0
        self._roundings = 0
        self._top = -math.inf
        self._sums: np.ndarray | None = None  # (rank, d_v + 1): sums of weight * psi * [values, 1]

    def add(self, k, values, *, key_bias=None) -> None:
        """k (c, dim), values (c, d_v), key_bias (c,) or None: c more keys."""
        values = exact_float64("values", values, 2)
        k = exact_float64("k", k, 2)
        if values.shape[0] != k.shape[0]:
            raise InvalidInput(f"k has {k.shape[0]} keys and values {values.shape[0]} rows")
        if self._sums is not None and values.shape[1] != self._sums.shape[1] - 1:
            raise InvalidInput(
                f"values must have {self._sums.shape[1] - 1} columns as before, got {values.shape[1]}"
            )
        bias = _bias(key_bias, k.shape[0])
        top = max(self._top, float(bias.max(initial=-math.inf)))
        rescaled = top > self._top > -math.inf
        limit = self.certificate.domain.max_keys
        # Theorem 6 allows a sum max_keys roundings: one a key, and four whenever a larger bias rescales the sums.
        roundings = self._roundings + k.shape[0] + 4 * rescaled
        if roundings > limit:
            raise InvalidInput(
                f"{self.keys + k.shape[0]} keys exceed max_keys = {limit} of this certificate "
                f"(larger and larger biases count four each)"
            )
        self.certificate._tokens(
            "k", k, self.centre, self.certificate.domain.key_radius
        )  # all, before any work
        if self._sums is None:
            self._sums = np.zeros((self.certificate.rank, values.shape[1] + 1))
        if rescaled:
            self._sums *= math.exp(self._top - top)
        self._top, self._roundings, self.keys = top, roundings, self.keys + k.shape[0]
        if top == -math.inf:  # masked keys only
            return
        for rows in _tiles(k.shape[0], self.certificate.rank):
            psi = self.certificate.key_features(k[rows], centre=self.centre)
            psi *= np.exp(bias[rows] - top)[:, None]
            self._sums[:, :-1] += psi.T @ values[rows]
            self._sums[:, -1] += psi.sum(axis=0)

    def query(self, q) -> np.ndarray:
        """The approximate attention output (n, d_v) of queries q (n, dim) over all keys added so far."""
        if self._sums is None or self._top == -math.inf:
            raise InvalidInput("no key has been added yet; a softmax needs at least one")
        q = exact_float64("q", q, 2)
        self.certificate._tokens("q", q, None, self.certificate.domain.query_radius)
        out = np.empty((q.shape[0], self._sums.shape[1] - 1))
        for rows in _tiles(q.shape[0], self.certificate.rank):
            sums = self.certificate.query_features(q[rows]) @ self._sums
            out[rows] = sums[:, :-1] / sums[:, -1:]
        return out


def certify_domain(
    dim: int,
    query_radius: float,
    key_radius: float,
    *,
    eps: float,
    scale: float | None = None,
    max_keys: int = MAX_KEYS,
    normaliser: str = "own",
) -> DomainCertificate:
    """Polynomial feature maps proved within `eps` for every head whose tokens lie in two balls.

    Covers all queries with |q| <= query_radius, all keys with |k - centre| <= key_radius (any centre), any key biases,
    up to max_keys keys, logits scale <q, k> (None: 1/sqrt(dim)). The degree is the smallest whose bound the checker
    proves: relative minimax polynomial, feature rounding and normaliser sums included. normaliser: "own" (no pass over
    pairs is ever needed) or "exact".

    Raises InvalidInput for numbers without meaning, CannotCertify naming the limit when W = |scale| query_radius
    key_radius is too large for eps or the features would be too many.

    >>> import numpy as np, rankcert
    >>> certificate = rankcert.certify_domain(2, 1.0, 1.0, eps=0.1, scale=1.0)
    >>> certificate.rank, certificate.bound <= 0.1
    (6, True)

    Source: docs/THEORY.md, Lemmas 5 to 8; rankcert/checker/PROOFS.md, Theorem 6.
    """
    eps = read_eps(eps)
    domain = read_domain(dim, query_radius, key_radius, scale, max_keys, normaliser)
    # own(rho) = 2 rho / (1 + sqrt(1 - rho^2)) <= eps iff rho <= 4 eps / (4 + eps^2)
    target = min(eps, 0.999) if normaliser == "exact" else min(4 * eps / (4 + eps * eps), 0.999)
    smallest = minimax.find_degree(domain.half_width, target)
    best = None
    for degree in range(smallest, smallest + 3):  # the proof may need one more than the estimate
        rank = count_monomials(domain.dim, degree)
        if rank > MOST_FEATURES:
            raise CannotCertify(
                f"degree {degree} in {domain.dim} dimensions has {rank} features, more than the "
                f"{MOST_FEATURES} allowed",
                rank=rank,
            )
        coefficients = minimax.fit(domain.half_width, degree).coefficients
        verdict = check_domain(domain, coefficients, eps)
        if verdict:
            return DomainCertificate(domain, eps, coefficients, verdict)
        best = verdict if best is None or verdict.bound < best.bound else best
    terms = ", ".join(f"{name} {value:.2e}" for name, value in best.breakdown.items())
    raise CannotCertify(
        f"W = |scale| query_radius key_radius = {domain.half_width:.6g} is too large for eps = {eps!r} in "
        f"float64: the best bound proved is {best.bound:.3g} ({terms}; a smaller max_keys lowers the last)",
        bound=best.bound,
        rank=best.rank,
    )


def _tiles(count: int, rank: int) -> Iterator[slice]:
    height = max(1, TILE_NUMBERS // rank)
    return (slice(start, min(start + height, count)) for start in range(0, count, height))


def _bias(key_bias, count: int) -> np.ndarray:
    bias = np.zeros(count) if key_bias is None else exact_float64("key_bias", key_bias, 1)
    if bias.shape != (count,) or not (bias < math.inf).all():
        raise InvalidInput(f"key_bias must be {count} numbers below +inf, one a key, got shape {bias.shape}")
    return bias


def _weights(key_bias, count: int) -> np.ndarray:
    bias = _bias(key_bias, count)
    return np.exp(bias - bias.max(initial=-math.inf))
