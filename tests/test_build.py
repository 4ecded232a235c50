"""How the compiled kernel is built: the fallbacks for other machines, the flags that are refused, what is shipped.

Needs a C compiler, setuptools and Cython, and says so rather than skip. Nothing is downloaded.
"""

import ast
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import flint
import numpy as np
import pytest
from compilers import find_compiler

import rankcert
from rankcert.checker.kernel import EPS_M

TREE = Path(__file__).parents[1]
CHECKER = TREE / "rankcert" / "checker"
KERNEL_SOURCES = [CHECKER / name for name in ("kernel.h", "kernel_lanes.h", "_kernel.pyx")]
REFUSED = re.compile(
    r"fast-?math|ofast|fp:fast|unsafe-math|associative-math|finite-math|reassoc", re.IGNORECASE
)

HARNESS = r"""
#include <stdio.h>
#include "kernel.h"

static double number(void) { double x; if (scanf("%la", &x) != 1) return -1e308; return x; }

int main(void)
{
    static double x[4096], y[4096], s[BLOCK], t[BLOCK], bias[BLOCK];
    const struct variant *found[8];
    int points = (int)number(), columns = (int)number();
    double scale = number(), hint = number();
    int64_t reach = columns;
    for (int i = 0; i < points; i++) x[i] = number();
    for (int i = 0; i < columns; i++) s[i] = number();
    for (int i = 0; i < columns; i++) t[i] = number();
    int count = find_variants(found);
    printf("%d\n", unsafe_arithmetic());
    for (int v = 0; v < count; v++) {
        double weight = 0.0, error = 0.0;
        found[v]->exponentials(x, y, points);
        found[v]->rows(s, t, columns, bias, &reach, &hint, scale, 1, &weight, &error);
        printf("%s %a %a", found[v]->name, weight, error);
        for (int i = 0; i < points; i++) printf(" %a", y[i]);
        printf("\n");
    }
    return 0;
}
"""


def build_flags() -> list[str]:
    """FLAGS of setup.py, as they are on this platform."""
    tree = ast.parse((TREE / "setup.py").read_text("utf-8"))
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    (value,) = [node.value for node in assignments if ast.unparse(node.targets[0]) == "FLAGS"]
    return eval(compile(ast.Expression(value), "setup.py", "eval"), {"sys": sys})


def compile_harness(folder: Path, *flags: str) -> subprocess.CompletedProcess:
    (folder / "harness.c").write_text(HARNESS)
    flags = (*build_flags(), *flags, f"-I{CHECKER}")
    command = [*find_compiler(), *flags, "harness.c", "-lm", "-o", "harness"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def run_harness(folder: Path, numbers) -> list[str]:
    """The lines printed for these numbers, after a first line that says the arithmetic is safe."""
    typed = "\n".join(float(x).hex() for x in numbers)
    done = subprocess.run([folder / "harness"], input=typed, capture_output=True, text=True, timeout=60)
    first, *lines = done.stdout.splitlines()
    assert first == "0"
    return lines


INSIDE = [0.0, -0.0, 1.0, -1.0, 0.5 * math.log(2), 1e-300, -1e-17, -707.999, -708.0, 700.0]
INSIDE += np.random.default_rng(0).uniform(-708, 700, 200).tolist()
OUTSIDE = {-708.001: 0.0, -745.2: 0.0, -1e300: 0.0, -math.inf: 0.0, 700.001: math.inf, math.inf: math.inf}
POINTS = [*INSIDE, *OUTSIDE, math.nan]
COLUMNS = np.random.default_rng(1).normal(size=(2, 1003)) * [[3.0], [1e-3]]
SCALE, HINT = 1.7, 11.0


@pytest.fixture(scope="module")
def variants(tmp_path_factory) -> dict[str, dict[str, list[float]]]:
    """{build: {variant: [weight, error, exponentials..]}} for the default build and both fallbacks."""
    numbers = [len(POINTS), COLUMNS.shape[1], SCALE, HINT, *POINTS, *COLUMNS.ravel()]
    found = {}
    for build in ("DEFAULT", "RANKCERT_NO_X86", "RANKCERT_PLAIN_C"):
        folder = tmp_path_factory.mktemp(build)
        done = compile_harness(folder, f"-D{build}")
        assert done.returncode == 0, done.stderr
        words = [line.split() for line in run_harness(folder, numbers)]
        found[build] = {name: [float.fromhex(word) for word in rest] for name, *rest in words}
    return found


def test_fallback_builds_offer_what_they_should(variants):
    assert list(variants["RANKCERT_PLAIN_C"]) == ["plain"]
    assert list(variants["RANKCERT_NO_X86"]) == ["plain", "vector128"]
    assert tuple(variants["DEFAULT"]) == rankcert.checker.kernel.VARIANTS


def test_every_build_computes_within_the_proofs(variants):
    """Exponentials within 1.25 eps_m of the truth (Theorem 1), row sums within Lemmas 4 and 7 of each other."""
    with flint.ctx.workprec(200):
        truth = [flint.arb(x).exp() for x in INSIDE]
        s, t = COLUMNS
        weights = [(flint.arb(SCALE) * float(x) - HINT).exp() for x in s]
        exact_sums = sum(weights), sum(abs(w - float(x)) for w, x in zip(weights, t, strict=True))
        depth = 128 + 4 + 1
        logits = SCALE * abs(s).max() + HINT
        sums_slack = EPS_M * (float(exact_sums[0]) * (depth + 2 * logits + 2) + abs(t).sum() * (depth + 2))
        for build, found in variants.items():
            for name, (weight, error, *values) in found.items():
                for x, y, exact in zip(INSIDE, values, truth, strict=False):
                    assert abs(y / exact - 1) <= flint.arb(1.25 * EPS_M), (build, name, x)
                assert values[len(INSIDE) : -1] == list(OUTSIDE.values()), (build, name)
                assert math.isnan(values[-1]) and len(values) == len(POINTS), (build, name)
                for computed, exact in zip((weight, error), exact_sums, strict=True):
                    assert abs(computed - exact) <= sums_slack < 1e-13 * exact, (build, name)


def test_no_platform_header_is_needed(tmp_path):
    for path in KERNEL_SOURCES:
        assert not re.search(r"intrin|arm_neon|altivec|cpuid\.h", path.read_text("utf-8")), path.name
    (tmp_path / "harness.c").write_text(HARNESS)
    for build, absent in (
        ("DEFAULT", r"$^"),
        ("RANKCERT_NO_X86", r"__builtin_cpu|__builtin_ia32|\btarget\s*\("),
        ("RANKCERT_PLAIN_C", r"__builtin_cpu|__builtin_ia32|\btarget\s*\(|vector_size"),
    ):
        command = [*find_compiler(), f"-D{build}", f"-I{CHECKER}", str(tmp_path / "harness.c")]
        source = subprocess.run(
            [*command, "-E", "-P"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        assert "exp_plain" in source and not re.search(absent, source), build
        headers = subprocess.run(
            [*command, "-M"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        names = [Path(word).name for word in headers.split()]
        assert "kernel_lanes.h" in names and not any("intrin" in name for name in names), build


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-ffinite-math-only"])
def test_fast_math_does_not_compile(tmp_path, flag):
    done = compile_harness(tmp_path, flag)
    assert done.returncode != 0 and "must not be compiled with fast-math" in done.stderr
    assert not (tmp_path / "harness").exists()


def test_reassociation_is_refused_or_noticed(tmp_path):
    """-fassociative-math deletes the +-1.5*2^52 of exp; where no #error stops it, the stored points must notice."""
    done = compile_harness(tmp_path, "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math")
    if done.returncode != 0:
        assert "must not be compiled with fast-math" in done.stderr
        return
    lines = (CHECKER / "exp_points.txt").read_text("ascii").splitlines()[1:]
    stored = np.array([[float.fromhex(word) for word in line.split()] for line in lines])
    points = np.r_[stored[:, 0], np.random.default_rng(2).uniform(-708, 700, 1000)]
    for line in run_harness(tmp_path, (points.size, 0, 1.0, 0.0, *points)):
        values = np.array([float.fromhex(word) for word in line.split()[3:]])
        right = (np.abs(values / np.exp(points) - 1) <= 4 * EPS_M).all()
        noticed = (np.abs(values[: len(stored)] - stored[:, 1]) > 2 * EPS_M * stored[:, 1]).any()
        assert right or noticed, line.split()[0]


# No flag and no decorator that would undo the proofs


# Untrusted loops without exponentials may have their sums reordered, and nothing more than that.
REORDERING = (
    "@njit(cache=True, nogil=True, fastmath=REORDERED)",
    "REORDERED = {'reassoc', 'nsz', 'contract', 'arcp'}",
)


@pytest.mark.parametrize(
    "name, text, refused",
    [
        ("kernels/x.py", "@njit(cache=True, nogil=True, fastmath=REORDERED)\ndef f(): pass", 0),
        ("kernels/x.py", "@njit(cache=True, nogil=True, fastmath=True)\ndef f(): pass", 1),
        ("kernels/x.py", "@njit(cache=True, nogil=True, fastmath=REORDERED)\ndef f(x): return np.exp(x)", 1),
        ("checker/x.py", "@njit(cache=True, nogil=True, fastmath=REORDERED)\ndef f(): pass", 1),
    ],
)
def test_only_kernels_without_exponentials_reorder(name, text, refused):
    assert len(refused_flags(Path(name), text)) == refused


def refused_flags(path: Path, text: str) -> list[str]:
    """Lines that ask for unsafe arithmetic. Comments of Python may speak of it; kernel.h's guard must."""
    if path.suffix == ".py":
        text = ast.unparse(ast.parse(text))
    lines = [line.strip() for line in text.splitlines() if REFUSED.search(line)]
    if path.name == "kernel.h":
        lines = [line for line in lines if not line.startswith('#error "')]
    if path.parent.name == "kernels" and not re.search(r"\bexp|\blog", text):
        lines = [line for line in lines if line not in REORDERING]
    return lines


GATED = [
    TREE / "setup.py",
    TREE / "pyproject.toml",
    *sorted((TREE / "rankcert").rglob("*.py")),
    *KERNEL_SOURCES,
]


@pytest.mark.parametrize("path", GATED, ids=lambda path: str(path.relative_to(TREE)))
def test_no_source_asks_for_unsafe_arithmetic(path):
    text = path.read_text("utf-8")
    assert refused_flags(path, text) == []
    planted = '\nFLAGS = ["-O3", "-ffast-math"]\n' if path.suffix == ".py" else "\n-Ofast\n"
    assert len(refused_flags(path, text + planted)) == 1


def test_the_gate_knows_the_decorator_and_the_guard():
    assert refused_flags(Path("x.py"), "@njit(fastmath=True)\ndef f(): pass  # fast-math") == [
        "@njit(fastmath=True)"
    ]
    guard = (CHECKER / "kernel.h").read_text("utf-8")
    assert "#if defined(__FAST_MATH__)" in guard and REFUSED.search(guard)
    assert "-ffp-contract=fast" in build_flags() or sys.platform == "win32"


# What is shipped


def copy_tree(target: Path) -> Path:
    """What a release is made of, without anything an earlier build left behind."""
    target.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        if (TREE / name).exists():
            shutil.copy(TREE / name, target)
    leftovers = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "*.c", "*.egg-info")
    shutil.copytree(TREE / "rankcert", target / "rankcert", ignore=leftovers)
    return target


def backend(folder: Path, call: str, **environment: str) -> subprocess.CompletedProcess:
    """One call of the build backend in a folder, offline: what pip does with --no-build-isolation."""
    code = f"import Cython\nfrom setuptools import build_meta\nbuild_meta.{call}"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> tuple[set[str], set[str], Path]:
    """(names in the source archive, names in the wheel built from that archive, the wheel)."""
    base = tmp_path_factory.mktemp("shipped")
    done = backend(copy_tree(base / "tree"), f"build_sdist({str(base)!r})")
    assert done.returncode == 0, done.stderr
    (archive,) = base.glob("rankcert-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(base / "unpacked", filter="data")
        in_archive = {name.partition("/")[2] for name in file.getnames()}
    (folder,) = (base / "unpacked").iterdir()
    done = backend(folder, f"build_wheel({str(base)!r})")
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = base.glob("rankcert-*.whl")
    return in_archive, set(zipfile.ZipFile(wheel).namelist()), wheel


def test_archive_and_wheel_hold_every_source_file(shipped):
    in_archive, in_wheel, _ = shipped
    built = {".so", ".pyd", ".c", ".pyc", ".nbi", ".nbc"}
    package = [path for path in (TREE / "rankcert").rglob("*") if path.is_file() and path.suffix not in built]
    wanted = {path.relative_to(TREE).as_posix() for path in package}
    kernel = ("kernel.h", "kernel_lanes.h", "_kernel.pyx", "exp_points.txt", "PROOFS.md", "FORMAT.md")
    assert {f"rankcert/checker/{name}" for name in kernel} <= wanted
    assert {f"rankcert/{name}" for name in ("py.typed", "data/README.md", "data/diffuse.npz")} <= wanted
    assert wanted <= in_archive, wanted - in_archive
    assert wanted <= in_wheel, wanted - in_wheel
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= in_archive


def test_archive_and_wheel_hold_nothing_else(shipped):
    in_archive, in_wheel, _ = shipped
    for name in in_archive | in_wheel:
        assert not re.search(r"__pycache__|\.pyc$|\.nb[ic]$|\.ci/|/bench", name), name
    kernels = [name for name in in_wheel if re.fullmatch(r"rankcert/checker/_kernel\..*(so|pyd)", name)]
    assert len(kernels) == 1
    others = {name for name in in_wheel if not name.startswith(("rankcert/", "rankcert-"))}
    assert others == set()


def test_the_wheel_works_where_it_is_unpacked(shipped, tmp_path):
    _, _, wheel = shipped
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
        metadata = next(name for name in file.namelist() if name.endswith("/entry_points.txt"))
        assert "rankcert = rankcert.cli:main" in file.read(metadata).decode()
    code = """
import rankcert, rankcert.checker
print(rankcert.__file__)
print(rankcert.checker.kernel._kernel.__file__)
head = rankcert.example_head("causal")
certificate = rankcert.certify(head.q, head.k, eps=0.5, **head.options())
print(rankcert.verify(certificate.to_bytes(), head.q, head.k, **head.options()).status)
"""
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path / "site"),
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    package, kernel, status = done.stdout.splitlines()
    assert package.startswith(str(tmp_path)) and kernel.startswith(str(tmp_path)) and status == "PROVED"


@pytest.mark.skipif(sys.platform == "win32", reason="CFLAGS is not read by MSVC builds")
def test_fast_math_in_the_environment_stops_the_build(tmp_path):
    done = backend(copy_tree(tmp_path / "tree"), f"build_wheel({str(tmp_path)!r})", CFLAGS="-O2 -ffast-math")
    assert done.returncode != 0 and "must not be compiled with fast-math" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))
