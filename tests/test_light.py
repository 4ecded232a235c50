"""Importing is cheap, and what is optional is absent until asked for. Subprocesses prove it."""

import json
import statistics
import subprocess
import sys

import numpy as np
import pytest

import rankcert

HEAVY = ("numba", "llvmlite", "scipy", "mpmath", "torch", "matplotlib", "flint", "sklearn", "transformers")


def python(code: str) -> str:
    # -P: the package that is installed, not the source folder one happens to stand in
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def heavy_after(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter holds after running `code`."""
    out = python(
        f"{code}\nimport sys, json\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    return set(json.loads(out.splitlines()[-1]))


def test_import_takes_under_300_ms():
    timed = "import time; start = time.perf_counter(); import rankcert; print(time.perf_counter() - start)"
    assert statistics.median(float(python(timed)) for _ in range(5)) < 0.3


@pytest.mark.parametrize("part", ["", ".checker", ".heads", ".cli", ".certificates"])
def test_import_loads_nothing_heavy(part):
    assert heavy_after(f"import rankcert{part}") == set()


def test_import_of_the_package_loads_not_even_numpy():
    assert python("import sys, rankcert; print('numpy' in sys.modules)").strip() == "False"


def test_verify_and_audit_on_the_command_line_load_nothing_heavy(tmp_path):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(30, 2)), rng.normal(size=(40, 2))
    certificate = rankcert.certify(q, k, eps=0.1)
    certificate.save(tmp_path / "c.safetensors")
    np.savez(tmp_path / "head.npz", Q=q, K=k)
    np.savez(tmp_path / "factors.npz", left=certificate.left, right=certificate.right)
    for arguments in (
        ["verify", tmp_path / "c.safetensors", tmp_path / "head.npz"],
        ["verify", tmp_path / "c.safetensors", tmp_path / "head.npz", "--json", "--gemm", "portable"],
        ["audit", tmp_path / "head.npz", "--factors", tmp_path / "factors.npz", "--eps", "0.1"],
    ):
        run = f"""
from rankcert.cli import main
try:
    main({list(map(str, arguments))!r})
except SystemExit as end:
    assert end.code == 0, end.code
"""
        assert heavy_after(run) == set()
    assert "flint" in heavy_after(
        run.replace("'--eps'", "'--exact', '--eps'")
    )  # on request, and the test can see it


def test_constructions_load_numba_only_when_they_build():
    assert heavy_after("from rankcert import certify, METHODS") <= {"scipy"}
    assert "numba" in heavy_after(
        "import numpy, rankcert; rankcert.certify(numpy.eye(3), numpy.eye(4, 3), eps=0.1)"
    )


def test_mpmath_loads_only_when_a_polynomial_is_fitted():
    assert "mpmath" not in heavy_after(
        "from rankcert.approximants import minimax; minimax.find_degree(4.0, 0.1)"
    )
    assert "mpmath" in heavy_after("from rankcert.approximants import minimax; minimax.fit(4.0, 6)")


def test_public_names_resolve_and_are_documented():
    assert rankcert.__all__ == sorted(set(rankcert.__all__)) and len(rankcert.__all__) >= 15
    for name in rankcert.__all__:
        value = getattr(rankcert, name)
        assert name in dir(rankcert)
        if name == "METHODS":
            assert value and all(method.__doc__ for method in value.values())
            continue
        assert value.__module__.startswith("rankcert.")
        # a dataclass without a docstring gets its signature for one
        assert value.__doc__ and not value.__doc__.startswith(f"{name}("), f"{name} has no docstring"
        if isinstance(value, type):
            for member, attribute in vars(value).items():
                if not member.startswith("_") and (callable(attribute) or isinstance(attribute, property)):
                    assert (attribute.__doc__ or "").strip(), f"{name}.{member} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'certfy'"):
        _ = rankcert.certfy
