"""Attention as spherical harmonics of the keys: keys on a sphere, or in a ball lifted to one (LAWS.md, H1 to H6).

In the gauge of `_place` the centred logits are z_i t_ij + shift_i with unit vectors a_i, c_j of R^s, t_ij = <a_i, c_j>
and z_i >= 0. A polynomial of degree L in the key has as many columns as there are harmonics of degree <= L on
S^(s-1), and when the sphere is a lifted ball, only those that are even in the height. Three ways to fill the rows:

    interpolated    B_ij = omega_j p_i(t_ij) e^(shift_i + z_i) / Z_i, p_i interpolating e^(z_i (t - 1)) at the
                    canonical points: the best l1 approximation in the sphere's own measure, for every z at once
    series          the same with the truncated Gegenbauer series, whose tail bounds the error of any keys
    projected       the row's own P_i projected onto the space, one multiplier a degree taking l2 towards l1
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.special import betainc, betaln, gammaln, ive, roots_chebyt, roots_gegenbauer

from rankcert.checker.engine import blas_threads
from rankcert.constructions.base import Construction, Factorization, Plan, refuse_memory, refuse_rounding
from rankcert.geometry import once_per_problem, visible
from rankcert.problem import AttentionProblem

__all__ = [
    "Harmonic",
    "canonical_points",
    "count_harmonics",
    "evaluate_zonal",
    "harmonics",
    "orthonormal_gegenbauer",
    "series_terms",
    "tail_upper",
]

ON_SPHERE = 1e-9  # relative deviation of the keys from a sphere that counts as rounding
ELLIPSOID_LIMIT = 16  # dimensions up to which an ellipsoid is sought, beyond that a sphere
LARGEST_DEGREE = 512
PROBES = 32  # rows that refuse a degree before all rows are looked at
SAMPLE = 32  # rows the multipliers are fitted to
SAMPLE_ENTRIES = 2**24  # of their components held at once
TILE_ENTRIES = 2**16  # of a tile of t_ij: three of them fit into a cache
BLOCK_ENTRIES = 2**21
MEASURED_ENTRIES = (
    2**25
)  # of P up to which a plan looks at all rows; beyond it, at that many of evenly spaced rows
SPARED = 0.002  # of eps, for the rows that were not looked at
SPHERE_WORK = 2**31  # m r^2 up to which a projection is tried where zonal rows do with a little more
BALL_WORK = 2**37  # m r^2 of any projection
NEARLY = 1.1  # times the target: zonal rows that miss it by less make a projection worth its price
SWEEPS = 6
WORTH_FITTING = 1.5  # times the target: larger sample errors of plain projections are not worth multipliers
NEGLIGIBLE = 700.0  # biases that far below the largest weigh nothing in float64


class _Place(NamedTuple):
    """Unit vectors: key (m, s), query (n, s); log(P_ij / omega_j) = z_i t_ij + shift_i; `lifted` from a ball."""

    key: np.ndarray
    query: np.ndarray
    z: np.ndarray
    shift: np.ndarray
    lifted: bool

    @property
    def sides(self) -> int:
        return self.key.shape[1]

    def count(self, degree: int) -> int:
        """Columns of degree at most `degree`."""
        return comb(self.sides - 1 + degree, degree) if self.lifted else count_harmonics(self.sides, degree)


class _Zonal(NamedTuple):
    """Zonal rows of one degree, but for `exact` rows, which cost one column each."""

    kind: str
    degree: int
    error: float
    exact: np.ndarray
    rank: int


class _Projection(NamedTuple):
    """left = P onto, right = `right`; both (m, rank), the multipliers are in `onto`."""

    degree: int
    error: float
    onto: np.ndarray
    right: np.ndarray


class Harmonic(Construction):
    """Rank of all harmonics of degree <= L: for keys on a sphere of R^r, in some gauge, C(L+r-1, r-1) + C(L+r-2, r-1),
    for keys in a ball C(L+r, r).

    L is the first degree whose largest row error, measured in float64, is within eps less rounding: on all rows up to
    n m = 2^25, beyond that on an even choice of them, and then the check may find a worse one. Where a degree less
    fails in a few rows only, these are added as they are. The plan of projected
    rows holds an orthonormal basis over the keys, which it had to make anyway.
    """

    name = "harmonic"
    lemma = "LAWS.md, H1 to H6"

    def __init__(self, most: int | None = None):
        """`most`: give up beyond this rank; None means min(n, m)."""
        self.most = most

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        refusal = refuse_rounding(problem, eps)
        if refusal:
            return Plan(None, refusal)
        if not problem.n:
            return Plan(0, None, {"degree": 0}, _Zonal("series", 0, 0.0, np.empty(0, dtype=np.int64), 0))
        place = _place(problem)
        spared = 1e-9 if _measured_rows(problem).size == problem.n else SPARED
        target = eps * (1 - spared) - problem.rounding_est
        trivial = min(problem.n, problem.m)
        if self.most is not None:
            trivial = min(trivial, self.most)
        zonal = projection = reason = None
        if not place.lifted:
            zonal = _find_zonal(problem, place, target, trivial)
        if not problem.inputs.causal:
            limit = trivial if zonal is None else zonal.rank - 1
            near = 0 if zonal is None else _near_degree(problem, place, zonal.degree, target)
            projection, reason = _find_projection(problem, place, target, limit, near, memory)
        if place.lifted:
            limit = trivial if projection is None else projection.right.shape[1] - 1
            zonal = _find_zonal(problem, place, target, limit)
            if zonal is not None:
                projection = None  # zonal rows were sought below its rank
        best = projection or zonal
        details: dict[str, int | float | str] = {
            "dimension": place.sides - place.lifted,
            "support": "ball" if place.lifted else "sphere",
            "z": float(place.z.max(initial=0.0)),
        }
        if best is None and reason:
            return Plan(None, reason, details)
        if best is None:
            degree = next(
                L for L in range(LARGEST_DEGREE + 1) if place.count(L) > trivial or L == LARGEST_DEGREE
            )
            return Plan(place.count(degree), f"no degree below {degree} is within eps", details)
        rank = projection.right.shape[1] if projection else zonal.rank
        details |= {"rows": "projected" if projection else zonal.kind, "degree": best.degree}
        if not projection and zonal.exact.size:
            details["exact_rows"] = zonal.exact.size
        return Plan(rank, refuse_memory((problem.n + problem.m) * rank, memory), details, best)

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        made = plan.state
        if isinstance(made, _Projection):
            left = np.empty((problem.n, made.right.shape[1]))
            for rows in _blocks(problem.n, problem.m):
                left[rows] = problem.attention_rows(rows) @ made.onto
            return Factorization(left, made.right, self.name, plan.details, made.error)
        if not problem.n:
            return Factorization(np.zeros((0, 0)), np.zeros((problem.m, 0)), self.name, plan.details, 0.0)
        place = _place(problem)
        left = harmonics(place.query, made.degree, even=place.lifted)
        weights, top = _weights(problem)
        with np.errstate(over="ignore"):
            factor = np.exp(place.shift + place.z + top)
        coefficients = _coefficients(made.kind, place, made.degree, place.z)
        coefficients /= np.sqrt(_multiplicities(place.sides, made.degree))[:, None]
        for degree, columns in enumerate(_columns(place, made.degree)):
            left[:, columns] *= (coefficients[degree] * factor)[:, None]
        right = harmonics(place.key, made.degree, even=place.lifted)
        right *= weights[:, None]
        if made.exact.size:
            one = np.zeros((problem.n, made.exact.size))
            one[made.exact, np.arange(made.exact.size)] = 1.0
            left[made.exact] = 0.0
            left = np.hstack([left, one])
            right = np.hstack([right, problem.attention_rows(made.exact).T])
        return Factorization(left, right, self.name, plan.details, made.error)


# ---- harmonics ------------------------------------------------------------------------------------------------------


def count_harmonics(sides: int, degree: int) -> int:
    """Linearly independent harmonics of degree at most `degree` on the sphere of R^sides, sides >= 2 (H1)."""
    return comb(degree + sides - 1, sides - 1) + (comb(degree + sides - 2, sides - 1) if degree else 0)


def harmonics(points: np.ndarray, degree: int, *, even: bool = False) -> np.ndarray:
    """Orthonormal harmonics of degree 0, 1, .., `degree` at unit vectors (n, s), s >= 2, as columns in this order.

    Orthonormal in the uniform probability measure. `even`: only those even in the last coordinate, which are the
    polynomials of degree at most `degree` in the others. Recursion over coordinates, no divisions (H2).
    """
    n, sides = points.shape
    total = comb(sides - 1 + degree, degree) if even else count_harmonics(sides, degree)
    out = np.empty((n, total))
    height = max(1, TILE_ENTRIES // 16)
    for start in range(0, n, height):
        part = points[start : start + height].T
        stop = 0
        for block in _by_degree(part, degree, even):
            begin, stop = stop, stop + block.shape[0]
            out[start : start + height, begin:stop] = block.T
    return out


def _by_degree(x: np.ndarray, degree: int, even: bool) -> list[np.ndarray]:
    """Solid harmonics of x (s, n): one array (count, n) a degree."""
    blocks = [np.ones((1, x.shape[1]))]
    real, imaginary = np.ones(x.shape[1]), np.zeros(x.shape[1])
    for _ in range(degree):
        real, imaginary = x[0] * real - x[1] * imaginary, x[0] * imaginary + x[1] * real
        blocks.append(np.sqrt(2) * np.stack([real] if even and x.shape[0] == 2 else [real, imaginary]))
    squared = x[0] ** 2 + x[1] ** 2
    for axis in range(2, x.shape[0]):
        squared = squared + x[axis] ** 2
        nu = (axis - 1) / 2  # of the sphere of R^(axis + 1)
        above: list[list[np.ndarray]] = [[] for _ in blocks]
        for m, lower in enumerate(blocks):
            size = np.exp((betaln(nu + 0.5, 0.5) - betaln(m + nu + 0.5, 0.5)) / 2)
            b = _steps(degree - m, m + nu)
            last, value = np.zeros(x.shape[1]), np.full(x.shape[1], size)
            for k in range(degree - m + 1):
                if not (even and axis == x.shape[0] - 1 and k % 2):
                    above[m + k].append(value * lower)
                if k < degree - m:
                    last, value = value, (x[axis] * value - b[k] * squared * last) / b[k + 1]
        blocks = [np.concatenate(parts) for parts in above]
    return blocks


def _columns(place: _Place, degree: int) -> Iterator[slice]:
    """The columns of each degree."""
    stop = 0
    for L in range(degree + 1):
        start, stop = stop, place.count(L)
        yield slice(start, stop)


def _steps(degree: int, nu: float) -> np.ndarray:
    """b_0..b_degree of t pi_k = b_{k+1} pi_{k+1} + b_k pi_{k-1}, b_0 = 0 (H2)."""
    k = np.arange(1, degree + 1)
    if nu == 0.0:
        tail = np.where(k == 1, np.sqrt(0.5), 0.5)
    else:
        tail = np.sqrt(k * (k + 2 * nu - 1) / (4 * (k + nu) * (k + nu - 1)))
    return np.concatenate([[0.0], tail])


def orthonormal_gegenbauer(t: np.ndarray, degree: int, nu: float) -> np.ndarray:
    """pi_0..pi_degree at t, (degree + 1, ...): orthonormal in the probability measure ~ (1 - t^2)^(nu - 1/2) (H2)."""
    t = np.asarray(t, dtype=float)
    b = _steps(degree, nu)
    out = np.empty((degree + 1, *t.shape))
    out[0] = 1.0
    for k in range(degree):
        out[k + 1] = (t * out[k] - (b[k] * out[k - 1] if k else 0.0)) / b[k + 1]
    return out


def evaluate_zonal(t: np.ndarray, coefficients: np.ndarray, nu: float) -> np.ndarray:
    """sum_l coefficients[l, i] pi_l(t[i, j]) by Clenshaw's recurrence; t (rows, m), coefficients (L + 1, rows)."""
    degree = coefficients.shape[0] - 1
    b = _steps(degree + 2, nu)
    here, above, work = np.zeros_like(t), np.zeros_like(t), np.empty_like(t)
    for k in range(degree, -1, -1):
        np.multiply(t, here, out=work)
        work /= b[k + 1]
        above *= -b[k + 1] / b[k + 2]
        above += work
        above += coefficients[k][:, None]
        here, above = above, here
    return here


def _multiplicities(sides: int, degree: int) -> np.ndarray:
    """Independent harmonics of each degree 0..degree."""
    totals = [0, *(count_harmonics(sides, L) for L in range(degree + 1))]
    return np.diff(np.array(totals, dtype=float))


# ---- zonal rows -----------------------------------------------------------------------------------------------------


def series_terms(z: np.ndarray, degree: int, sides: int) -> np.ndarray:
    """(degree + 1, n): the largest value of the degree-l part of e^(z (t - 1)) on the sphere of R^sides (H3).

    N_l Gamma(nu + 1) (2/z)^nu I_(nu+l)(z) e^-z, nu = sides / 2 - 1, from scaled Bessel functions and logarithms.
    """
    z = np.maximum(np.asarray(z, dtype=float), 1e-300)
    nu = sides / 2 - 1
    order = (nu + np.arange(degree + 1))[:, None]
    scaled = ive(order, z)
    with np.errstate(divide="ignore"):
        logs = np.log(scaled)
    # where I e^-z underflows it is below 1e-290, and below its first term times e^(z^2 / (4 (order + 1)))
    first = order * np.log(z / 2) - gammaln(order + 1) + z**2 / (4 * (order + 1)) - z
    logs = np.where(scaled > 1e-290, logs, np.minimum(first, np.log(1e-290)))
    logs += np.log(_multiplicities(sides, degree))[:, None] + gammaln(nu + 1) + nu * np.log(2 / z)
    return np.exp(logs)


def tail_upper(z: np.ndarray, degree: int, sides: int) -> np.ndarray:
    """tau_L(z) e^-z: what the series beyond `degree` can add up to at most, anywhere on the sphere (H3)."""
    last = max(degree + 1, _last_term(float(np.max(z, initial=0.0))))
    return series_terms(z, last, sides)[degree + 1 :].sum(axis=0)


def _last_term(z: float) -> int:
    """A degree beyond which nothing of the series is left in float64."""
    return 20 + int(min(z + 10, 12 * np.sqrt(z + 10)))


@lru_cache(maxsize=64)
def canonical_points(degree: int, sides: int) -> np.ndarray:
    """The degree + 1 points whose alternating signs are orthogonal to all polynomials of that degree (H4).

    In the measure ~ (1 - t^2)^((sides - 3) / 2). Zeros of Chebyshev polynomials for sides = 2 (first kind) and 3
    (second kind); otherwise Newton's iteration from zeros of Gegenbauer polynomials.
    """
    nu, count = sides / 2 - 1, degree + 1
    if sides == 2:
        return np.sort(roots_chebyt(count)[0])
    x = np.sort(roots_gegenbauer(count, 2 * nu)[0])
    if sides == 3:
        return x
    signs = (-1.0) ** np.arange(count)
    k = np.arange(1, count)
    for _ in range(20):
        density = np.exp((nu - 0.5) * np.log1p(-(x**2)) - betaln(nu + 0.5, 0.5))
        integrals = np.empty((count, count))  # of pi_k from -1 to x
        integrals[0] = betainc(nu + 0.5, nu + 0.5, (1 + x) / 2)
        if degree:
            derivative = orthonormal_gegenbauer(x, degree - 1, nu + 1)
            size = np.sqrt(k * (k + 2 * nu) * (2 * nu + 1) / (2 * nu + 2))[:, None]
            integrals[1:] = -density * (1 - x**2) * derivative / size
        moments = 2 * integrals @ signs
        moments[0] -= signs[-1]
        step = np.linalg.solve(2 * orthonormal_gegenbauer(x, degree, nu) * density * signs, moments)
        moved = np.sort(np.clip(x - step, -1 + 1e-15, 1 - 1e-15))
        done = np.abs(moved - x).max() < 1e-13
        x = moved
        if done:
            break
    return x


def _coefficients(kind: str, place: _Place, degree: int, z: np.ndarray) -> np.ndarray:
    """(degree + 1, rows) coefficients in pi_l of an approximation of e^(z (t - 1))."""
    if kind == "series":
        terms = series_terms(z, degree, place.sides)
        return terms / np.sqrt(_multiplicities(place.sides, degree))[:, None]
    points = canonical_points(degree, place.sides)
    values = orthonormal_gegenbauer(points, degree, place.sides / 2 - 1)
    return np.linalg.solve(values.T, np.exp(np.multiply.outer(points - 1, z)))


def _find_zonal(problem: AttentionProblem, place: _Place, target: float, limit: int) -> _Zonal | None:
    """The smallest rank <= limit of interpolated or series rows within target, a few of them exact."""
    every = np.arange(problem.n)
    measured = _measured_rows(problem)
    probes = _probes(problem, place)
    promised = _promised_degree(problem, place, target, probes)
    best = None
    for degree in range(LARGEST_DEGREE + 1):
        count, more = place.count(degree), place.count(degree + 1)
        if count > limit:
            break
        for kind in ("interpolated", "series"):
            if kind == "series" and degree < promised:
                continue
            if np.median(_zonal_errors(problem, place, kind, degree, probes)) > target:
                continue
            errors = _zonal_errors(problem, place, kind, degree, measured)
            if errors.max() <= target:
                candidate = _Zonal(kind, degree, float(errors.max()), every[:0], count)
                return candidate if best is None or count <= best.rank else best
            # worth looking at all rows when the few that miss cost less than a degree more
            if (errors > target).mean() * problem.n >= more - count:
                continue
            if measured.size < problem.n:
                errors = _zonal_errors(problem, place, kind, degree, every)
            exact = np.flatnonzero(errors > target)
            rank = count + exact.size
            if rank <= limit and (best is None or rank < best.rank):
                best = _Zonal(
                    kind, degree, float(errors.max(where=errors <= target, initial=0.0)), exact, rank
                )
    return best


def _near_degree(problem: AttentionProblem, place: _Place, found: int, target: float) -> int | None:
    """The least degree of a run below `found` at which zonal rows miss the target by little: worth projecting."""
    rows = _probes(problem, place)
    near = None
    for degree in range(found - 1, -1, -1):
        if _zonal_errors(problem, place, "interpolated", degree, rows).max() > NEARLY * target:
            break
        near = degree
    return near


def _probes(problem: AttentionProblem, place: _Place) -> np.ndarray:
    """Rows with the largest factors, and rows evenly spaced."""
    worst = np.argsort(place.shift + place.z)[-PROBES // 4 :]
    spaced = np.linspace(0, problem.n - 1, min(problem.n, PROBES - worst.size)).astype(np.int64)
    return np.union1d(worst, spaced)


def _promised_degree(problem: AttentionProblem, place: _Place, target: float, rows: np.ndarray) -> int:
    """The first degree at which the tail bound puts the given rows within target, wherever the keys lie (H3)."""
    weights, top = _weights(problem)
    with np.errstate(over="ignore"):
        size = weights.sum() * np.exp(place.shift[rows] + place.z[rows] + top)
    z = place.z[rows]
    terms = series_terms(z, _last_term(float(z.max())), place.sides)
    tails = np.cumsum(terms[::-1], axis=0)[::-1]  # of degree >= l
    with np.errstate(invalid="ignore"):
        passing = (tails[1:] * size <= target).all(axis=1)
    return int(np.argmax(passing)) if passing.any() else LARGEST_DEGREE + 1


def _measured_rows(problem: AttentionProblem) -> np.ndarray:
    count = min(problem.n, max(1, MEASURED_ENTRIES // problem.m))
    return np.linspace(0, problem.n - 1, count).astype(np.int64)


def _zonal_errors(
    problem: AttentionProblem, place: _Place, kind: str, degree: int, rows: np.ndarray
) -> np.ndarray:
    """sum_j |P_ij - B_ij| of the given rows, infinite where float64 does not reach."""
    weights, top = _weights(problem)
    coefficients = _coefficients(kind, place, degree, place.z[rows])
    keys, reach = np.ascontiguousarray(place.key.T), problem.inputs.reach
    nu = place.sides / 2 - 1
    hidden = np.arange(problem.m) if problem.inputs.causal else None
    errors = np.empty(rows.size)

    def measure(start: int) -> None:
        part = slice(start, start + height)
        chosen = rows[part]
        t = place.query[chosen] @ keys
        wrong = evaluate_zonal(t, coefficients[:, part], nu)
        t -= 1.0
        t *= place.z[chosen, None]
        wrong -= np.exp(t, out=t)
        np.abs(wrong, out=wrong)
        if hidden is not None:
            wrong[hidden >= reach[chosen, None]] = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            found = (wrong @ weights) * np.exp(place.shift[chosen] + place.z[chosen] + top)
        errors[part] = np.where(np.isfinite(found), found, np.inf)

    height = max(1, TILE_ENTRIES // problem.m)
    threads = problem.engine.thread_count
    starts = range(0, rows.size, height)
    if threads == 1 or len(starts) < 8:
        for start in starts:
            measure(start)
    else:
        with blas_threads(1), ThreadPoolExecutor(threads) as pool:
            list(pool.map(measure, starts))
    return errors


# ---- projected rows -------------------------------------------------------------------------------------------------


def _find_projection(
    problem: AttentionProblem, place: _Place, target: float, limit: int, near: int | None, memory: int
) -> tuple[_Projection | None, str | None]:
    """The first degree at which projected rows measure within target, of rank <= limit (H6); else why it gave up,
    when that was before the limit. Degrees below `near` (None: all) are tried only where that costs little.
    """
    root = np.sqrt(_rough_weights(problem, place))
    used = np.flatnonzero(root)
    root = root[used]
    sample = _sample(problem, place)
    attention = problem.attention_rows(sample)
    lost = attention.sum(axis=1) - attention[:, used].sum(axis=1)
    attention = attention[:, used]
    scaled = attention / root
    basis = np.empty((used.size, 0))
    components: list[np.ndarray] = []
    offered = np.empty((0, 0))
    sizes: list[int] = []
    for degree in range(LARGEST_DEGREE + 1):
        count = place.count(degree)
        numbers = (problem.n + 4 * problem.m) * count + sample.size * used.size * (degree + 2)
        if count > limit:
            return None, None
        reason = refuse_memory(numbers, memory)
        cheap = used.size * count**2 <= SPHERE_WORK
        if near is None and not cheap:
            return None, None
        if reason is None and used.size * count**2 > BALL_WORK:
            reason = (
                f"projections of {used.size} keys to rank {count} take minutes; none smaller is within eps"
            )
        if reason:
            return None, reason
        begin = place.count(degree - 1) if degree else 0
        if offered.shape[1] < count:
            offered = harmonics(place.key[used], degree + (2 if count > 200 else 4), even=place.lifted)
        block = _extend(basis, offered[:, begin:count] * root[:, None])
        basis = np.hstack([basis, block])
        sizes.append(block.shape[1])
        components.append((scaled @ block) @ block.T * root)
        if near is not None and degree < near and not cheap:
            continue
        plain = np.abs(attention - sum(components)).sum(axis=1) + lost
        if plain.max() > WORTH_FITTING * target:
            continue
        for fit in (False, True):
            multipliers, sampled = np.ones(degree + 1), float(plain.max())
            if fit:
                multipliers, sampled = _fit_multipliers(components, attention, lost)
            if sampled > target:
                continue
            onto, right = np.zeros((2, problem.m, basis.shape[1]))
            onto[used] = basis / root[:, None] * np.repeat(multipliers, sizes)
            right[used] = basis * root[:, None]
            error = _projected_error(problem, onto, right, target)
            if error <= target:
                return _Projection(degree, error, onto, right), None
    return None, None


def _projected_error(problem: AttentionProblem, onto: np.ndarray, right: np.ndarray, target: float) -> float:
    """The largest row error, or the first seen beyond the target."""
    error = 0.0
    measured = _measured_rows(problem)
    for part in _blocks(measured.size, problem.m):
        exact = problem.attention_rows(measured[part])
        error = max(error, float(np.abs(exact - (exact @ onto) @ right.T).sum(axis=1).max()))
        if error > target:
            break
    return error


def _extend(basis: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Orthonormal columns that with those of `basis` span the block too; fewer when the block is dependent."""
    size = np.sqrt((block**2).sum(axis=0).max(initial=0.0))
    for _ in range(2):
        block = block - basis @ (basis.T @ block)
    q, r = np.linalg.qr(block)
    if np.abs(np.diag(r)).min(initial=np.inf) <= 1e-10 * size or block.shape[1] > block.shape[0]:
        u, values, _ = np.linalg.svd(block, full_matrices=False)
        q = u[:, values > 1e-10 * size]
    return q - basis @ (basis.T @ q)


def _fit_multipliers(
    components: list[np.ndarray], attention: np.ndarray, lost: np.ndarray
) -> tuple[np.ndarray, float]:
    """One factor a degree that makes the largest row error of the sample small, and that error.

    Reweighted least squares for l1; rows with larger errors gain weight from sweep to sweep. Never worse than 1.
    """
    parts = np.stack(components).reshape(len(components), -1)
    importance = np.ones(attention.shape[0])
    best, multipliers = np.inf, np.ones(len(components))
    trial = multipliers
    for _ in range(SWEEPS + 1):
        residual = np.abs(attention - (trial @ parts).reshape(attention.shape))
        errors = residual.sum(axis=1)
        worst = float((errors + lost).max())
        if worst < best:
            best, multipliers = worst, trial
        importance = importance * (errors + 1e-300) / errors.max(initial=1e-300)
        floor = 1e-2 * residual.mean(axis=1, keepdims=True) + 1e-300
        weights = (importance[:, None] / np.maximum(residual, floor)).reshape(-1)
        weighted = parts * (weights / weights.max())
        gram = weighted @ parts.T
        gram += 1e-9 * np.trace(gram) * np.eye(len(gram))
        pull = weighted @ attention.reshape(-1) + 1e-9 * np.trace(weighted @ parts.T)
        trial = np.linalg.solve(gram, pull)
    return multipliers, best


def _rough_weights(problem: AttentionProblem, place: _Place) -> np.ndarray:
    """The part of e^(b_j) that no quadratic c_0 + <c, k> + c_2 |k|^2 explains, at most 1; zero for masked keys."""
    x = problem.inputs
    bias, top = x.key_bias, x.key_bias.max(where=x.kept_keys, initial=-np.inf)
    used = x.kept_keys & (bias > top - NEGLIGIBLE)
    key = visible(problem).key[used]
    terms = np.column_stack([np.ones(len(key)), key, (key**2).sum(axis=1)])
    rest = bias[used] - terms @ np.linalg.lstsq(terms, bias[used], rcond=None)[0]
    if np.ptp(rest) >= np.ptp(bias[used]):
        rest = bias[used]
    weights = np.zeros(problem.m)
    weights[used] = np.exp(np.maximum(rest - rest.max(), -NEGLIGIBLE / 2))
    return weights


def _sample(problem: AttentionProblem, place: _Place) -> np.ndarray:
    """Rows spread over the order of z, both ends included."""
    count = min(problem.n, SAMPLE, max(4, SAMPLE_ENTRIES // (16 * problem.m)))
    order = np.argsort(place.z, kind="stable")
    return np.sort(order[np.linspace(0, problem.n - 1, count).astype(np.int64)])


# ---- where the keys lie ---------------------------------------------------------------------------------------------


@once_per_problem
def _place(problem: AttentionProblem) -> _Place:
    """A gauge in which the keys lie on the unit sphere, or else in the unit ball, lifted by one coordinate (H5)."""
    x, seen = problem.inputs, visible(problem)
    key, query = seen.key[problem.key_classes.first], seen.query
    base = x.scale * (x.query @ seen.centre) - problem.log_normaliser
    fitted = _fit_ellipsoid(key) if seen.dimension >= 2 else None
    lifted = fitted is None
    centre, shape = _enclose(key) if lifted else fitted  # |shape.T (key - centre)| is 1, or at most 1
    point = (seen.key - centre) @ shape
    if lifted:
        squared = (point**2).sum(axis=1)
        height = np.sqrt(np.maximum(1 - squared, 0.0))
        point = np.column_stack([point, height])
    pulled = solve_triangular(shape, query.T, lower=True).T if seen.dimension else query
    z = np.sqrt((pulled**2).sum(axis=1))
    unit = np.zeros((problem.n, point.shape[1]))
    unit[:, : seen.dimension] = pulled / np.maximum(z, 1e-300)[:, None]
    if seen.dimension == 0:
        point, unit = np.ones((problem.m, 1)), np.ones((problem.n, 1))
    if point.shape[1] < 2:  # nothing is visible: the constant is all there is
        point, unit = (np.column_stack([rows, np.zeros(len(rows))]) for rows in (point, unit))
        return _Place(point, unit, np.zeros(problem.n), base, False)
    unit[z == 0.0, 0] = 1.0
    length = np.sqrt((point**2).sum(axis=1))
    point[length == 0.0, 0] = 1.0
    point /= np.where(length == 0.0, 1.0, length)[:, None]
    return _Place(point, unit, z, base + query @ centre, lifted)


def _fit_ellipsoid(key: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(centre, lower triangular G) with |G^T (key - centre)| = 1 up to rounding, or None if there is no such pair."""
    m, r = key.shape
    size = np.sqrt((key**2).sum(axis=1).max())
    if not size > 0.0:
        return None
    unit = key / size
    upper = np.triu_indices(r)
    if m > r * (r + 3) // 2 and r <= ELLIPSOID_LIMIT:
        squares = unit[:, upper[0]] * unit[:, upper[1]]
    else:
        squares = (unit**2).sum(axis=1)[:, None]
    solution = np.linalg.lstsq(np.hstack([squares, unit]), np.ones(m), rcond=None)[0]
    if squares.shape[1] == 1:
        matrix = solution[0] * np.eye(r)
    else:
        matrix = np.zeros((r, r))
        matrix[upper] = solution[: squares.shape[1]] / 2
        matrix += matrix.T
    try:
        centre = -np.linalg.solve(matrix, solution[squares.shape[1] :]) / 2
        shape = np.linalg.cholesky(matrix / (1 + centre @ matrix @ centre))
    except np.linalg.LinAlgError:
        return None
    radii = np.sqrt((((unit - centre) @ shape) ** 2).sum(axis=1))
    if not np.abs(radii - 1).max() <= ON_SPHERE:
        return None
    return centre * size, shape / size


def _enclose(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(centre, lower triangular G) with |G^T (key - centre)| <= 1: the ellipsoid of the keys' covariance."""
    m, r = key.shape
    centre = key.mean(axis=0)
    covariance = (key - centre).T @ (key - centre) / m
    shape = np.eye(r)
    if r and np.linalg.cond(covariance) < 1e12:
        shape = np.linalg.cholesky(np.linalg.inv(covariance))
    radius = np.sqrt((((key - centre) @ shape) ** 2).sum(axis=1).max(initial=0.0))
    return centre, shape / (radius or 1.0)


@once_per_problem
def _weights(problem: AttentionProblem) -> tuple[np.ndarray, float]:
    """(omega_j e^-b*, b*), b* the largest bias of a kept key."""
    x = problem.inputs
    top = float(x.key_bias.max(where=x.kept_keys, initial=-np.inf))
    return np.exp(np.where(x.kept_keys, x.key_bias - top, -np.inf)), top


def _blocks(n: int, m: int) -> Iterator[slice]:
    height = max(1, BLOCK_ENTRIES // m)
    for start in range(0, n, height):
        yield slice(start, min(start + height, n))
