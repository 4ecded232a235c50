"""Plots, on request: matplotlib (the extra `plot`) is imported when a function here is called, not before."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rankcert.brackets import Bracket
from rankcert.certificates import Certificate
from rankcert.errors import InvalidInput
from rankcert.geometry import GeometryReport
from rankcert.laws import FITTED_FROM, Report
from rankcert.survey import Survey

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_brackets", "plot_curve", "plot_heads", "plot_laws", "plot_singular_values", "refuse_plot"]

SUFFIXES = (".png", ".svg")


def plot_laws(report: Report, path: str | os.PathLike) -> None:
    """Certified ranks and lower bounds against 1 + beta on logarithmic axes; a colour a family, fitted slopes dashed.

    Writes a PNG or an SVG, by the name's ending; the same report gives the same SVG. Raises InvalidInput for another
    ending, for a place that cannot be written to, and when matplotlib is not installed.
    """
    with _figure(path) as figure:
        axes = figure.add_subplot(xscale="log", yscale="log")
        for number, family in enumerate(report.families):
            points = report.of(family)
            if not points:
                continue
            label = f"{family.name}, law {family.exponent:g}"
            fits = {"rank": report.fit(family), "lower": report.fit_lower(family)}
            for side, fit in fits.items():
                if fit.slope is not None:
                    label += f", {side} {fit.slope:.2f} \u00b1 {fit.error:.2f}"
            for (side, fit), marker in zip(fits.items(), "v^", strict=True):
                shown = [p for p in points if getattr(p, side)]
                x, y = np.array([1 + p.beta for p in shown]), np.array([getattr(p, side) for p in shown])
                if fit.slope is not None:
                    used = np.array([p.beta >= FITTED_FROM and 4 * p.rank <= p.n for p in shown])
                    level = np.exp((np.log(y[used]) - fit.slope * np.log(x[used])).mean())
                    axes.plot(x[used], level * x[used] ** fit.slope, "--", color=f"C{number}", linewidth=0.8)
                axes.plot(x, y, marker, color=f"C{number}", markersize=4, label=label)
                label = None
        axes.set_xlabel("1 + \u03b2")
        axes.set_ylabel("rank (\u25bd certified, \u25b3 at least)")
        axes.set_title(f"Proved ranks of softmax attention, \u03b5 = {report.eps:g}")
        axes.grid(True, which="major", alpha=0.3)
        if report.points:
            axes.legend(fontsize="small")


def plot_curve(curve: Sequence[Certificate], path: str | os.PathLike) -> None:
    """Rank against proved bound, one point a certificate of `rankcert.rank_curve`.

    Writes a PNG or an SVG; errors as in `plot_laws`.
    """
    with _figure(path) as figure:
        axes = figure.add_subplot(xscale="log")
        proved = [certificate.bound for certificate in curve]
        axes.step(proved, [certificate.rank for certificate in curve], "o-", where="pre", markersize=4)
        axes.set_xlabel("proved bound on the worst row's l1 error")
        axes.set_ylabel("rank")
        n, m = (curve[0].left.shape[0], curve[0].right.shape[0]) if curve else (0, 0)
        axes.set_title(f"Certified ranks, {n} queries, {m} keys")
        axes.grid(True, which="major", alpha=0.3)


def plot_brackets(brackets: Sequence[Bracket], path: str | os.PathLike) -> None:
    """Proved lower and upper ranks of one head: against the scale of its logits if they have several, else against eps.

    Writes a PNG or an SVG; errors as in `plot_laws`.
    """
    with _figure(path) as figure:
        axes = figure.add_subplot(xscale="log", yscale="log")
        scales = [point.certificate.scale for point in brackets]
        by_scale = len(set(scales)) > 1
        at = scales if by_scale else [point.eps for point in brackets]
        lower, upper = [point.lower for point in brackets], [point.upper for point in brackets]
        axes.plot(at, upper, "v-", markersize=4, label="upper: rank of a factorization within \u03b5")
        axes.plot(at, lower, "^-", markersize=4, label="lower: no smaller rank is within \u03b5")
        axes.fill_between(at, lower, upper, alpha=0.15)
        axes.set_xlabel("scale \u03b2" if by_scale else "\u03b5")
        axes.set_ylabel("rank")
        axes.set_title("Proved brackets" + (f", \u03b5 = {brackets[0].eps:g}" if by_scale else ""))
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(fontsize="small")


def plot_singular_values(report: GeometryReport, path: str | os.PathLike) -> None:
    """The singular values of a head's centred logits, on a logarithmic axis, with its dimensions marked.

    Writes a PNG or an SVG; errors as in `plot_laws`.
    """
    with _figure(path) as figure:
        axes = figure.add_subplot(yscale="log")
        values = report.singular_values
        axes.plot(np.arange(1, values.size + 1), values, "o-", markersize=3, linewidth=0.8)
        for number, row in enumerate(report.dimensions, start=1):
            label = f"{row.dimension} dimensions: softmax within {row.bound:.2g} (proved)"
            axes.axvline(row.dimension + 0.5, color=f"C{number}", linewidth=0.8, label=label)
        axes.set_xlabel("number")
        axes.set_ylabel("singular value of the centred logits")
        axes.set_title(f"{report.n} queries, {report.m} keys, d = {report.d}")
        axes.grid(True, which="major", alpha=0.3)
        if report.dimensions:
            axes.legend(fontsize="small")


def plot_heads(survey: Survey, path: str | os.PathLike) -> None:
    """Certified ranks, layers by heads, one panel for each temperature and eps; blank where nothing was proved.

    Writes a PNG or an SVG; errors as in `plot_laws`.
    """
    layers, heads = (sorted({getattr(row, name) for row in survey.rows}) for name in ("layer", "head"))
    temperatures, tolerances = (list(dict.fromkeys(values)) for values in zip(*survey.groups, strict=True))
    with _figure(path) as figure:
        figure.set_size_inches(2 + 4 * len(tolerances), 1.5 + 3.5 * len(temperatures))
        panels = figure.subplots(len(temperatures), len(tolerances), squeeze=False)
        for axes, (temperature, eps) in zip(panels.flat, survey.groups, strict=True):
            ranks = np.full((len(layers), len(heads)), np.nan)
            for row in survey.of(temperature, eps):
                if row.rank is not None:
                    ranks[layers.index(row.layer), heads.index(row.head)] = row.rank
            image = axes.imshow(ranks, aspect="auto", vmin=0)
            figure.colorbar(image, ax=axes, label="certified rank")
            axes.set_xticks(range(len(heads)), heads)
            axes.set_yticks(range(len(layers)), layers)
            axes.set_xlabel("head")
            axes.set_ylabel("layer")
            axes.set_title(f"\u03b5 = {eps:g}, T = {temperature:g}")


def refuse_plot(path: Path) -> None:
    """Refuse what no function here could write: before long work, not after."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInput(f"a plot's name must end in {' or '.join(SUFFIXES)}, got {str(path)!r}")
    _matplotlib()


@contextmanager
def _figure(path: str | os.PathLike) -> Iterator["Figure"]:
    """An empty figure, written to `path` when the block ends well."""
    path = Path(path)
    refuse_plot(path)
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "rankcert"}):
        figure = Figure(figsize=(8, 5.5), layout="constrained")
        yield figure
        try:
            dateless = {"Date": None} if path.suffix.lower() == ".svg" else None
            figure.savefig(path, dpi=150, metadata=dateless)
        except OSError as error:
            raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from None


def _matplotlib():
    try:
        import matplotlib
    except ImportError:
        raise InvalidInput("plots need matplotlib; install it with: pip install 'rankcert[plot]'") from None
    return matplotlib
