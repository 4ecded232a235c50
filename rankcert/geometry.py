"""How many dimensions of a head its softmax can see, and coordinates for just those.

Only differences of logits within a row matter, so geometry is about the centred logits scale <q_i, k_j - centre>:
their rank is the visible interaction dimension, and truncating their singular value decomposition gives a dimension
for every tolerance (THEORY.md, Lemma 4). What is called `bound` here is returned by the checker.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from rankcert.checker import Engine, logit_residual
from rankcert.errors import CannotCertify, InvalidInput
from rankcert.problem import AttentionProblem, Classes

__all__ = [
    "Dimension",
    "GeometryReport",
    "Visible",
    "dimension_report",
    "geometry_report",
    "half_ranges",
    "interaction_dimension",
    "once_per_problem",
    "visible",
]

SAMPLE_ROWS = 256  # rows looked at before a dimension is proved on all of them
BLOCK_ENTRIES = 2**21  # of the logits held at any one time

Result = TypeVar("Result")
Progress = Callable[[int, int], None]


def once_per_problem(find: Callable[[AttentionProblem], Result]) -> Callable[[AttentionProblem], Result]:
    """`find`, remembering its answer for as long as the problem lives."""
    known: WeakKeyDictionary[AttentionProblem, Result] = WeakKeyDictionary()

    @wraps(find)
    def found(problem: AttentionProblem) -> Result:
        if problem not in known:
            known[problem] = find(problem)
        return known[problem]

    return found


@dataclass(frozen=True, eq=False)
class Visible:
    """The visible dimensions of a head.

    query (n, dimension), key (m, dimension): <query_i, key_j> = scale <q_i, k_j - centre> up to rounding; the two
    have equally long longest rows; keys no row keeps are zero. singular_values: all of them, of the centred logits
    between distinct queries and keys. bound: proved max_i ||softmax(l_i + b) - softmax(<query_i, key> + b)||_1.
    """

    dimension: int
    query: np.ndarray
    key: np.ndarray
    singular_values: np.ndarray
    centre: np.ndarray
    bound: float


class Dimension(NamedTuple):
    """`dimension` singular directions leave the softmax within `bound` <= `tol` (at tol = 0, within rounding)."""

    tol: float
    dimension: int
    bound: float


class _Coordinates(NamedTuple):
    """As in `Visible`, with every singular direction, largest first: columns 0..r-1 are the rank-r truncation."""

    query: np.ndarray
    key: np.ndarray
    singular_values: np.ndarray
    centre: np.ndarray


@once_per_problem
def visible(problem: AttentionProblem) -> Visible:
    """The smallest dimension whose proved residual is rounding: 4 * 2^-52 (d + 3) max_i N_i above the checker's floor.

    N_i = |scale| ||q_i|| max_j ||k_j||; the floor is the bound proved for all directions together. O((n + m) d^2)
    and a few sweeps of the checker (THEORY.md, Lemma 4).
    """
    x = problem.inputs
    coordinates = _coordinates(problem)
    every = coordinates.singular_values.size
    floor = _residual_bound(problem, coordinates, every)
    sizes = [np.sqrt((rows * rows).sum(axis=1).max(initial=0.0)) for rows in (x.query, x.key)]
    allowed = floor + 4 * np.finfo(float).eps * (x.d + 3) * abs(x.scale) * sizes[0] * sizes[1]

    # The residual of some rows is at most that of all, so dimensions refused by a sample need no sweep.
    sample = np.linspace(0, problem.n - 1, min(problem.n, SAMPLE_ROWS)).astype(np.int64)
    dimension, bound = every, floor
    for r in _candidates(_truncation_errors(problem, coordinates, sample)[:every], allowed):
        attempt = _residual_bound(problem, coordinates, r)
        if attempt <= allowed:
            dimension, bound = r, attempt
            break
    query, key = (np.ascontiguousarray(rows[:, :dimension]) for rows in coordinates[:2])
    return Visible(dimension, query, key, coordinates.singular_values, coordinates.centre, bound)


def half_ranges(problem: AttentionProblem, visible: Visible) -> tuple[np.ndarray, np.ndarray]:
    """Mid-range and half-range (n,) of each row's centred logits over the keys it keeps."""
    nothing = np.empty((problem.n, 0))
    low, high = np.empty(problem.n), np.empty(problem.n)
    for rows, least, most in _row_extremes(
        problem, visible.query, visible.key, nothing, np.arange(problem.n)
    ):
        low[rows], high[rows] = least[:, 0], most[:, 0]
    return (low + high) / 2, (high - low) / 2


def dimension_report(
    problem: AttentionProblem, tolerances, progress: Progress | None = None
) -> list[Dimension]:
    """For each tolerance the smallest dimension to which the centred logits can be truncated, with its proof.

    tol = 0 gives the visible dimension. For 0 < tol < 2 it is the smallest r whose rank-r truncation is proved to
    move every softmax row by at most tol in l1; at tol >= 2 it is 0. All r are scanned, because the error is not
    monotone in r (THEORY.md, Lemma 4). `progress(rows done, rows in all)` is called during the scan.

    Raises InvalidInput for a tolerance that is negative or no number, CannotCertify for one below rounding.
    """
    tolerances = [_read_tol(tol) for tol in tolerances]
    coordinates = _coordinates(problem)
    errors = None
    report = []
    for tol in tolerances:
        if tol == 0.0:
            seen = visible(problem)
            report.append(Dimension(tol, seen.dimension, seen.bound))
        elif tol >= 2.0:
            report.append(Dimension(tol, 0, _residual_bound(problem, coordinates, 0)))
        else:
            if errors is None:
                errors = _truncation_errors(problem, coordinates, np.arange(problem.n), progress)
            report.append(_prove_smallest(problem, coordinates, errors, tol))
    return report


def interaction_dimension(q, k, *, tol=0.0, scale=None, key_bias=None, causal=False, offset=0) -> int:
    """How many dimensions the interaction of queries q (n, d) and keys k (m, d) has, up to `tol` in every row's l1.

    tol = 0 is the visible interaction dimension; see `dimension_report` for the meaning of tol and the errors, and
    `rankcert.certify` for the other arguments.
    """
    tol = _read_tol(tol)
    problem = AttentionProblem(q, k, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
    return dimension_report(problem, [tol])[0].dimension


@dataclass(frozen=True, eq=False)
class GeometryReport:
    """What the theory can see of a head.

    dimensions: as from `dimension_report`. singular_values: of the centred logits between distinct queries and kept
    keys. query_radius: the longest query; key_radius: the largest distance of a kept key from the centre of the sphere
    that fits them best (both as given, before any gauge). query_spread, key_spread: how much these lengths vary,
    relative to the largest: 0 on a sphere, near 1 in a ball. half_range_max,
    half_range_median: over rows, half the spread of the logits (the W of the approximants).
    """

    n: int
    m: int
    d: int
    distinct_queries: int
    distinct_keys: int
    dimensions: list[Dimension]
    singular_values: np.ndarray
    query_radius: float
    key_radius: float
    query_spread: float
    key_spread: float
    half_range_max: float
    half_range_median: float


def geometry_report(
    q,
    k,
    *,
    tolerances=(0.0, 0.01, 0.1, 0.5),
    scale=None,
    key_bias=None,
    causal=False,
    offset=0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> GeometryReport:
    """Dimensions, supports and ranges of one head; arguments as in `rankcert.certify` and `dimension_report`.

    >>> import numpy as np, rankcert
    >>> angle = np.linspace(0, 6, 50)
    >>> circle = np.column_stack([np.cos(angle), np.sin(angle), np.ones(50)])
    >>> report = rankcert.geometry_report(circle, circle, tolerances=[0])
    >>> report.dimensions[0].dimension, report.key_spread < 1e-12
    (2, True)
    """
    engine = Engine(threads=threads)
    problem = AttentionProblem(
        q, k, scale=scale, key_bias=key_bias, causal=causal, offset=offset, engine=engine
    )
    if not problem.n:
        raise InvalidInput("a head without queries (n = 0) has no geometry")
    seen = visible(problem)
    queries = np.sqrt((problem.inputs.query**2).sum(axis=1))
    keys = problem.inputs.key[problem.key_classes.first]
    distances = np.sqrt(((keys - _sphere_centre(keys)) ** 2).sum(axis=1))
    _, half_range = half_ranges(problem, seen)
    return GeometryReport(
        n=problem.n,
        m=problem.m,
        d=problem.d,
        distinct_queries=problem.query_classes.first.size,
        distinct_keys=problem.key_classes.first.size,
        dimensions=dimension_report(problem, tolerances, progress),
        singular_values=seen.singular_values,
        query_radius=float(queries.max()),
        key_radius=float(distances.max()),
        query_spread=_spread(queries),
        key_spread=_spread(distances),
        half_range_max=float(half_range.max()),
        half_range_median=float(np.median(half_range)),
    )


def _spread(norms: np.ndarray) -> float:
    return float(1.0 - norms.min() / norms.max()) if norms.max() > 0.0 else 0.0


def _sphere_centre(points: np.ndarray) -> np.ndarray:
    """Least squares for |x|^2 = 2 <c, x> + const: exact when the points lie on a sphere about c."""
    system = np.column_stack([2 * points, np.ones(points.shape[0])])
    return np.linalg.lstsq(system, (points**2).sum(axis=1))[0][:-1]


def _read_tol(tol) -> float:
    try:
        value = float(tol)
    except (TypeError, ValueError):
        value = np.nan
    if not value >= 0.0:
        raise InvalidInput(f"tol must be a number >= 0, got {tol!r}")
    return value


@once_per_problem
def _coordinates(problem: AttentionProblem) -> _Coordinates:
    x = problem.inputs
    if not problem.n:
        return _Coordinates(np.empty((0, 0)), np.empty((problem.m, 0)), np.empty(0), np.zeros(x.d))
    queries, keys = _distinct(problem)
    centre = x.key[keys.first].mean(axis=0)
    left, left_core = np.linalg.qr(x.query[queries.first])
    right, right_core = np.linalg.qr(x.key[keys.first] - centre)
    u, values, vt = np.linalg.svd(x.scale * (left_core @ right_core.T), full_matrices=False)
    left, right = left @ (u * np.sqrt(values)), right @ (vt.T * np.sqrt(values))
    longest = [np.sqrt((rows * rows).sum(axis=1).max()) for rows in (left, right)]
    balance = np.sqrt(longest[1] / longest[0]) if min(longest) > 0.0 else 1.0
    key = np.zeros((problem.m, values.size))
    kept = keys.of >= 0
    key[kept] = right[keys.of[kept]] / balance
    return _Coordinates(left[queries.of] * balance, key, values, centre)


def _distinct(problem: AttentionProblem) -> tuple[Classes, Classes]:
    """Queries and kept keys to decompose: equal ones once, unless a causal mask tells them apart."""
    if not problem.inputs.causal:
        return problem.query_classes, problem.key_classes
    kept = problem.inputs.kept_keys
    every, positions = np.arange(problem.n), np.where(kept, np.cumsum(kept) - 1, -1)
    return Classes(every, every), Classes(np.flatnonzero(kept), positions)


def _residual_bound(problem: AttentionProblem, coordinates: _Coordinates, r: int) -> float:
    query, key = coordinates.query[:, :r], coordinates.key[:, :r]
    return logit_residual(problem.inputs, query, key, problem.engine).bound


def _prove_smallest(
    problem: AttentionProblem, coordinates: _Coordinates, errors: np.ndarray, tol: float
) -> Dimension:
    for r in _candidates(errors, tol):
        bound = _residual_bound(problem, coordinates, r)
        if bound <= tol:
            return Dimension(tol, r, bound)
    rank = coordinates.singular_values.size
    bound = _residual_bound(problem, coordinates, rank)
    raise CannotCertify(
        f"tol={tol:g} is below rounding: all {rank} dimensions together are proved to {bound:.2e} only",
        bound=bound,
        rank=rank,
    )


def _candidates(errors: np.ndarray, allowed: float) -> list[int]:
    return np.flatnonzero(errors <= allowed).tolist()


def _truncation_errors(
    problem: AttentionProblem, coordinates: _Coordinates, rows: np.ndarray, progress: Progress | None = None
) -> np.ndarray:
    """max over the given rows of 2 tanh(osc / 4) for each truncation r = 0, 1, .., all (estimates, one pass)."""
    query, key = coordinates.query, coordinates.key
    spread = np.zeros(query.shape[1] + 1)
    for done, least, most in _row_extremes(problem, query, key, query, rows):
        np.maximum(spread, (most - least).max(axis=0), out=spread)
        if progress is not None:
            progress(done.stop, rows.size)
    return 2 * np.tanh(spread / 4)


def _row_extremes(
    problem: AttentionProblem, query: np.ndarray, key: np.ndarray, terms: np.ndarray, rows: np.ndarray
):
    """Yield (part of rows, low, high) from `find_extremes` on <query_i, key_j>, taking off the leading terms."""
    from rankcert.kernels.rowspread import find_extremes  # here, so that Numba loads only when it is needed

    x = problem.inputs
    keys = np.ascontiguousarray(key[:, : terms.shape[1]].T)
    height = max(1, BLOCK_ENTRIES // problem.m)
    for start in range(0, rows.size, height):
        part = slice(start, min(start + height, rows.size))
        chosen = rows[part]
        low, high = np.empty((2, chosen.size, terms.shape[1] + 1))
        find_extremes(query[chosen] @ key.T, terms[chosen], keys, x.reach[chosen], x.kept_keys, low, high)
        yield part, low, high
