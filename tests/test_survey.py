"""Surveys: every head of a file, in processes and on a cluster, resumed after kills, and what the tables say.

Most tests put the tasks into a thread of this process, where they are quick; those about processes use true ones.
"""

import csv
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles import allowed, dense_attention

import rankcert
from rankcert import survey
from rankcert.checker import read_inputs
from rankcert.errors import InvalidInput, RankcertError
from rankcert.heads import Head, read_heads
from rankcert.plots import plot_heads
from rankcert.survey import Row, Survey, survey_heads

TIMES = ("seconds", "check_seconds", "lower_seconds", "lower_check_seconds", "svd_seconds", "svd_times")
QUICK = {"eps": [0.1, 0.5], "method": "svd"}


def write_file(path: Path, layers: int = 2, heads: int = 3, n: int = 24, **extra) -> Path:
    rng = np.random.default_rng(layers * 100 + heads)
    q, k = rng.normal(size=(2, layers, heads, n, 5)) * rng.uniform(0.5, 2.0, size=(layers, heads, 1, 1))
    np.savez(path, Q=q.astype(np.float32), K=k.astype(np.float32), **extra)
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    return write_file(tmp_path / "heads.npz")


@pytest.fixture
def near(monkeypatch):
    """Tasks run in one thread of this process."""

    @contextmanager
    def pool(workers):
        with ThreadPoolExecutor(1) as executor:
            yield executor, lambda: 2

    monkeypatch.setattr(survey, "_local_pool", pool)


def timeless(rows) -> list[dict]:
    """Rows without what a clock says."""
    rows = [row.to_dict() if isinstance(row, Row) else dict(row) for row in rows]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def found_on_disk(source, **options) -> int:
    """How many rows a survey takes from its folder."""
    seen = []
    survey_heads(source, **options, progress=lambda done, total: seen.append(done))
    return seen[0]


# what a row says


@pytest.mark.parametrize("extra", [{}, {"causal": True, "scale": 0.7}], ids=["full", "causal"])
def test_rows_say_what_certify_and_dense_algebra_say(tmp_path, near, extra):
    path = write_file(tmp_path / "heads.npz", layers=1, **extra)
    done = survey_heads(path, eps=[0.1, 0.5], temperatures=[1, 0.5], tau=0.3)
    heads = read_heads([path])
    keys = [(*place, t, eps) for place in heads for t in (1.0, 0.5) for eps in (0.1, 0.5)]
    assert [(row.layer, row.head, row.temperature, row.eps) for row in done.rows] == keys
    for row in done.rows:
        head = heads[row.layer, row.head]
        options = head.options() | {"scale": extra.get("scale", 5**-0.5) / row.temperature}
        certificate = rankcert.certify(head.q, head.k, eps=row.eps, threads=1, **options)
        assert (row.rank, row.method, row.bound) == (certificate.rank, certificate.method, certificate.bound)
        assert row.status == "proved" and row.bound <= row.eps and row.note == ""
        assert row.inputs_sha256 == certificate.digests["inputs_sha256"]
        assert row.r_tau == rankcert.interaction_dimension(head.q, head.k, tol=0.3, **options)
        p = dense_attention(head.q.astype(float), head.k.astype(float), **options)
        counted = allowed(24, 24, bool(extra.get("causal")), 0)
        u, s, vt = np.linalg.svd(p)
        errors = [np.abs((p - u[:, :r] * s[:r] @ vt[:r]) * counted).sum(1).max() for r in range(25)]
        assert row.svd_rank == next(r for r in range(25) if errors[r] <= row.eps - 1e-12)
        assert row.seconds > 0 and row.check_seconds > 0 and row.svd_times == row.seconds / row.svd_seconds
        assert not row.trivial


def test_trivial_answers_are_marked(near):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 20, 3))
    heads = {
        (0, 0): Head(q, k),
        (0, 1): Head(9 * q[[0] * 10 + [1] * 10], k),  # two distinct queries
        (0, 2): Head(0 * q, k),  # all weights equal: rank 1
        (0, 3): Head(20 * q, 20 * k),  # hardly anything but the exact factorization
    }
    rows = survey_heads(heads, eps=[0.1], method="auto").rows
    assert [row.trivial for row in rows] == [False, True, True, rows[3].rank == 20]
    assert [row.rank for row in rows[1:3]] == [2, 1]
    assert survey_heads(heads, eps=[1e-9], method="exact").summary()[0].trivial == list(heads)


def test_what_cannot_be_proved_is_a_row_too(near, file, tmp_path):
    done = survey_heads(file, eps=[1e-17, 0.5], method="svd", every=4, resume=tmp_path / "rows")
    row = done.rows[0]
    assert (row.status, row.rank, row.bound, row.method, row.svd_rank) == ("unproved", None, None, "", None)
    assert "1e-17" in row.note and not row.trivial and row.svd_times is None
    first, second = done.summary()
    assert first.unproved == [(0, 0), (1, 1)] and first.proved == 0 and first.rank_over_svd is None
    assert second.unproved == [] and second.proved == 2 and second.rank_over_svd == 1.0
    assert survey_heads(file, eps=[1e-17, 0.5], method="svd", every=4, resume=tmp_path / "rows") == done


def test_from_eps_1_on_nothing_is_needed(near, file):
    done = survey_heads(file, eps=[1.0], every=6)
    assert [(row.rank, row.svd_rank, row.method, row.trivial) for row in done.rows] == [(0, 0, "zero", True)]
    assert done.summary()[0].compared == 0


# summaries


def rows_with(ranks, r_taus, **fields) -> list[Row]:
    proved = (0, 0, 1.0, 0.1, 9, 9, 3, False, 4, 4, None, "svd", "proved", False)
    row = Row(*proved, 2, None, 0.4, 0.1, None, None, 0.1, "", "")
    pairs = enumerate(zip(ranks, r_taus, strict=True))
    return [replace(row, head=h, rank=rank, r_tau=r_tau, **fields) for h, (rank, r_tau) in pairs]


def test_a_summary_by_hand():
    rows = rows_with([2, 4, 8, 1], [3, 1, 2, 5])
    rows[3] = replace(rows[3], method="exact", trivial=True, seconds=4.0)
    rows.append(replace(rows[0], head=4, rank=None, status="unproved", method="", svd_seconds=None))
    (group,) = Survey(tuple(rows), {}).summary()
    assert (group.heads, group.proved, group.compared, group.median_rank) == (5, 4, 4, 3.0)
    assert group.rank_over_svd == pytest.approx((2 * 4 * 8 * 1) ** 0.25 / 4)
    assert group.svd_times_median == pytest.approx(4.0)
    assert group.svd_times_90 == pytest.approx(4.0 + 0.7 * 36.0)
    assert group.wins == {"svd": 3, "exact": 1}
    assert group.trivial == [(0, 3)] and group.unproved == [(0, 4)]
    # ranks 2 3 4 1 against 3 1 2 4: differences 1 2 2 3, 1 - 6 * 18 / (4 * 15)
    assert group.spearman == pytest.approx(-0.8) and group.spearman_n == 4 and group.spearman_p is None


def test_correlations_that_do_not_exist():
    for ranks, r_taus, n in (([1, 2], [1, 2], 2), ([3, 3, 3], [1, 2, 3], 3), ([1, 2, 3], [5, 5, 5], 3)):
        (group,) = Survey(tuple(rows_with(ranks, r_taus)), {}).summary()
        assert (group.spearman, group.spearman_p, group.spearman_n) == (None, None, n)
    (group,) = Survey(tuple(rows_with(range(1, 12), range(11))), {}).summary()
    assert group.spearman == 1.0 and group.spearman_p < 1e-6 and group.spearman_n == 11
    (group,) = Survey(tuple(rows_with(range(1, 5), [1, 2, 3, None])), {}).summary()
    assert group.spearman == 1.0 and group.spearman_n == 3


# tables


def test_tables_round_trip(near, file, tmp_path):
    import pyarrow.parquet

    done = survey_heads(file, eps=[1e-17, 0.5], method="svd", every=2)
    wanted = [row.to_dict() for row in done.rows]
    done.save(tmp_path / "t.json")
    saved = json.loads((tmp_path / "t.json").read_text())
    assert saved == json.loads(json.dumps(done.to_dict())) and saved["rows"] == wanted
    assert saved["settings"]["method"] == "svd" and len(saved["summary"]) == 2
    done.save(tmp_path / "t.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "t.parquet").to_pylist() == wanted
    done.save(tmp_path / "t.CSV")
    with open(tmp_path / "t.CSV", newline="") as stream:
        read = list(csv.DictReader(stream))
    assert read == [{k: "" if v is None else str(v) for k, v in row.items()} for row in wanted]
    for name, message in (("t.txt", "must end in"), ("absent/t.csv", "cannot write")):
        with pytest.raises(InvalidInput, match=message):
            done.save(tmp_path / name)


def test_an_empty_column_has_its_type_in_parquet(tmp_path):
    import pyarrow.parquet

    Survey(tuple(rows_with([None], [None])), {}).save(tmp_path / "t.parquet")
    kinds = {field.name: str(field.type) for field in pyarrow.parquet.read_schema(tmp_path / "t.parquet")}
    assert [kinds[name] for name in ("rank", "bound", "trivial", "note")] == [
        "int64",
        "double",
        "bool",
        "string",
    ]


@pytest.mark.parametrize("package, action", [("pyarrow", "table"), ("distributed", "scheduler")])
def test_what_is_optional_is_asked_for_by_name(monkeypatch, file, tmp_path, package, action):
    monkeypatch.setitem(sys.modules, package, None)
    extra = {"pyarrow": "tables", "distributed": "cluster"}[package]
    with pytest.raises(InvalidInput, match=rf"rankcert\[{extra}\]"):
        if action == "table":
            Survey((), {}).save(tmp_path / "t.parquet")
        else:
            survey_heads(file, scheduler="tcp://127.0.0.1:1", **QUICK)


def test_heat_maps(near, file, tmp_path):
    done = survey_heads(file, eps=[1e-17, 0.5], temperatures=[1, 2, 4], method="svd", every=2)
    for name in ("a.svg", "b.svg", "c.png"):
        plot_heads(done, tmp_path / name)
    svg = (tmp_path / "a.svg").read_text()
    assert svg == (tmp_path / "b.svg").read_text() and svg.count("<image") >= 6
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(InvalidInput, match="must end in"):
        plot_heads(done, tmp_path / "a.pdf")


# what is kept on disk


def test_what_is_finished_is_not_done_again(near, file, tmp_path, monkeypatch):
    options = QUICK | {"resume": tmp_path / "rows"}
    first = survey_heads(file, **options)
    assert len(list((tmp_path / "rows").iterdir())) == len(first.rows) == 12
    with monkeypatch.context() as patch:
        patch.setattr(survey, "_measure", None)
        assert survey_heads(file, **options) == first  # times and all
    assert found_on_disk(file, **(options | {"eps": [0.1, 0.3]})) == 6
    assert found_on_disk(file, **(options | {"temperatures": [1, 2]})) == 12
    for other in ({"seed": 1}, {"effort": "fast"}, {"method": "exact"}, {"tau": 0.2}, {"memory": 2**31}):
        assert found_on_disk(file, **(options | other)) == 0, other
    heads = read_heads([file])
    nudged = {place: replace(head, q=head.q + np.float32(1e-6)) for place, head in heads.items()}
    assert found_on_disk(nudged, **options) == 0
    renamed = {(layer + 5, head): given for (layer, head), given in heads.items()}
    assert found_on_disk(renamed, **options) == 0
    masked = {place: replace(head, causal=True) for place, head in heads.items()}
    assert found_on_disk(masked, **options) == 0
    monkeypatch.setattr(survey, "__version__", "0.0.0")
    assert found_on_disk(file, **options) == 0


def spoiled(text: str):
    """What may become of a record."""
    record = json.loads(text)
    yield from (text[: len(text) // 2], text[:-3], "", "[]", "null", '{"task": 1}', "\x00" * 50)
    yield json.dumps(record | {"row": record["row"] | {"rank": record["row"]["rank"] - 1}})
    yield json.dumps(record | {"row": record["row"] | {"extra": 1}})
    yield json.dumps(record | {"task": record["task"] | {"eps": 0.2}})
    yield json.dumps({name: value for name, value in record.items() if name != "sha256"})
    fields = {name: value for name, value in record["row"].items() if name != "rank"}
    yield json.dumps(record | {"row": fields, "sha256": survey._digest(fields)})


def test_damaged_records_are_made_again(near, file, tmp_path):
    options = {"eps": [0.5], "method": "svd", "every": 4, "resume": tmp_path / "rows"}
    first = survey_heads(file, **options)
    record = next((tmp_path / "rows").glob("layer0-*.json"))
    text = record.read_text()
    for broken in spoiled(text):
        record.write_text(broken)
        assert found_on_disk(file, **options) == 1, broken
        assert json.loads(record.read_text())["task"] == json.loads(text)["task"]
        assert timeless(survey_heads(file, **options).rows) == timeless(first.rows)
    record.unlink()
    record.mkdir()
    with pytest.raises(InvalidInput, match="cannot write"):
        survey_heads(file, **options)


def test_kept_certificates_are_proved_again(near, file, tmp_path):
    folder = tmp_path / "certificates"
    options = {"eps": [0.5], "method": "svd", "every": 2, "resume": tmp_path / "rows", "certificates": folder}
    first = survey_heads(file, **options)
    heads = read_heads([file])
    files = sorted(folder.iterdir())
    assert len(files) == 3
    for row, path in zip(first.rows, files, strict=True):
        head = heads[row.layer, row.head]
        verdict = rankcert.verify(path, head.q, head.k, eps=0.5)
        assert verdict and (verdict.rank, verdict.bound) == (row.rank, row.bound)
    assert found_on_disk(file, **options) == 3
    whole = files[1].read_bytes()
    claim = rankcert.load(files[1])
    at = whole.index(claim.left.tobytes())
    refuted = whole[:at] + np.float64(claim.left[0, 0] + 1.0).tobytes() + whole[at + 8 :]
    for broken in (whole[:-1], b"", refuted, files[0].read_bytes()):
        files[1].write_bytes(broken)
        assert found_on_disk(file, **options) == 2
        assert files[1].read_bytes() == whole
    files[1].unlink()
    assert found_on_disk(file, **options) == 2 and files[1].exists()
    # a bound in a record is not believed where there is a certificate to prove
    record = next((tmp_path / "rows").glob("layer0-head0-*.json"))
    content = json.loads(record.read_text())
    content["row"]["bound"] = 1e-9
    record.write_text(json.dumps(content | {"sha256": survey._digest(content["row"])}))
    assert survey_heads(file, **options).rows[0].bound == first.rows[0].bound


# what is refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"eps": []}, "eps must be a list"),
        ({"eps": 0.1}, "eps must be a list"),
        ({"eps": [0.1, 0.1]}, "twice"),
        ({"eps": [-1]}, "eps must be"),
        ({"temperatures": [0.0]}, "temperatures must be positive"),
        ({"temperatures": ["hot"]}, "temperatures must be positive"),
        ({"method": "magic"}, "method must be"),
        ({"effort": "some"}, "effort must be"),
        ({"seed": -1}, "seed must be"),
        ({"memory": 0}, "memory must be"),
        ({"tau": 0}, "tau must be positive"),
        ({"every": 0}, "every must be a positive integer"),
        ({"workers": 0}, "workers must be a positive integer"),
        ({"resume": __file__}, "cannot make the folder"),
    ],
)
def test_options_without_meaning(monkeypatch, file, options, message):
    monkeypatch.setattr(survey, "_measure", None)  # nothing is begun
    with pytest.raises(InvalidInput, match=message):
        survey_heads(file, **options)


def test_heads_without_meaning(file):
    q = np.ones((4, 2))
    for heads, message in (
        ({(3, 5): Head(q, np.full((4, 2), np.nan))}, "layer 3, head 5: k must be finite"),
        ({"a": Head(q, q)}, "called by"),
        ({("a", "b"): Head(q, q)}, "called by"),
    ):
        with pytest.raises(InvalidInput, match=message):
            survey_heads(heads)
    with pytest.raises(InvalidInput, match="cannot read"):
        survey_heads("absent.npz")


def test_a_scheduler_that_is_not_there(file):
    import dask
    import distributed  # noqa: F401  (its settings are there once it is imported)

    for address in ("tcp://127.0.0.1:9", "nonsense://x"):
        with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
            with pytest.raises(InvalidInput, match="cannot reach a Dask scheduler"):
                survey_heads(file, scheduler=address, **QUICK)


# true processes


def test_processes_give_the_rows_of_one_thread(file, request):
    apart = survey_heads(file, eps=[0.1], temperatures=[2], workers=2)
    request.getfixturevalue("near")
    assert timeless(apart.rows) == timeless(survey_heads(file, eps=[0.1], temperatures=[2]).rows)
    assert not multiprocessing.active_children()


def test_a_dead_worker_ends_the_survey_and_not_what_is_finished(file, tmp_path):
    options = QUICK | {"resume": tmp_path / "rows"}

    def kill(done, total):
        if done == 3:
            for child in multiprocessing.active_children():
                child.kill()

    with pytest.raises(RankcertError, match="a worker process died"):
        survey_heads(file, workers=1, progress=kill, **options)
    assert not multiprocessing.active_children()
    seen = []
    survey_heads(file, workers=1, progress=lambda done, total: seen.append(done), **options)
    assert 3 <= seen[0] < 12 and seen[-1] == 12


def test_an_error_does_not_wait_for_what_is_running():
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError), survey._local_pool(1) as (executor, _):
        assert executor.submit(os.getpid).result() != os.getpid()
        asleep = executor.submit(time.sleep, 600)
        while not asleep.running():
            time.sleep(0.01)
        raise ZeroDivisionError
    assert time.monotonic() - started < 60 and not multiprocessing.active_children()


def command(*arguments) -> list[str]:
    return [sys.executable, "-P", "-m", "rankcert.cli", "heads", *map(str, arguments)]


def read_table(path: Path) -> list[dict]:
    with open(path, newline="") as stream:
        return timeless(csv.DictReader(stream))


def test_killed_20_times_and_resumed_the_table_is_the_same(tmp_path):
    path = write_file(tmp_path / "heads.npz", layers=4, heads=6)
    options = [path, "--eps", 0.1, "--eps", 0.5, "--method", "svd", "--workers", 1]
    started = time.monotonic()
    subprocess.run(command(*options, "--out", tmp_path / "whole.csv"), check=True, capture_output=True)
    lasts = time.monotonic() - started
    whole = read_table(tmp_path / "whole.csv")
    assert len(whole) == 48

    moments = random.Random(20)
    folders, kills, amid = [tmp_path / "rows0"], 0, 0
    while kills < 20:
        out = tmp_path / "resumed.csv"
        run = command(*options, "--resume", folders[-1], "--out", out)
        process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        # every other kill comes at any moment; the rest, at any moment after a new row, since starting takes longest
        rows = len(list(folders[-1].glob("*.json")))
        pause, awaited = moments.uniform(0.0, lasts if kills % 2 else 0.2), 0 if kills % 2 else rows + 1
        while process.poll() is None and len(list(folders[-1].glob("*.json"))) < awaited:
            time.sleep(0.001)
        try:
            process.wait(pause)
        except subprocess.TimeoutExpired:
            process.kill()
            kills += 1
        process.communicate(
            timeout=30
        )  # ends with the last process that holds the pipe: workers do not live on
        amid += 0 < len(list(folders[-1].glob("*.json"))) < len(whole)
        if out.exists():  # it was done before its time came
            assert read_table(out) == whole
            out.unlink()
            folders.append(tmp_path / f"rows{len(folders)}")
    run = command(*options, "--resume", folders[-1], "--out", tmp_path / "last.csv")
    subprocess.run(run, check=True, capture_output=True)
    assert read_table(tmp_path / "last.csv") == whole
    assert amid >= 2, "hardly any kill came while heads were being finished"


def test_ctrl_c_says_how_to_go_on(tmp_path):
    path = write_file(tmp_path / "heads.npz", layers=16, heads=32)
    folder = tmp_path / "rows"
    run = command(path, "--eps", 0.1, "--workers", 1, "--resume", folder)
    # started in the background, this process may ignore SIGINT, and a child would inherit that
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    signal.signal(signal.SIGINT, before)
    while len(list(folder.glob("*.json"))) < 2 and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to workers too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == ""
    assert err.startswith("rankcert: interrupted with ") and err.count("\n") == 1
    assert f" of 512 finished; the same command goes on from {folder}" in err
    kept = len(list(folder.glob("*.json")))
    assert 2 <= kept < 512 and f"with {kept} of" in err


def test_ctrl_c_does_not_cut_a_worker_short(file, request):
    def interrupt(done, total):
        for child in multiprocessing.active_children() if done else ():
            os.kill(child.pid, signal.SIGINT)

    apart = survey_heads(file, workers=1, progress=interrupt, **QUICK)
    request.getfixturevalue("near")
    assert timeless(apart.rows) == timeless(survey_heads(file, **QUICK).rows)


def test_a_cluster_of_two_of_which_one_is_killed(tmp_path):
    from distributed import Client, LocalCluster

    path = write_file(tmp_path / "heads.npz", layers=4)
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        with Client(cluster, set_as_default=False) as client:
            workers = client.run(os.getpid)
            lost = []

            def kill(done, total):
                busy = [worker for worker, tasks in client.processing().items() if tasks]
                if done >= 5 and busy and not lost:
                    lost.append(busy[0])
                    os.kill(workers[busy[0]], signal.SIGKILL)

            options = QUICK | {"resume": tmp_path / "rows"}
            far = survey_heads(path, scheduler=cluster.scheduler_address, progress=kill, **options)
            events = client.run_on_scheduler(
                lambda dask_scheduler: [event for _, event in dask_scheduler.get_events(lost[0])]
            )
            assert len(workers) == 2 and any(event["action"] == "remove-worker" for event in events)
    local = survey_heads(path, workers=2, **QUICK)
    assert timeless(far.rows) == timeless(local.rows) and len(far.rows) == 24
    assert found_on_disk(path, **options) == 24


# the command line


def test_the_command_prints_writes_and_draws(near, file, tmp_path, capsys, monkeypatch):
    from rankcert import cli

    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        try:
            status = cli.main(["heads", *map(str, arguments)])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    table, picture = tmp_path / "t.parquet", tmp_path / "t.png"
    arguments = [
        file,
        "--eps",
        0.5,
        "--temperature",
        0.5,
        "--temperature",
        2,
        "--every",
        2,
        "--method",
        "svd",
    ]
    status, out, err = run(*arguments, "--out", table, "--plot", picture, "--certificates", tmp_path / "c")
    assert status == 0
    assert out == "PROVED 6 of 6; certified rank / SVD rank T=0.5,eps=0.5:1.000 T=2,eps=0.5:1.000\n"
    assert "heads" in err and "summary" in err and "r_tau" in err
    assert table.exists() and picture.exists() and len(list((tmp_path / "c").iterdir())) == 6
    status, out, err = run(*arguments, "--json")
    printed = json.loads(out)
    assert status == 0 and len(printed["rows"]) == 6 and printed["settings"]["effort"] == "balanced"
    assert [row["temperature"] for row in printed["rows"]] == [0.5, 2.0] * 3

    status, out, err = run(*arguments, "--causal", "--offset", 1, "--scale", 0.1, "--json")
    head = read_heads([file])[0, 0]
    wanted = read_inputs(head.q, head.k, scale=0.1 / 0.5, causal=True, offset=1).digests["inputs_sha256"]
    assert status == 0 and json.loads(out)["rows"][0]["inputs_sha256"] == wanted

    status, out, err = run(file, "--eps", 1e-17, "--eps", 0.5, "--every", 3, "--method", "svd")
    assert status == 1 and out.startswith("PROVED 2 of 4; ") and "unproved" in err

    status, out, err = run("--example", "--eps", 0.5, "--method", "svd")
    assert status == 0 and out.startswith("PROVED 3 of 3; ")

    for wrong in (
        [file],
        [],
        ["--eps", 0.1],
        ["absent.npz", "--eps", 0.1],
        [file, "--eps", 0.1, "--example"],
        [file, "--eps", "x"],
        [file, "--eps", -1],
        [file, "--eps", 0.1, "--out", "t.txt"],
        [file, "--eps", 0.1, "--plot", "t.gif"],
        [file, "--eps", 0.1, "--workers", 0],
        [file, "--eps", 0.1, "--workers", 1, "--scheduler", "tcp://127.0.0.1:9"],
        [file, "--eps", 0.1, "--memory", "nan"],
        [file, "--eps", 0.1, "--resume", file],
    ):
        status, out, err = run(*wrong)
        assert status == 2 and out == "" and err, wrong
