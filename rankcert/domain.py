"""Certificates for every head at once: queries and keys anywhere in two balls (checker/PROOFS.md, Theorems 6, 7)."""

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
    features_in_range,
    norms_upper,
    read_domain,
    read_domain_claim,
    read_domain_fields,
    stream_row_bounds,
)
from rankcert.checker.inputs import exact_float64
from rankcert.checker.kernel import exponentials
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
        """The bound proved over the whole domain; None on a loaded certificate before `verify_domain`.

        inf, or above eps, if `certify_domain(..., a_posteriori=True)` leaves the proof to each answer's row bounds.
        """
        return None if self.verdict is None else self.verdict.bound

    def query_features(self, q) -> np.ndarray:
        """phi of each query: (n, rank) from q (n, dim). Refuses queries beyond query_radius."""
        return self._query_features(self._queries(q)[0])

    def key_features(self, k, *, centre=None) -> np.ndarray:
        """psi of each key: (m, rank) from k (m, dim). Refuses keys farther than key_radius from the centre."""
        return self._key_features(self._keys(k, centre)[0])

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

    def apply(self, q, k, values, *, key_bias=None, centre=None, return_bound=False):
        """Approximate attention output (n, d_v) from values (m, d_v), in O((n + m) rank d_v) time, tile by tile.

        With return_bound also what is proved of each row, see `DomainStream.query`; then any number of keys will do.
        """
        stream = self.stream(centre=centre, a_posteriori=return_bound)
        stream.add(k, values, key_bias=key_bias)
        return stream.query(q, return_bound=return_bound)

    def stream(self, *, centre=None, a_posteriori=False) -> "DomainStream":
        """An empty running sum over keys; see `DomainStream`."""
        self._require_own()
        return DomainStream(self, centre, a_posteriori)

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

    def _query_features(self, q: np.ndarray) -> np.ndarray:
        out = monomials(self.domain.scale / self.domain.balance * q, self.degree)
        out *= self.coefficients[monomial_table(self.domain.dim, self.degree).degree]
        return out

    def _key_features(self, y: np.ndarray) -> np.ndarray:
        return monomials(self.domain.balance * y, self.degree)

    def _queries(self, q) -> tuple[np.ndarray, np.ndarray]:
        return self._tokens("q", q, None, self.domain.query_radius)

    def _keys(self, k, centre) -> tuple[np.ndarray, np.ndarray]:
        return self._tokens("k", k, centre, self.domain.key_radius)

    def _tokens(self, name: str, tokens, centre, radius: float) -> tuple[np.ndarray, np.ndarray]:
        """The tokens less the centre, and their computed norms; refused if one lies outside the ball."""
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
        return x, norms


def load_domain(path: str | os.PathLike) -> DomainCertificate:
    """Read a domain certificate. Its `bound` is None until `rankcert.verify_domain` proves one.

    Raises MalformedCertificate naming the broken rule of the format, OSError if the path cannot be read.
    """
    return DomainCertificate(**vars(read_domain_claim(path)))


class DomainStream:
    """Running sums over keys: each token costs O(rank), each query O(rank), whatever came before.

    `add(k, values)` takes new keys with their values, `query(q)` answers from all keys so far and, if asked with
    return_bound, proves row by row how far off that may be. Sums are kept relative to the largest bias seen. More than
    domain.max_keys keys are refused, because the bound of the certificate counts their rounding; with a_posteriori the
    stream takes 2**30, and beyond max_keys every query must ask for its bounds.

    >>> import numpy as np, rankcert
    >>> certificate = rankcert.certify_domain(2, 1.0, 9.0, eps=0.1, scale=1.0, max_keys=100)
    >>> stream = certificate.stream(a_posteriori=True)
    >>> keys = np.random.default_rng(0).normal(size=(100_000, 2))
    >>> stream.add(keys, values=keys)
    >>> output, row_bounds = stream.query(np.eye(2), return_bound=True)
    >>> output.shape, bool(row_bounds.max() <= 0.1)
    ((2, 2), True)

    Source: rankcert/checker/PROOFS.md, Theorem 7.
    """

    def __init__(self, certificate: DomainCertificate, centre=None, a_posteriori: bool = False):
        self.certificate, self.centre, self.a_posteriori = certificate, centre, a_posteriori
        self.keys = 0
        self._roundings = 0  # in the sense of Theorem 6: one a key, four a rescaling
        self._depth = 0  # in the sense of Theorem 7: what the terms of any one key have really met
        self._top = -math.inf
        self._sums: np.ndarray | None = None  # (rank, d_v + 1): sums of weight * psi * [values, 1]
        self._moments = np.zeros(certificate.degree + 1)  # sums of weight * (balance * norm)^t

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
        limit = MAX_KEYS if self.a_posteriori else self.certificate.domain.max_keys
        # Theorem 6 allows a sum max_keys roundings: one a key, and four whenever a larger bias rescales the sums.
        roundings = self._roundings + k.shape[0] + 4 * rescaled
        if roundings > limit:
            raise InvalidInput(
                f"{self.keys + k.shape[0]} keys exceed max_keys = {limit} of this certificate "
                f"(larger and larger biases count four each)"
            )
        y, norms = self.certificate._keys(k, self.centre)  # all are looked at before any work
        if self._sums is None:
            self._sums = np.zeros((self.certificate.rank, values.shape[1] + 1))
        if rescaled:
            factor = exponentials(np.array([self._top - top]))
            self._sums *= factor
            self._moments *= factor
            self._depth += 4
        self._top, self._roundings, self.keys = top, roundings, self.keys + k.shape[0]
        if top == -math.inf:  # masked keys only
            return
        reach = norms_upper(norms, y.shape[1]) * self.certificate.domain.balance
        for rows in _tiles(k.shape[0], self.certificate.rank):
            weights = exponentials(bias[rows] - top)
            psi = self.certificate._key_features(y[rows])
            psi *= weights[:, None]
            self._sums[:, :-1] += psi.T @ values[rows]
            self._sums[:, -1] += psi.sum(axis=0)
            self._moments += weights @ np.vander(reach[rows], self._moments.size, increasing=True)
            # a product and the additions of a tile, then one addition for each tile that follows
            self._depth = max(self._depth, weights.size) + 1

    def query(self, q, *, return_bound=False):
        """The approximate attention output (n, d_v) of queries q (n, dim) over all keys added so far.

        With return_bound the pair (output, row_bounds): row i is within row_bounds[i] * max_j ||value_j|| of exact
        softmax attention in every p-norm (values all zero, or of norm 2^-200 and more), whatever has been rounded on
        the way. inf where nothing is proved. Raises InvalidInput for queries outside the domain, before the first key,
        and without return_bound once there are more than max_keys keys.
        """
        if self._sums is None or self._top == -math.inf:
            raise InvalidInput("no key has been added yet; a softmax needs at least one")
        domain = self.certificate.domain
        if self._roundings > domain.max_keys and not return_bound:
            raise InvalidInput(
                f"{self.keys} keys exceed max_keys = {domain.max_keys} of this certificate: only "
                "query(..., return_bound=True) proves anything about them"
            )
        q, norms = self.certificate._queries(q)
        out, normalisers = np.empty((q.shape[0], self._sums.shape[1] - 1)), np.empty(q.shape[0])
        for rows in _tiles(q.shape[0], self.certificate.rank):
            sums = self.certificate._query_features(q[rows]) @ self._sums
            out[rows] = sums[:, :-1] / sums[:, -1:]
            normalisers[rows] = sums[:, -1]
        if not return_bound:
            return out
        normalisers[~np.isfinite(out).all(axis=1)] = math.nan  # something has overflowed
        row_bounds = stream_row_bounds(
            domain,
            self.certificate.coefficients,
            norms_upper(norms, q.shape[1]),
            self._moments,
            normalisers,
            depth=self._depth,
            counted=self._roundings,
        )
        return out, row_bounds


def certify_domain(
    dim: int,
    query_radius: float,
    key_radius: float,
    *,
    eps: float,
    scale: float | None = None,
    max_keys: int = MAX_KEYS,
    normaliser: str = "own",
    a_posteriori: bool = False,
) -> DomainCertificate:
    """Polynomial feature maps proved within `eps` for every head whose tokens lie in two balls.

    Covers all queries with |q| <= query_radius, all keys with |k - centre| <= key_radius (any centre), any key biases,
    up to max_keys keys, logits scale <q, k> (None: 1/sqrt(dim)). The degree is the smallest whose bound the checker
    proves: relative minimax polynomial, feature rounding and normaliser sums included. normaliser: "own" (no pass over
    pairs is ever needed) or "exact".

    a_posteriori=True asks less: that the polynomial leaves rounding a twentieth of eps. What rounding costs is proved
    with each answer (`apply` and `stream(a_posteriori=True)` with return_bound), for the keys that are there. It
    reaches W = 30 and more; `bound` may then be above eps, or inf.

    Raises InvalidInput for numbers without meaning, CannotCertify naming the limit when W = |scale| query_radius
    key_radius is too large for eps or the features would be too many.

    >>> import numpy as np, rankcert
    >>> certificate = rankcert.certify_domain(2, 1.0, 1.0, eps=0.1, scale=1.0)
    >>> certificate.rank, certificate.bound <= 0.1
    (6, True)

    Source: docs/THEORY.md, Lemmas 5 to 8; rankcert/checker/PROOFS.md, Theorems 6 and 7.
    """
    eps = read_eps(eps)
    domain = read_domain(dim, query_radius, key_radius, scale, max_keys, normaliser)
    if a_posteriori and normaliser != "own":
        raise InvalidInput('a_posteriori=True is about rows divided by their own sums, normaliser="own"')
    # own(rho) = 2 rho / (1 + sqrt(1 - rho^2)) <= eps iff rho <= 4 eps / (4 + eps^2)
    own = 0.95 * eps if a_posteriori else eps
    target = min(eps, 0.999) if normaliser == "exact" else min(4 * own / (4 + own * own), 0.999)
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
        if not features_in_range(domain, degree):
            raise CannotCertify(
                f"features of degree {degree} leave the range of float64 for query_radius = "
                f"{domain.query_radius:.3g}, key_radius = {domain.key_radius:.3g}, scale = {domain.scale:.3g}",
                rank=rank,
            )
        coefficients = minimax.fit(domain.half_width, degree).coefficients
        verdict = check_domain(domain, coefficients, eps)
        if verdict or (a_posteriori and verdict.breakdown["polynomial"] <= target):
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
    top = float(bias.max(initial=-math.inf))
    return exponentials(bias - top) if top > -math.inf else np.zeros(count)
