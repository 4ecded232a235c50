"""Experiments on how the rank of attention grows with its scale, every rank from a factorization the checker proved.

A family is a shape of q = k with n fixed points; beta, the scale of the logits, grows. The rank of the smallest
`harmonic` factorization proved within eps is a certified upper bound on the eps-rank, and its slope in log(1 + beta)
is set against the law's exponent (LAWS.md); on request so is a proved lower bound, the other side of the law. Points
are seeded and spread evenly; nothing is drawn twice.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil, isfinite, log, sqrt
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

from rankcert.brackets import lower_problem
from rankcert.certification import check_options
from rankcert.checker import Engine, Verdict, read_eps
from rankcert.checker.engine import Progress
from rankcert.constructions import Factorization
from rankcert.constructions.exact import Exact
from rankcert.constructions.harmonic import Harmonic
from rankcert.errors import InvalidInput
from rankcert.problem import AttentionProblem

__all__ = [
    "FAMILIES",
    "Family",
    "Fit",
    "Point",
    "Report",
    "fit_slope",
    "local_slopes",
    "make_head",
    "run_laws",
]

SEED = 20240817
VERSION = 2  # of the records; a change of the points or of the construction makes old ones useless
FITTED_FROM = 16.0
FEWEST_POINTS = 4
RETRIES = 4  # with a smaller target, when the check comes out just above eps
MEMORY = 6 * 2**30
LOWER_POINTS = 2048  # points of a family at most, when lower bounds are asked for
LOWER_LIMIT = 0.1  # from the law, within which the lower slope has to be where the law has both sides
HALF_OCTAVES = tuple(2.0 ** (k / 2) for k in range(21))
OCTAVES = tuple(2.0**k for k in range(0, 15))


@dataclass(frozen=True)
class Family:
    """One experiment: `n` points of `kind` in `dimension` visible dimensions, embedded in `width`.

    exponent: what the law says. low, high: the slope the experiment has to show, low None when only bounded above.
    share: ranks up to n / share count; beyond it the family ends. 1 for the saturation demonstration.
    """

    name: str
    kind: str
    dimension: int
    width: int
    n: int
    quick_n: int
    exponent: float
    low: float | None
    high: float | None
    betas: tuple[float, ...] = HALF_OCTAVES
    share: int = 4


FAMILIES = {
    family.name: family
    for family in (
        Family("sphere-2", "sphere", 2, 2, 1024, 256, 0.5, 0.4, 0.6),
        Family("sphere-3", "sphere", 3, 3, 16_000, 1500, 1.0, 0.9, 1.1),
        Family("sphere-4", "sphere", 4, 4, 20_000, 2400, 1.5, None, 1.65),
        Family("ball-1", "ball", 1, 1, 1024, 256, 0.5, 0.4, 0.6),
        Family("ball-2", "ball", 2, 2, 4500, 1000, 1.0, 0.9, 1.1),
        Family("ball-3", "ball", 3, 3, 10_000, 1500, 1.5, None, 1.65),
        Family("head-1", "head", 1, 64, 1024, 256, 0.5, None, 0.6),
        Family("head-2", "head", 2, 64, 6000, 1000, 1.0, None, 1.1),
        Family("saturation", "sphere", 3, 3, 500, 120, 1.0, None, None, OCTAVES, 1),
    )
}


@dataclass(frozen=True)
class Point:
    """What was proved at one beta; rank and bound are None where no factorization of rank <= n / share was found.

    bound: the checker's, in the run that made the point; one read from a file is that run's word, and so is lower: the
    rank proved to be needed, None where none was asked for.
    """

    family: str
    n: int
    eps: float
    beta: float
    rank: int | None
    bound: float | None
    method: str
    rows: str
    degree: int | None
    seconds: float
    lower: int | None
    lower_seconds: float

    def is_for(self, family: Family, n: int, eps: float, beta: float, lower: bool) -> bool:
        """Whether this is the point of those parameters, with a lower bound if one is asked for."""
        mine = (self.family, self.n, self.eps, self.beta, lower and self.rank is not None)
        return mine == (family.name, n, eps, beta, self.lower is not None and lower)


class Fit(NamedTuple):
    """Least-squares slope of log rank against log(1 + beta) with its standard error, or None and why."""

    slope: float | None
    error: float | None
    points: int
    note: str


@dataclass(frozen=True)
class Report:
    """All points, and for each family its fit, local slopes, and whether the slope is where it should be."""

    eps: float
    points: tuple[Point, ...]

    @property
    def families(self) -> list[Family]:
        return [family for name, family in FAMILIES.items() if any(p.family == name for p in self.points)]

    def of(self, family: Family) -> list[Point]:
        """The proved points of a family, by beta."""
        return [p for p in self.points if p.family == family.name and p.rank is not None]

    def fit(self, family: Family) -> Fit:
        """The slope over the points with beta >= 16 and rank <= n / 4."""
        used = [p for p in self.of(family) if p.beta >= FITTED_FROM and 4 * p.rank <= p.n]
        return fit_slope([p.beta for p in used], [p.rank for p in used])

    def fit_lower(self, family: Family) -> Fit:
        """The slope of the lower bounds over the same points, as far as they have one."""
        used = [p for p in self.of(family) if p.beta >= FITTED_FROM and 4 * p.rank <= p.n and p.lower]
        return fit_slope([p.beta for p in used], [p.lower for p in used])

    def met_lower(self, family: Family) -> bool | None:
        """Whether the lower slope is within 0.1 of the law; None where nothing is claimed."""
        slope = self.fit_lower(family).slope
        return None if slope is None or family.low is None else abs(slope - family.exponent) <= LOWER_LIMIT

    def gap(self, family: Family) -> float | None:
        """Geometric mean of rank / lower bound over the points that have both."""
        ratios = [p.rank / p.lower for p in self.of(family) if p.lower]
        return geometric_mean(ratios) if ratios else None

    def met(self, family: Family) -> bool | None:
        """Whether the slope is within the family's limits; None where nothing is claimed."""
        slope = self.fit(family).slope
        if slope is None or family.high is None:
            return None
        return slope <= family.high and (family.low is None or slope >= family.low)

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        summary = {}
        for family in self.families:
            points = self.of(family)
            fit = self.fit(family)
            summary[family.name] = {
                "exponent": family.exponent,
                "low": family.low,
                "high": family.high,
                "met": self.met(family),
                **fit._asdict(),
                "lower": self.fit_lower(family)._asdict() | {"met": self.met_lower(family)},
                "rank_over_lower": self.gap(family),
                "local_slopes": local_slopes([p.beta for p in points], [p.rank for p in points]),
            }
        return {
            "version": VERSION,
            "seed": SEED,
            "eps": self.eps,
            "families": summary,
            "points": [asdict(p) for p in self.points],
        }

    def point_rows(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of the table of points."""
        columns = [
            "family",
            "n",
            "beta",
            "lower bound",
            "rank",
            "local slope",
            "proved bound",
            "method",
            "degree",
            "seconds",
        ]
        rows = []
        for family in self.families:
            points = self.of(family)
            slopes = [
                "",
                *(f"{s:.2f}" for s in local_slopes([p.beta for p in points], [p.rank for p in points])),
            ]
            for p, slope in zip(points, slopes, strict=True):
                rows.append(
                    [
                        p.family,
                        str(p.n),
                        f"{p.beta:.4g}",
                        "" if p.lower is None else str(p.lower),
                        str(p.rank),
                        slope,
                        f"{ceil(p.bound * 1e6) / 1e6:.6f}",
                        f"{p.method}, {p.rows}" if p.rows else p.method,
                        "" if p.degree is None else str(p.degree),
                        f"{p.seconds + p.lower_seconds:.1f}",
                    ]
                )
        return columns, rows

    def family_rows(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of the table of slopes."""
        rows = []
        for family in self.families:
            fit, met, points = self.fit(family), self.met(family), self.of(family)
            seconds = sum(p.seconds + p.lower_seconds for p in self.points if p.family == family.name)
            lower, met_lower, gap = self.fit_lower(family), self.met_lower(family), self.gap(family)
            wanted = "" if family.high is None else f"at most {family.high:g}"
            if family.low is not None:
                wanted = f"{family.low:g} to {family.high:g}"
            rows.append(
                [
                    family.name,
                    str(max((p.n for p in points), default=0)),
                    f"{max((p.beta for p in points), default=0):.4g}",
                    str(max((p.rank for p in points), default=0)),
                    str(fit.points),
                    f"{family.exponent:g}",
                    fit.note if fit.slope is None else f"{fit.slope:.3f} +- {fit.error:.3f}",
                    wanted,
                    {None: "", True: "yes", False: "no"}[met],
                    "" if lower.slope is None else f"{lower.slope:.3f} +- {lower.error:.3f}",
                    {None: "", True: "yes", False: "no"}[met_lower],
                    "" if gap is None else f"{gap:.2f}",
                    f"{seconds:.0f}",
                ]
            )
        columns = [
            "family",
            "n",
            "largest beta",
            "its rank",
            "points",
            "law",
            "slope",
            "wanted",
            "met",
            "lower slope",
            "met",
            "rank / lower",
            "seconds",
        ]
        return columns, rows


def fit_slope(betas: Sequence[float], ranks: Sequence[int]) -> Fit:
    """Least squares of log rank on log(1 + beta). Fewer than 4 points: nothing claimed.

    >>> fit_slope([15, 31, 63, 127], [4, 8, 16, 32])
    Fit(slope=1.0, error=0.0, points=4, note='')
    """
    count = len(betas)
    if count < FEWEST_POINTS:
        return Fit(None, None, count, f"fewer than {FEWEST_POINTS} usable points: nothing claimed")
    x, y = np.log1p(np.asarray(betas, dtype=float)), np.log(np.asarray(ranks, dtype=float))
    centred = x - x.mean()
    spread = float(centred @ centred)
    if not spread > 0.0:
        return Fit(None, None, count, "only one beta: nothing claimed")
    slope = float(centred @ y) / spread
    rest = y - y.mean() - slope * centred
    return Fit(round(slope, 12), round(sqrt(float(rest @ rest) / (count - 2) / spread), 12), count, "")


def local_slopes(betas: Sequence[float], ranks: Sequence[int]) -> list[float]:
    """Slopes between neighbouring points."""
    pairs = zip(betas, betas[1:], ranks, ranks[1:], strict=False)
    return [log(b / a) / log((1 + y) / (1 + x)) for x, y, a, b in pairs]


def run_laws(
    families: Iterable[str] | None = None,
    *,
    eps: float = 0.1,
    betas: Sequence[float] | None = None,
    n: int | None = None,
    quick: bool = False,
    lower: bool = False,
    effort: str = "balanced",
    resume: str | os.PathLike | None = None,
    threads: int | None = None,
    progress: Callable[[str], Progress | None] | None = None,
) -> Report:
    """Certified ranks of the named families (default: all) over a grid of beta.

    Parameters
    ----------
    eps : the tolerance, below 1. betas : positive numbers instead of each family's own grid. n : points instead of
        each family's own number; quick : fewer points, for a run of about a minute.
    lower : also prove a lower bound at every beta (`rankcert.lower_bound`, with this effort), both sides of the same
        head. Families of more than 2048 points then have 2048 (unless n says otherwise).
    resume : a JSON file. Points found there under the same parameters are not computed again, and each new point is
        added as soon as it is proved (written aside, then renamed).
    threads : of the checker. progress : as in `rankcert.certify`, called as each point begins.

    Raises InvalidInput for names and numbers without meaning and for a file that holds no such records.
    """
    eps = read_eps(eps)
    if eps >= 1.0:
        raise InvalidInput(f"eps must be below 1, where the rank is 0, got {eps!r}")
    chosen = [_family(name) for name in (FAMILIES if families is None else families)]
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 8):
        raise InvalidInput(f"n must be an integer of at least 8, got {n!r}")
    grid = None if betas is None else sorted({_beta(value) for value in betas})
    check_options("auto", effort, 0, MEMORY)
    known = [] if resume is None else _read_points(Path(resume))
    points = []
    for family in chosen:
        count = n or (family.quick_n if quick else min(family.n, LOWER_POINTS) if lower else family.n)
        for beta in family.betas if grid is None else grid:
            point = next((p for p in known if p.is_for(family, count, eps, beta, lower)), None)
            if point is None:
                stage = progress(f"{family.name}, beta = {beta:.4g}") if progress else None
                engine = Engine(threads=threads, progress=stage)
                point = _measure(family, count, eps, beta, effort if lower else None, engine)
                known.append(point)
                if resume is not None:
                    _write_points(Path(resume), known)
            points.append(point)
            if point.rank is None:
                break
    return Report(eps, tuple(points))


def make_head(family: Family, n: int, beta: float) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """(q, key_bias or None, k) of a family: scale is beta."""
    rng = np.random.default_rng([SEED, family.dimension, family.width, n])
    if family.kind == "sphere":
        k = _sphere(n, family.dimension, rng)
        return k, None, k
    ball = _ball(n, family.dimension, rng)
    if family.kind == "ball":
        k = 0.5 * ball
        return k, -beta / 2 * (k**2).sum(axis=1), k
    frame = np.linalg.qr(rng.normal(size=(family.width, family.dimension)))[0]
    q = ball @ frame.T
    return q, None, q + rng.normal(size=family.width) / 8


def _measure(family: Family, n: int, eps: float, beta: float, effort: str | None, engine: Engine) -> Point:
    """One point; with its lower bound unless effort is None."""
    started = time.perf_counter()
    q, bias, k = make_head(family, n, beta)
    problem = AttentionProblem(q, k, scale=beta, key_bias=bias, engine=Engine(threads=engine.threads))
    proved = _prove(problem, eps, n // family.share, engine)
    seconds = time.perf_counter() - started
    if proved is None:
        return Point(family.name, n, eps, beta, None, None, "harmonic", "", None, seconds, None, 0.0)
    factors, verdict = proved
    rows, degree = factors.details.get("rows", ""), factors.details.get("degree")
    started, lower, lower_seconds = time.perf_counter(), None, 0.0
    if effort is not None:
        settings = {"effort": effort, "seed": SEED}
        found = lower_problem(
            problem, eps, "auto", settings, MEMORY, lambda name: engine.progress, most=factors.rank
        )
        lower = found.rank
        lower_seconds = time.perf_counter() - started
    return Point(
        family=family.name,
        n=n,
        eps=eps,
        beta=beta,
        rank=factors.rank,
        bound=verdict.bound,
        method=factors.method,
        rows=rows,
        degree=degree,
        seconds=seconds,
        lower=lower,
        lower_seconds=lower_seconds,
    )


def _prove(
    problem: AttentionProblem, eps: float, most: int, engine: Engine
) -> tuple[Factorization, Verdict] | None:
    """The first harmonic factorization of rank <= most that is proved; else, if `most` allows, the exact one."""
    harmonic = Harmonic(most)
    target = eps
    for _ in range(RETRIES):
        plan = harmonic.plan(problem, target, memory=MEMORY)
        if plan.refusal:
            break
        factors = harmonic.build(problem, plan, target)
        verdict = problem.check(factors.left, factors.right, eps=eps, engine=engine)
        if verdict:
            return factors, verdict
        target -= 2 * max(verdict.bound - eps, 1e-9 * eps)
        if not target > 0.0:
            break
    exact = Exact()
    plan = exact.plan(problem, eps, memory=MEMORY)
    if plan.refusal or plan.rank > most:
        return None
    factors = exact.build(problem, plan, eps)
    verdict = problem.check(factors.left, factors.right, eps=eps, engine=engine)
    return (factors, verdict) if verdict else None


# ---- points ---------------------------------------------------------------------------------------------------------


def _spread(n: int, dimension: int, rng: np.random.Generator) -> np.ndarray:
    """n points of the unit cube: multiples of powers of the generalized golden ratio, shifted at random."""
    if dimension == 1:
        return ((np.arange(n) + 0.5) / n)[:, None]
    first = (np.arange(n) + 0.5) / n
    ratio = 2.0
    for _ in range(60):
        ratio = (1 + ratio) ** (1 / dimension)
    steps = ratio ** -np.arange(1.0, dimension)
    others = (np.arange(n)[:, None] * steps + rng.random(dimension - 1)) % 1.0
    return np.column_stack([first, others])


def _sphere(n: int, dimension: int, rng: np.random.Generator) -> np.ndarray:
    turn = np.linalg.qr(rng.normal(size=(dimension, dimension)))[0]
    return _onto_sphere(_spread(n, dimension - 1, rng), dimension) @ turn


def _onto_sphere(cube: np.ndarray, dimension: int) -> np.ndarray:
    """From the cube of one dimension less, keeping volumes."""
    if dimension == 1:
        return np.ones((len(cube), 1))
    if dimension == 2:
        angle = 2 * np.pi * cube[:, 0]
        return np.column_stack([np.cos(angle), np.sin(angle)])
    if dimension == 3:
        height, angle = 2 * cube[:, 0] - 1, 2 * np.pi * cube[:, 1]
        radius = np.sqrt(1 - height**2)
        return np.column_stack([radius * np.cos(angle), radius * np.sin(angle), height])
    large, small = np.sqrt(cube[:, 0]), np.sqrt(1 - cube[:, 0])
    one, two = 2 * np.pi * cube[:, 1], 2 * np.pi * cube[:, 2]
    return np.column_stack(
        [large * np.cos(one), large * np.sin(one), small * np.cos(two), small * np.sin(two)]
    )


def _ball(n: int, dimension: int, rng: np.random.Generator) -> np.ndarray:
    """The unit ball, volumes kept."""
    cube = _spread(n, dimension, rng)
    if dimension == 1:
        return 2 * cube - 1
    radius = cube[:, :1] ** (1 / dimension)
    return radius * _onto_sphere(cube[:, 1:], dimension)


# ---- input and records ----------------------------------------------------------------------------------------------


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise InvalidInput(f"family must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def _beta(value) -> float:
    try:
        beta = float(value)
    except (TypeError, ValueError):
        beta = float("nan")
    if not (isfinite(beta) and beta > 0.0):
        raise InvalidInput(f"beta must be a positive finite number, got {value!r}")
    return beta


def _read_points(path: Path) -> list[Point]:
    if not path.exists():
        return []
    try:
        record = json.loads(path.read_text("utf-8"))
        if (record["version"], record["seed"]) != (VERSION, SEED):
            return []
        return [Point(**fields) for fields in record["points"]]
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInput(f"{path} holds no records of rankcert laws: {error!r}") from None


def _write_points(path: Path, points: list[Point]) -> None:
    record = {"version": VERSION, "seed": SEED, "points": [asdict(p) for p in points]}
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        aside.write_text(json.dumps(record, indent=1, allow_nan=False), "utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from None
