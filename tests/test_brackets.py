"""Both ends of the rank as a user meets them: records, files, curves, the command line, surveys and laws."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

import rankcert
from rankcert import cli, survey
from rankcert.errors import InvalidInput, MalformedCertificate
from rankcert.laws import run_laws
from rankcert.lowerbounds import WITNESSES, bernstein
from rankcert.survey import survey_heads

QUICK = {"effort": "fast", "threads": 1}


@pytest.fixture(autouse=True, scope="module")
def short_searches():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bernstein, "FLOPS", 2e9)
        yield


@pytest.fixture(scope="module")
def head():
    random = np.random.default_rng(3)
    return 2.0 * random.normal(size=(40, 6)), random.normal(size=(48, 6))


@given(problems(), st.sampled_from([0.05, 0.3, 0.9, 1.0, 2.0]))
@settings(max_examples=40, deadline=None)
def test_lower_is_never_above_upper(drawn, eps):
    try:
        found = rankcert.bracket(drawn.q, drawn.k, eps=eps, **QUICK, **drawn.options)
    except rankcert.CannotCertify:
        return
    assert found.verdict.status == "PROVED" and found.eps == eps
    assert 0 <= found.lower <= found.upper
    assert found.lower == found.lower_bound.verdict.rank and found.upper == found.certificate.rank


@given(problems(), st.sampled_from([0.1, 0.5]))
@settings(max_examples=25, deadline=None)
def test_a_lower_bound_is_proved_again_from_its_bytes(drawn, eps):
    found = rankcert.lower_bound(drawn.q, drawn.k, eps=eps, **QUICK, **drawn.options)
    verdict = rankcert.verify_lower(found.to_bytes(), drawn.q, drawn.k, **drawn.options)
    assert verdict.rank == found.rank == found.verdict.rank
    assert bool(verdict) and verdict.eps_below > eps


@pytest.mark.parametrize("eps", [0.01, 0.5, 0.9])
def test_heads_whose_rank_is_plain_are_closed(eps):
    """Identity-like, of rank 1, a permutation, few distinct queries that lean to keys of their own."""
    eye, permuted = np.eye(24), np.random.default_rng(0).permutation(24)
    for q, k, rank in (
        (60.0 * eye, eye, 24),
        (60.0 * eye[permuted], eye, 24),
        (np.zeros((9, 2)), np.ones((7, 2)), 1),
        (60.0 * eye[np.arange(24) % 5], eye, 5),
    ):
        found = rankcert.bracket(q, k, eps=eps, scale=1.0, **QUICK)
        assert (found.lower, found.upper) == (rank, rank)


def test_zero_is_proved_by_rule(head):
    for q, eps in ((head[0], 1.0), (head[0], 7.0), (head[0][:0], 0.1)):
        found = rankcert.bracket(q, head[1], eps=eps)
        assert found.lower == found.upper == 0 and found.lower_bound.verdict.kind == "rule"
        assert found.verdict.status == "PROVED"


def test_every_kind_of_witness_can_be_asked_for(head):
    ranks = {kind: rankcert.lower_bound(*head, eps=0.3, method=kind, **QUICK).rank for kind in WITNESSES}
    found = rankcert.lower_bound(*head, eps=0.3, **QUICK)
    assert found.rank == max(ranks.values()) and ranks["bernstein"] > ranks["leakage"] >= 1
    assert [c.method for c in found.candidates] == list(WITNESSES)
    assert {c.method: c.rank for c in found.candidates} == ranks


def test_same_seed_same_bytes(head):
    first, second, other = (
        rankcert.lower_bound(*head, eps=0.2, seed=seed, **QUICK).to_bytes() for seed in (5, 5, 6)
    )
    assert first == second and first != other


def test_a_curve_rises_as_the_tolerance_falls_and_every_point_is_proved(head):
    tolerances = [1.5, 0.7, 0.4, 0.2, 0.1]
    curve = rankcert.bracket_curve(*head, eps=tolerances, **QUICK)
    assert [point.eps for point in curve] == tolerances
    for side in ("lower", "upper"):
        ranks = [getattr(point, side) for point in curve]
        assert ranks == sorted(ranks)
    for point in curve:
        assert point.lower <= point.upper and point.verdict.status == "PROVED"
        assert rankcert.verify_bracket(point.to_bytes(), *head, eps=point.eps)
    lowers = rankcert.lower_curve(*head, eps=tolerances, **QUICK)
    assert [point.rank for point in lowers] == [point.lower for point in curve]


def test_files_hold_both_proofs_and_are_about_these_inputs(head, tmp_path):
    found = rankcert.bracket(*head, eps=0.3, **QUICK)
    found.save(tmp_path / "both")
    found.lower_bound.save(tmp_path / "lower")
    loaded, lower = rankcert.load_bracket(tmp_path / "both"), rankcert.load_lower(tmp_path / "lower")
    assert (loaded.lower, loaded.upper, loaded.verdict) == (found.lower, found.upper, None)
    assert lower.rank == found.lower and lower.verdict is None
    assert loaded.to_bytes() == found.to_bytes() and lower.to_bytes() == found.lower_bound.to_bytes()
    verdict = rankcert.verify_bracket(tmp_path / "both", *head)
    assert verdict and (verdict.lower.rank, verdict.upper.rank) == (found.lower, found.upper)
    assert rankcert.verify_lower(lower, *head).rank == found.lower
    assert "other inputs" in rankcert.verify_bracket(tmp_path / "both", head[0], 2 * head[1]).reason
    with pytest.raises(MalformedCertificate, match="format"):
        rankcert.load_lower(tmp_path / "both")
    with pytest.raises(InvalidInput, match="differ in eps"):
        replace(found, lower_bound=rankcert.lower_bound(*head, eps=0.2, **QUICK)).to_bytes()


@pytest.mark.parametrize(
    "options",
    [{"eps": 0}, {"eps": 0.1, "method": "svd"}, {"eps": 0.1, "effort": "hard"}, {"eps": 0.1, "memory": 0}],
)
def test_options_without_meaning_are_refused(head, options):
    with pytest.raises(InvalidInput):
        rankcert.lower_bound(*head, **options)


def test_ctrl_c_keeps_what_is_proved(head, monkeypatch):
    def interrupt(stage):
        def report(done, total):
            raise KeyboardInterrupt

        return report if stage == "bernstein" else None

    found = rankcert.lower_bound(*head, eps=0.2, effort="max", threads=1, progress=interrupt)
    assert found.rank >= 1 and rankcert.verify_lower(found, *head)
    assert [c.method for c in found.candidates] == ["bernstein"]


# ---- the command line, surveys, laws --------------------------------------------------------------------------------


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code or 0
        return status, capsys.readouterr().out.strip()

    return command


def test_bracket_and_verify_on_the_command_line(run, tmp_path):
    fast = ("--example", "--eps", "0.5", "--effort", "fast")
    status, line = run("bracket", *fast, "--out", "both.safetensors")
    assert status == 0 and line.startswith("PROVED at eps = 0.5 the smallest rank is from ")
    assert line.endswith("saved to both.safetensors and proved again from the file")
    status, again = run("verify", "both.safetensors", "--example")
    assert status == 0 and line.startswith(again)
    status, text = run("verify", "both.safetensors", "--example", "--json")
    assert status == 0 and json.loads(text)["status"] == "PROVED"
    assert run("verify", "both.safetensors", "--example", "--eps", "0.4")[0] == 1
    assert run("verify", "both.safetensors", "--example", "--example-name", "peaked")[0] == 1
    rankcert.load_bracket("both.safetensors").lower_bound.save("lower.safetensors")
    status, line = run("verify", "lower.safetensors", "--example")
    assert status == 0 and line.startswith("PROVED every matrix within eps = 0.5 has rank ")
    (tmp_path / "none.safetensors").write_bytes(b"\0" * 20)
    assert run("verify", "none.safetensors", "--example")[0] == 3


def test_brackets_against_eps_and_beta(run, tmp_path):
    pytest.importorskip("matplotlib")
    fast = ("--example", "--effort", "fast")
    status, line = run("bracket", *fast, "--eps", "0.5", "--beta", "0.1", "--beta", "0.4", "--plot", "b.svg")
    assert status == 0 and line.startswith("0.1:[") and " 0.4:[" in line and (tmp_path / "b.svg").exists()
    status, text = run("bracket", *fast, "--curve", "--json", "--plot", "c.png")
    found = json.loads(text)
    assert status == 0 and len(found) == 8 and (tmp_path / "c.png").exists()
    assert all(point["lower"]["rank"] <= point["upper"]["rank"] for point in found)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--eps", "0.1", "--curve"),
        ("--curve", "--beta", "1"),
        ("--eps", "0.1", "--beta", "1", "--scale", "2"),
        ("--eps", "0.1", "--plot", "x.png"),
        ("--curve", "--out", "x"),
        ("--beta", "1"),
    ],
)
def test_contradictions_are_usage_errors(run, arguments):
    random = np.random.default_rng(0)
    np.savez("head.npz", Q=random.normal(size=(9, 3)), K=random.normal(size=(9, 3)))
    assert run("bracket", "head.npz", *arguments)[0] == 2


def test_a_survey_brackets_every_head_and_proves_it_again(head, tmp_path, monkeypatch):
    heads = {(0, number): rankcert.example_head(name) for number, name in enumerate(["diffuse", "causal"])}
    how = {"eps": [0.5], "effort": "fast", "brackets": True, "workers": 1}
    how |= {"resume": tmp_path / "rows", "certificates": tmp_path / "proofs"}
    first = survey_heads(heads, **how)
    for row in first.rows:
        assert row.lower is not None and 1 <= row.lower <= row.rank and row.lower_seconds > 0
        (file,) = (tmp_path / "proofs").glob(f"layer{row.layer}-head{row.head}-*.safetensors")
        given = heads[row.layer, row.head]
        verdict = rankcert.verify_bracket(file, given.q, given.k, **given.options())
        assert verdict and (verdict.lower.rank, verdict.upper.rank) == (row.lower, row.rank)
    (group,) = first.summary()
    ratios = [row.rank / row.lower for row in first.rows]
    assert group.bracketed == 2 and group.rank_over_lower == pytest.approx(np.prod(ratios) ** 0.5)
    assert group.closed == ratios.count(1.0) and group.lower_seconds_median > 0
    bare = survey_heads(heads, eps=[0.5], method="svd", workers=1)
    assert all(row.lower is None for row in bare.rows) and bare.summary()[0].rank_over_lower is None

    def fail(task):
        raise AssertionError("computed again")

    monkeypatch.setattr(survey, "_measure", fail)
    assert survey_heads(heads, **how).rows == first.rows


def test_both_sides_of_a_law():
    report = run_laws(["sphere-2"], betas=[16, 32, 64, 128], n=240, lower=True, effort="fast")
    family = report.families[0]
    for point in report.points:
        assert 1 <= point.lower <= point.rank
    assert report.met_lower(family) and 1.0 <= report.gap(family) <= 1.35
    assert report.to_dict()["families"]["sphere-2"]["lower"]["points"] == 4
    plain = run_laws(["sphere-2"], betas=[16], n=240)
    assert plain.points[0].lower is None and plain.gap(family) is None
