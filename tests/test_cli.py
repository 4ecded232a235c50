"""The command line as a user meets it: what is printed where, what is written, and the exit status.

Most runs are in this process; a few are true processes, because a console script, a closed stdout and a terminal on
stderr cannot be imitated.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import typer
from hypothesis import given
from hypothesis import strategies as st

import rankcert
from rankcert import cli

COMMANDS = ("certify", "verify", "audit", "bracket", "dimension", "heads", "laws")


class Run:
    """One finished command: `status`, `out`, `err`, and `json` (what --json printed)."""

    def __init__(self, status: int, out: str, err: str):
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> dict:
        assert self.out.count("\n") == 1, f"stdout must hold one JSON object on one line, got {self.out!r}"
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))

    @property
    def line(self) -> str:
        assert self.out.count("\n") == 1 and self.out.endswith("\n"), (
            f"stdout must be one line, got {self.out!r}"
        )
        return self.out[:-1]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """run(*arguments) in a fresh working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments) -> Run:
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = 0 if end.code is None else end.code
        return Run(status, *capsys.readouterr())

    return command


@pytest.fixture
def head(tmp_path) -> Path:
    """A file with a head of 40 queries and 50 keys in two dimensions."""
    rng = np.random.default_rng(0)
    path = tmp_path / "head.npz"
    np.savez(path, Q=rng.normal(size=(40, 2)), K=rng.normal(size=(50, 2)))
    return path


@pytest.fixture
def made(run, head, tmp_path) -> Path:
    """A certificate of that head at eps = 0.1."""
    path = tmp_path / "made.safetensors"
    assert run("certify", head, "--eps", "0.1", "--out", path).status == 0
    return path


# certify


@pytest.mark.parametrize("name", ["diffuse", "peaked", "causal"])
def test_certify_example_is_saved_and_proved_again(run, name):
    done = run("certify", "--example", "--example-name", name)
    assert done.status == 0
    file = Path(f"rankcert-example-{name}.safetensors")
    notion = "causal rank" if name == "causal" else "rank"
    found = re.fullmatch(
        rf"PROVED {notion} (\d+) bound (\S+) by (\w+), saved to {file} and proved again from the file",
        done.line,
    )
    assert found and 0 < int(found[1]) < 256 and float(found[2]) <= 0.1
    assert found[3] in rankcert.METHODS
    assert "constructions" in done.err and "verdict" in done.err and "skipped" in done.err
    example = rankcert.example_head(name)
    verdict = rankcert.verify(file, example.q, example.k, eps=0.1, **example.options())
    assert verdict.status == "PROVED" and verdict.rank == int(found[1]) and verdict.bound <= float(found[2])
    assert run("verify", file, "--example", "--example-name", name).status == 0


def test_certify_prints_and_writes_nothing_else(run, head, tmp_path):
    before = set(tmp_path.iterdir())
    done = run("certify", head, "--eps", "0.1")
    assert done.status == 0 and re.fullmatch(r"PROVED rank \d+ bound \S+ by \w+", done.line)
    assert set(tmp_path.iterdir()) == before


def test_certify_json(run, head):
    done = run("certify", head, "--eps", "0.1", "--out", "a.safetensors", "--json").json
    assert done["status"] == "PROVED" and done["eps"] == 0.1 and done["file"] == "a.safetensors"
    assert done["bound"] <= 0.1 and done["method"] in rankcert.METHODS and isinstance(done["details"], dict)
    assert {c["method"] for c in done["candidates"]} == set(rankcert.METHODS)
    for candidate in done["candidates"]:
        assert set(candidate) == {"method", "status", "rank", "bound", "seconds", "note", "check_seconds"}
    assert rankcert.load("a.safetensors").rank == done["rank"]


def test_certify_one_method(run, head):
    done = run("certify", head, "--eps", "0.1", "--method", "exact", "--json").json
    assert done["method"] == "exact" and done["rank"] == 40 and len(done["candidates"]) == 1
    assert run("certify", head, "--eps", "0.1", "--method", "magic").status == 2


def test_a_refused_certificate_leaves_the_existing_file_alone(run, head, made):
    before = made.read_bytes()
    done = run("certify", head, "--eps", "1e-18", "--out", made)
    assert done.status == 1 and done.out == ""
    assert "rankcert: no factorization could be proved within eps = 1e-18" in done.err
    assert made.read_bytes() == before
    done = run("certify", head, "--eps", "1e-18", "--out", made, "--json")
    assert done.status == 1 and done.json["error"] == "cannot-certify" and "1e-18" in done.json["message"]
    assert made.read_bytes() == before and not list(made.parent.glob("*.tmp"))
    assert run("verify", made, head).status == 0


def test_certify_never_writes_over_the_head(run, head, tmp_path):
    arrays = dict(np.load(head))
    path = tmp_path / "head.safetensors"
    safetensors.numpy.save_file(arrays, path)
    before = path.read_bytes()
    done = run("certify", path, "--eps", "0.1", "--out", tmp_path / "." / "head.safetensors")
    assert done.status == 2 and "overwrite" in done.err and path.read_bytes() == before


def test_certify_where_nothing_can_be_written(run, head, tmp_path):
    for out in (tmp_path / "absent" / "a.safetensors", tmp_path):
        done = run("certify", head, "--eps", "0.5", "--out", out)
        assert done.status == 2 and done.out == "" and f"cannot write {out}" in done.err
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("gib", ["nan", "inf", "-1", "0"])
def test_certify_memory_must_be_a_size(run, head, gib):
    done = run("certify", head, "--eps", "0.1", "--memory", gib)
    assert done.status == 2 and "--memory" in done.err


# verify


def test_verify_json(run, head, made):
    done = run("verify", made, head, "--json")
    verdict, arrays = done.json, np.load(head)
    same = rankcert.verify(made, arrays["Q"], arrays["K"]).to_dict()
    assert done.status == 0 and verdict == same
    assert verdict["status"] == "PROVED" and verdict["bound"] <= verdict["eps"] == 0.1
    assert (verdict["n"], verdict["m"], verdict["d"]) == (40, 50, 2)
    assert verdict["causal"] is False and verdict["offset"] == 0 and verdict["notion"] == "rank"
    assert all(re.fullmatch("[0-9a-f]{64}", verdict[name]) for name in verdict if name.endswith("sha256"))
    assert set(verdict) >= {
        "bound_lower",
        "reason",
        "worst_row",
        "breakdown",
        "rank",
        "scale",
        "engine",
        "exact_rows",
    }


def test_verify_line_and_table(run, head, made):
    done = run("verify", made, head)
    digest = run("verify", made, head, "--json").json["inputs_sha256"]
    assert done.status == 0 and re.fullmatch(r"PROVED rank \d+ bound \S+", done.line)
    for shown in ("n = 40, m = 50, d = 2", "not causal", digest, "eps", "0.1", "factor error", "head.npz"):
        assert shown in done.err


@pytest.mark.parametrize(
    "options",
    [["--gemm", "portable"], ["--exact"], ["--exact-rows", "3"], ["--threads", "2"], ["--eps", "0.1"]],
)
def test_verify_options(run, head, made, options):
    done = run("verify", made, head, "--json", *options)
    assert done.status == 0 and done.json["status"] == "PROVED"
    engine, rows = done.json["engine"], done.json["exact_rows"]
    assert ("own loops" in engine) == (options[0] == "--gemm")
    assert ("ball arithmetic" in engine) == options[0].startswith("--exact")
    assert rows == 40 if options[0] == "--exact" else rows >= 3 if options[0] == "--exact-rows" else rows == 0


def test_verify_other_inputs(run, head, made, tmp_path):
    arrays = dict(np.load(head))
    other = tmp_path / "other.npz"
    np.savez(other, Q=arrays["Q"], K=np.nextafter(arrays["K"], 1.0))
    np.save(tmp_path / "bias.npy", np.full(50, 1e-300))
    for changed, what in (
        ([other], "key_sha256"),
        ([head, "--scale", "0.7"], "scale"),
        ([head, "--causal"], "causal"),
        ([head, "--key-bias", tmp_path / "bias.npy"], "key_bias_sha256"),
        ([head, "--eps", "0.2"], "eps"),
        (["--example"], "shape"),
    ):
        done = run("verify", made, *changed)
        assert done.status == 1 and done.line.startswith(f"UNDECIDED other inputs: {what}"), done.out
        assert run("verify", made, *changed, "--json").json["bound"] is None


# audit


@pytest.fixture
def factors(tmp_path, head, run) -> Path:
    arrays = np.load(head)
    certificate = rankcert.certify(arrays["Q"], arrays["K"], eps=1e-9)
    path = tmp_path / "factors.npz"
    np.savez(path, left=certificate.left, right=certificate.right)
    return path


def test_audit_factors_from_one_file(run, head, factors, tmp_path):
    done = run("audit", head, "--factors", factors)
    assert done.status == 0 and re.fullmatch(r"MEASURED rank \d+ bound \d\S+e-1\d", done.line)
    same = tmp_path / "factors.safetensors"
    safetensors.numpy.save_file(dict(np.load(factors)), same)
    assert run("audit", head, "--factors", same).out == done.out
    assert run("audit", head, "--factors", factors, "--eps", "1e-9").line.startswith("PROVED rank")


def test_audit_factors_from_two_files(run, head, factors):
    for name, array in np.load(factors).items():
        np.save(f"{name}.npy", array)
    done = run("audit", head, "--left", "left.npy", "--right", "right.npy", "--json")
    assert done.status == 0 and done.json["status"] == "MEASURED" and done.json["eps"] is None
    assert done.out == run("audit", head, "--factors", factors, "--json").out


def test_audit_wrong_factors_are_refuted(run, head, factors):
    arrays = dict(np.load(factors))
    np.savez(factors, left=1.5 * arrays["left"], right=arrays["right"])
    done = run("audit", head, "--factors", factors, "--eps", "0.4")
    assert done.status == 1 and re.fullmatch(
        r"REFUTED row \d+ is certainly off by more than eps = 0.4", done.line
    )
    done = run("audit", head, "--factors", factors)
    assert done.status == 0 and done.line.startswith("MEASURED rank") and done.line.endswith("bound 0.500001")


def test_audit_undecided(run, head, factors):
    arrays = dict(np.load(factors))
    arrays["left"][3, 0] = np.nan
    np.savez(factors, **arrays)
    done = run("audit", head, "--factors", factors, "--eps", "0.4")
    assert done.status == 1 and done.line.startswith("UNDECIDED left[3, 0] is nan")
    assert "left[3, 0] is nan" in done.err
    assert run("audit", head, "--factors", factors, "--json").json["bound"] is None


# dimension


def test_dimension_line_table_and_json(run, head):
    done = run("dimension", head)
    assert done.status == 0 and re.fullmatch(r"0:2 0\.01:2 0\.1:2 0\.5:[012]", done.line)
    assert "d = 2" in done.err and "proved bound" in done.err
    done = run("dimension", head, "--tol", "0.25", "--tol", "0", "--tol", "2.5", "--json")
    assert done.status == 0 and done.json["d"] == 2
    rows = done.json["dimensions"]
    assert [row["tol"] for row in rows] == [0.25, 0.0, 2.5]  # in the order asked
    assert [row["dimension"] for row in rows][1:] == [2, 0]
    assert all(row["bound"] <= max(row["tol"], 1e-12) for row in rows)


def test_dimension_refusals(run, head):
    assert run("dimension", head, "--tol", "-1").status == 2
    assert run("dimension", head, "--tol", "nan").status == 2
    done = run("dimension", head, "--tol", "1e-30", "--json")
    assert done.status == 1 and done.json["error"] == "cannot-certify"


# heads in files


@pytest.fixture
def many(tmp_path) -> tuple[Path, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(3, 4, 20, 2)), rng.normal(size=(3, 4, 25, 2))
    np.savez(tmp_path / "many.npz", q=q, k=k)
    return tmp_path / "many.npz", q, k


def test_layer_and_head_of_a_file_of_many(run, many):
    path, q, k = many
    chosen = run(
        "certify", path, "--layer", "2", "--head", "1", "--eps", "0.3", "--out", "c.safetensors", "--json"
    )
    assert chosen.status == 0
    assert (
        rankcert.verify("c.safetensors", q[2, 1], k[2, 1]).digests["inputs_sha256"]
        == chosen.json["inputs_sha256"]
    )
    assert run("verify", "c.safetensors", path, "--layer", "2", "--head", "1").status == 0
    assert run("verify", "c.safetensors", path, "--layer", "1", "--head", "2").status == 1
    for options, said in (
        ([], "choose one with layer (0 to 2)"),
        (["--layer", "0"], "choose one with head (0 to 3)"),
        (["--layer", "3", "--head", "0"], "layer 0 to 2, got 3"),
        (["--layer", "0", "--head", "-1"], "head 0 to 3, got -1"),
    ):
        done = run("dimension", path, *options)
        assert done.status == 2 and said in done.err and done.out == ""


def test_two_npy_files(run, head, made, tmp_path):
    for name, array in np.load(head).items():
        np.save(f"{name}.npy", array)
    assert run("verify", made, "Q.npy", "K.npy").status == 0
    assert run("verify", made, "K.npy", "Q.npy").status == 1  # the other way round is another head
    assert run("verify", made, "Q.npy").status == 2


def test_scale_mask_and_bias_from_the_file_or_from_options(run, tmp_path):
    rng = np.random.default_rng(2)
    q, k, bias = rng.normal(size=(30, 2)), rng.normal(size=(30, 2)), rng.normal(size=30)
    np.savez("plain.npz", Q=q, K=k)
    np.savez("full.npz", Q=q, K=k, scale=0.3, causal=True, offset=4, key_bias=bias)
    np.save("bias.npy", bias)
    asked = ["--scale", "0.3", "--causal", "--offset", "4", "--key-bias", "bias.npy"]
    assert run("certify", "full.npz", "--eps", "0.1", "--out", "c.safetensors").status == 0
    saved = rankcert.load("c.safetensors")
    assert (saved.scale, saved.causal, saved.offset) == (0.3, True, 4)
    assert run("verify", "c.safetensors", "plain.npz", *asked).status == 0
    for left_out in range(0, 2):
        assert run("verify", "c.safetensors", "plain.npz", *asked[: 2 * left_out]).status == 1
    for changed in (["--scale", "0.4"], ["--offset", "5"], ["--no-causal"]):  # an option beats the file
        done = run("verify", "c.safetensors", "full.npz", *changed)
        assert done.status == 1 and "other inputs" in done.out
    done = run("certify", "full.npz", "--eps", "0.5", "--no-causal", "--json")
    assert done.status == 0 and done.json["causal"] is False and done.json["offset"] == 0
    assert run("certify", "plain.npz", "--eps", "0.5", "--offset", "1").status == 2  # of no causal mask


# exit statuses 2 and 3


def test_usage_is_2(run, head, factors):
    for arguments in (
        [],
        ["certify"],
        ["certify", head],  # no eps
        ["certify", head, "--example", "--eps", "0.1"],
        ["certify", head, "--eps", "much"],
        ["certify", head, "--eps", "0"],
        ["certify", head, "--eps", "nan"],
        ["certify", "--example", "--example-name", "imaginary"],
        ["certify", head, "--eps", "0.1", "--threads", "0"],
        ["verify"],
        ["audit", head],
        ["audit", head, "--left", "left.npy"],
        ["audit", head, "--factors", factors, "--left", "left.npy", "--right", "right.npy"],
        ["audit", head, "--factors", head],
        ["audit", head, "--factors", factors, "--gemm", "magic"],
        ["audit", head, "--factors", factors, "--exact-rows", "-1"],
        ["dimension", "head.txt"],
        ["dimension", head, "--no-such-option"],
        ["no-such-command"],
    ):
        done = run(*arguments)
        assert done.status == 2, (arguments, done.err)
        assert "Traceback" not in done.err and (done.err or not arguments)
        assert done.out == "" or not arguments  # without arguments the help is the answer


def test_invalid_arrays_are_2(run, tmp_path):
    good = np.ones((3, 2))
    for index, (arrays, said) in enumerate(
        [
            ({"Q": good, "K": np.full((4, 2), np.nan)}, "key 0 is not finite"),
            ({"Q": good, "K": np.ones((4, 3))}, "same width"),
            ({"Q": good, "K": np.ones((0, 2))}, "at least one key"),
            ({"Q": good, "K": good.astype(complex)}, "complex128"),
            ({"Q": np.ones((1, 1, 1, 3, 2)), "K": good}, "got (1, 1, 1, 3, 2)"),
            ({"Q": good}, "one array named K or k"),
            ({"Q": good, "K": good, "scale": "large"}, "scale"),
            ({"Q": good, "K": good, "key_bias": np.full(3, -np.inf)}, "keeps no key"),
        ]
    ):
        path = tmp_path / f"{index}.npz"
        np.savez(path, **arrays)
        done = run("dimension", path)
        assert done.status == 2 and said in done.err and done.out == "", (arrays, done.err)
        done = run("dimension", path, "--json")
        assert done.status == 2 and done.json["error"] == "invalid-input" and said in done.json["message"]


def test_unreadable_files_are_2(run, head, made, tmp_path):
    Path("text.npy").write_text("no array")
    Path("text.npz").write_text("no archive")
    Path("text.safetensors").write_text("no tensors")
    Path("zip.npy").write_bytes(b"PK\x03\x04 and then nothing")
    Path("objects.npy").write_bytes(b"")
    np.save("objects.npy", np.array([{}], dtype=object))
    Path("empty.npy").write_bytes(b"")
    np.savez("archive.npz", a=np.ones(50))
    Path("archive.npz").rename("archive.npy")
    for arguments in (
        ["verify", "absent.safetensors", head],
        ["verify", tmp_path, head],
        ["verify", made, "absent.npz"],
        ["verify", made, "text.npz"],
        ["verify", made, "text.safetensors"],
        *(
            [command, head, *options, name]
            for name in ("absent.npy", "text.npy", "zip.npy", "objects.npy", "empty.npy", "archive.npy")
            for command, *options in (["dimension", "--key-bias"], ["audit", "--left", "text.npy", "--right"])
        ),
    ):
        done = run(*arguments)
        assert done.status == 2 and done.err.startswith("rankcert: ") and done.err.count("\n") == 1, arguments
        assert done.out == ""


def test_malformed_certificates_are_3(run, head, made):
    data = made.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for reason, broken in (
        ("truncated", data[:-1]),
        ("truncated", b""),
        ("trailing-bytes", data + b"\0"),
        ("json", data[:8] + b"?" + data[9:]),
        ("header-too-large", (2**40).to_bytes(8, "little") + data[8:]),
        ("format-version", data.replace(b'\\"format_version\\": 1', b'\\"format_version\\": 9')),
        ("tensors", data[: 8 + size].replace(b'"left"', b'"lest"') + data[8 + size :]),
    ):
        made.write_bytes(broken)
        done = run("verify", made, head)
        assert done.status == 3 and done.out == "", (reason, done.err)
        assert done.err.startswith(f"rankcert: malformed certificate: {reason}: ")
        done = run("verify", made, head, "--json")
        assert done.status == 3 and done.json["error"] == reason


def test_a_changed_factor_is_refuted_not_malformed(run, head, made):
    claim = rankcert.load(made)
    data = bytearray(made.read_bytes())
    where = bytes(data).index(claim.left.tobytes())
    data[where : where + 8] = np.float64(claim.left[0, 0] + 1.0).tobytes()
    made.write_bytes(data)
    done = run("verify", made, head)
    assert done.status == 1 and done.line.startswith("REFUTED row 0 is certainly off by more than eps = 0.1")


# what is printed


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_printed_bounds_are_rounded_up(value):
    printed = Decimal(cli._up(value))
    assert Decimal(value) <= printed <= Decimal(value) * (1 + Decimal("1e-5"))


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_printed_bounds_without_digits(value):
    assert cli._up(value) == f"{value:g}"


def test_paths_are_text_and_no_markup(run, head, tmp_path):
    odd = tmp_path / "odd[/bold]:smile:[/red].npz"
    odd.parent.mkdir(parents=True)
    head.rename(odd)
    done = run("dimension", odd)
    assert done.status == 0 and "odd[/bold]:smile:[/red].npz" in done.err.replace("\n", "")


def test_help_of_every_command(run):
    overview = run("--help")
    group = typer.main.get_command(cli.app)
    assert overview.status == 0 and set(group.commands) == set(COMMANDS)
    assert "Exit status: 0 proved or measured" in overview.out
    for name in COMMANDS:
        assert f" {name} " in overview.out
        done = run(name, "--help")
        assert done.status == 0 and done.err == ""
        text = " ".join(done.out.replace("│", " ").split())
        for parameter in group.commands[name].params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                assert option in text, (name, option)
            if parameter.name != "help":
                assert parameter.help, f"{name}: {parameter.name} has no help"
                assert " ".join(parameter.help.split()) in text, (name, parameter.name)


def test_help_names_every_method_and_example(run):
    text = " ".join(run("certify", "--help").out.replace("│", " ").split())
    assert f"auto, or one construction: {', '.join(rankcert.METHODS)}" in text
    assert f"which of the shipped heads: {', '.join(cli.EXAMPLES)}" in text


# true processes


def script(*arguments, **options) -> subprocess.CompletedProcess:
    program = Path(sysconfig.get_path("scripts")) / (
        "rankcert.exe" if sys.platform == "win32" else "rankcert"
    )
    return subprocess.run([program, *map(str, arguments)], text=True, timeout=120, **options)


def test_script_certifies_and_verifies(head, tmp_path):
    done = script("certify", head, "--eps", "0.1", "--out", tmp_path / "c.safetensors", capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith("PROVED rank ") and done.stdout.count("\n") == 1
    done = script("verify", tmp_path / "c.safetensors", head, "--json", capture_output=True)
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "PROVED"


def test_script_and_module_return_the_status_of_a_refusal(head, tmp_path):
    (tmp_path / "broken").write_bytes(b"broken")
    done = script("verify", tmp_path / "broken", head, capture_output=True)
    assert done.returncode == 3 and done.stdout == "" and done.stderr.count("\n") == 1
    module = [sys.executable, "-P", "-m", "rankcert.cli", "verify", tmp_path / "absent", head]
    done = subprocess.run(module, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("rankcert: cannot read")


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a Unix matter")
def test_script_shows_progress_on_a_terminal_only(head):
    import pty

    reader, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    shown = bytearray()

    def read():  # beside the command: a terminal holds only so much before it makes the writer wait
        try:
            while chunk := os.read(reader, 65536):
                shown.extend(chunk)
        except OSError:  # Linux says so when the other end is closed
            pass

    listener = threading.Thread(target=read)
    listener.start()
    done = script("certify", head, "--eps", "0.1", stdout=subprocess.PIPE, stderr=terminal, env=environment)
    os.close(terminal)
    listener.join()
    os.close(reader)
    assert done.returncode == 0 and re.fullmatch(r"PROVED rank \d+ bound \S+ by \w+\n", done.stdout)
    assert b"checking" in shown and b"\x1b[" in shown
    piped = script("certify", head, "--eps", "0.1", capture_output=True)
    assert piped.stdout == done.stdout and "\x1b" not in piped.stderr and "checking" not in piped.stderr


def test_laws_on_a_small_family(run, tmp_path):
    points, out, plot = tmp_path / "points.json", tmp_path / "laws.json", tmp_path / "laws.svg"
    arguments = ["--family", "sphere-2", "--n", "64", "--beta", "1", "--beta", "4", "--resume", points]
    first = run("laws", *arguments, "--out", out, "--plot", plot)
    assert first.status == 0 and first.out == "sphere-2:-\n"  # fewer than four points: nothing is claimed
    assert "<svg" in plot.read_text("utf-8")
    again = run("laws", *arguments, "--json")
    assert again.json == json.loads(out.read_text("utf-8"))
    assert [p["rank"] for p in again.json["points"]] == sorted(p["rank"] for p in again.json["points"])
    assert run("laws", "--family", "torus").status == 2
