"""The experiments on the laws: slopes, records, points, and that ranks come from the checker."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from rankcert import laws
from rankcert.errors import InvalidInput
from rankcert.laws import FAMILIES, Report, fit_slope, local_slopes, make_head, run_laws

SMALL = {"betas": [1, 4, 16, 32, 64, 128], "n": 240}


def without_seconds(report):
    times = ("seconds", "lower_seconds")
    return [{k: v for k, v in point.items() if k not in times} for point in report.to_dict()["points"]]


@pytest.mark.parametrize("slope", [0.5, 1.0, 1.5])
def test_an_exact_power_law_is_fitted_exactly(slope):
    betas = np.array([16.0, 40.0, 100.0, 300.0, 1000.0])
    fit = fit_slope(betas, 3 * (1 + betas) ** slope)
    assert fit.slope == pytest.approx(slope, abs=1e-11) and fit.error == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(local_slopes(betas, 3 * (1 + betas) ** slope), slope)


def test_standard_error_agrees_with_scipy():
    from scipy.stats import linregress

    betas, ranks = [16, 32, 64, 128, 256], [19, 25, 37, 51, 80]
    want = linregress(np.log1p(betas), np.log(ranks))
    fit = fit_slope(betas, ranks)
    assert fit.slope == pytest.approx(want.slope) and fit.error == pytest.approx(want.stderr)


@pytest.mark.parametrize("betas", [[], [16, 32, 64], [20, 20, 20, 20]])
def test_too_few_points_claim_nothing(betas):
    fit = fit_slope(betas, list(range(2, 2 + len(betas))))
    assert fit.slope is None and fit.error is None and "nothing claimed" in fit.note


def test_few_points_in_a_report_claim_nothing():
    report = run_laws(["sphere-2"], betas=[16, 32, 64], n=200)
    family = report.families[0]
    assert report.fit(family).points == 3 and report.met(family) is None
    assert "fewer than 4 usable points: nothing claimed" in report.family_rows()[1][0]


def test_a_small_run_is_deterministic_and_its_slopes_are_right():
    names = ["sphere-2", "ball-1", "head-1"]
    first, second = run_laws(names, **SMALL), run_laws(names, **SMALL)
    assert without_seconds(first) == without_seconds(second)
    assert [family.name for family in first.families] == names
    for family in first.families:
        fit = first.fit(family)
        assert fit.points == 4 and first.met(family), (family.name, fit)
    for point in first.points:
        assert 0 < point.bound <= 0.1 and 4 * point.rank <= point.n
    columns, rows = first.point_rows()
    assert len(rows) == 18 and all(len(row) == len(columns) for row in rows)
    assert all(len(row) == len(first.family_rows()[0]) for row in first.family_rows()[1])
    json.dumps(first.to_dict(), allow_nan=False)


def test_a_family_ends_at_a_quarter_of_its_points():
    points = run_laws(["sphere-3"], betas=[1, 4, 16, 64], n=150).points
    assert [p.rank for p in points] == [9, 25, None] and points[-1].bound is None


def test_the_rank_of_a_fixed_head_does_not_depend_on_its_width(monkeypatch):
    ranks = []
    for width in (2, 16, 128):
        monkeypatch.setitem(FAMILIES, "head-2", replace(FAMILIES["head-2"], width=width))
        ranks.append([p.rank for p in run_laws(["head-2"], betas=[4, 16], n=400).points])
    # the seed of the points depends on the width, so they are shifted differently
    assert np.ptp(ranks, axis=0).max() <= 12


def test_saturation_is_flat():
    report = run_laws(["saturation"], betas=[2, 64, 256, 1024], n=60)
    assert [p.rank for p in report.points][1:] == [60, 60, 60] and report.points[0].rank < 30
    assert report.met(report.families[0]) is None


def test_finished_points_are_not_computed_again(tmp_path, monkeypatch):
    record = tmp_path / "points.json"
    names = ["sphere-2"]
    begun = []

    def stop_after_two(stage):
        begun.append(stage)
        if len(begun) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_laws(names, **SMALL, resume=record, progress=stop_after_two)
    assert len(json.loads(record.read_text())["points"]) == 2 and os.listdir(tmp_path) == ["points.json"]
    begun.clear()
    resumed = run_laws(names, **SMALL, resume=record, progress=lambda stage: begun.append(stage))
    assert len(begun) == 4 and without_seconds(resumed) == without_seconds(run_laws(names, **SMALL))
    monkeypatch.setattr(laws, "_measure", None)  # nothing is left to measure
    assert run_laws(names, **SMALL, resume=record) == resumed
    with pytest.raises(TypeError):
        run_laws(names, **(SMALL | {"n": 241}), resume=record)  # other parameters, other points


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 2, "seed": 20240817, "points": [{"beta": 1}]}', "\x00"]
)
def test_other_files_are_refused(tmp_path, text):
    record = tmp_path / "points.json"
    record.write_text(text)
    with pytest.raises(InvalidInput, match="holds no records"):
        run_laws(["sphere-2"], **SMALL, resume=record)


def test_records_of_another_version_are_not_used(tmp_path):
    record = tmp_path / "points.json"
    record.write_text('{"version": 0, "seed": 1, "points": [{"anything": 1}]}')
    run_laws(["sphere-2"], betas=[1], n=40, resume=record)
    assert json.loads(record.read_text())["version"] == laws.VERSION


@pytest.mark.parametrize(
    "arguments, match",
    [
        ({"families": ["circle"]}, "family must be one of sphere-2"),
        ({"betas": [0.0]}, "beta must be a positive finite number"),
        ({"betas": ["x"]}, "beta must be"),
        ({"n": 3}, "n must be an integer of at least 8"),
        ({"eps": 1.0}, "eps must be below 1"),
        ({"eps": -1}, "eps must be a positive"),
    ],
)
def test_input_without_meaning_is_refused(arguments, match):
    with pytest.raises(InvalidInput, match=match):
        run_laws(**arguments)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_points_are_where_they_should_be(name):
    family = FAMILIES[name]
    q, bias, k = make_head(family, 300, 4.0)
    assert q.shape == k.shape == (300, family.width) and np.array_equal(k, make_head(family, 300, 9.0)[2])
    if family.kind == "head":
        assert np.linalg.matrix_rank(k - k.mean(axis=0), tol=1e-9) == family.dimension and bias is None
        return
    radii = np.linalg.norm(k, axis=1)
    if family.kind == "sphere":
        np.testing.assert_allclose(radii, 1.0)
    else:
        assert radii.max() <= 0.5
        np.testing.assert_allclose(bias, -2.0 * radii**2)
    assert np.linalg.norm(k.mean(axis=0)) < 0.03
    # well spread: nearest neighbours are all about equally far
    nearest = np.sqrt(np.sort(((k[:, None] - k) ** 2).sum(-1), axis=1)[:, 1])
    assert nearest.min() > 0.2 * nearest.mean()


def test_points_are_spaced_below_the_width_of_the_rows():
    for family in FAMILIES.values():
        if family.name in ("saturation", "sphere-4"):
            continue
        areas = {"sphere": [0, 0, 2 * np.pi, 4 * np.pi], "ball": [0, 1, np.pi / 4, np.pi / 6]}
        assert family.n <= 20_000
        if family.kind in areas:
            largest = {"sphere-3": 512, "ball-3": 256}.get(family.name, 1024)
            dimension = family.dimension - (family.kind == "sphere")
            spacing = (areas[family.kind][family.dimension] / family.n) ** (1 / dimension)
            assert spacing < largest**-0.5


def test_plots(tmp_path):
    report = run_laws(["sphere-2"], **SMALL)
    from rankcert.plots import plot_laws

    with pytest.raises(InvalidInput, match="must end in"):
        plot_laws(report, tmp_path / "laws.pdf")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(InvalidInput, match=r"rankcert\[plot\]"):
            plot_laws(report, tmp_path / "laws.svg")
        return
    for name in ("a.svg", "b.svg", "c.png"):
        plot_laws(report, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").stat().st_size > 10_000
    plot_laws(Report(0.1, ()), tmp_path / "empty.svg")
