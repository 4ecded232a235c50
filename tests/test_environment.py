"""Arithmetic that the proofs do not cover is refused, whoever switched it on, and every kernel variant agrees.

Libraries do change the control register of a process (a shared object linked with -ffast-math is enough), so a small
library made here does it for real, in subprocesses.
"""

import ctypes
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compilers import find_compiler

import rankcert
from rankcert.checker import kernel

HOSTILE = r"""
#include <fenv.h>
#include <stdint.h>
int round_up(void) { return fesetround(FE_UPWARD); }
int round_down(void) { return fesetround(FE_DOWNWARD); }
int round_to_zero(void) { return fesetround(FE_TOWARDZERO); }
#if defined(__x86_64__)
static int set(unsigned bits) { __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | bits); return 0; }
int flush_to_zero(void) { return set(1u << 15); }
int denormals_are_zero(void) { return set(1u << 6); }
#elif defined(__aarch64__)
static int set(uint64_t bits)
{
    uint64_t fpcr;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(fpcr));
    __asm__ __volatile__("msr fpcr, %0" : : "r"(fpcr | bits));
    return 0;
}
int flush_to_zero(void) { return set((uint64_t)1 << 24); }
int denormals_are_zero(void) { return set((uint64_t)1 << 24); } /* one bit does both here */
#else
#error "no way to flush subnormals is known for this processor: add it here"
#endif
"""
ROUNDING = ("round_up", "round_down", "round_to_zero")
FLUSHING = ("flush_to_zero", "denormals_are_zero")

# Every question one can ask, each of which must be refused; the answers are collected before the switch is thrown.
ASK = """
import ctypes, json, sys
import numpy as np
import rankcert
library, switch, when, folder = sys.argv[1:]
hostile = getattr(ctypes.CDLL(library), switch)
if when == "before":
    assert hostile() == 0
from rankcert.checker import Engine, check_rows, logit_residual, read_inputs
from rankcert.cli import main

data = np.load(f"{folder}/data.npz")
q, k, left, right = (data[name] for name in ("Q", "K", "left", "right"))
file = f"{folder}/c.safetensors"
inputs = read_inputs(q, k) if when == "after" else None

def command(*arguments):
    try:
        return main(list(arguments))
    except SystemExit as end:
        return end.code

if when == "after":
    certificate = rankcert.load(file)
    assert rankcert.verify(certificate, q, k).status == "PROVED"
    assert hostile() == 0
answers = {}
for name, ask in {
    "verify": lambda: rankcert.verify(file, q, k),
    "verify exact": lambda: rankcert.verify(file, q, k, exact=True),
    "verify portable": lambda: rankcert.verify(file, q, k, gemm="portable"),
    "audit": lambda: rankcert.audit(q, k, left, right),
    "certify": lambda: rankcert.certify(q, k, eps=0.1),
    "certify at eps 1": lambda: rankcert.certify(q, k, eps=1.0),
    "dimension": lambda: rankcert.interaction_dimension(q, k),
    "check_rows": lambda: check_rows(inputs, left, right, eps=0.1),
    "logit_residual": lambda: logit_residual(inputs, q, k),
}.items():
    if inputs is None and name in ("check_rows", "logit_residual"):
        continue
    try:
        answers[name] = f"answered {ask()!r:.60}"
    except rankcert.UnsafeArithmetic as error:
        answers[name] = f"UnsafeArithmetic: {error}"
    except Exception as error:
        answers[name] = f"{type(error).__name__}: {error}"
answers["command verify"] = command("verify", file, f"{folder}/data.npz")
answers["command audit"] = command("audit", f"{folder}/data.npz", "--factors", f"{folder}/data.npz")
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    """A shared library that throws the switches named above."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile.c").write_text(HOSTILE)
    command = [*find_compiler(), "-O1", "-shared", "-fPIC", "hostile.c", "-o", "hostile.so", "-lm"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return str(folder / "hostile.so")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A certificate, its head, and factors."""
    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 40, 3))
    certificate = rankcert.certify(q, k, eps=0.1)
    certificate.save(folder / "c.safetensors")
    np.savez(folder / "data.npz", Q=q, K=k, left=certificate.left, right=certificate.right)
    return folder


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    # -P: the package that is installed, not the source folder one happens to stand in
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("when", ["before", "after"])  # the checker is imported
@pytest.mark.parametrize("switch", [*ROUNDING, *FLUSHING])
def test_unsafe_arithmetic_is_refused(library, folder, switch, when):
    done = python(ASK, library, switch, when, folder)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers.pop("command verify") == answers.pop("command audit") == 1
    assert len(answers) == (9 if when == "after" else 7)
    said = "does not round to nearest" if switch in ROUNDING else "flushes subnormals to zero"
    for name, answer in answers.items():
        assert answer.startswith("UnsafeArithmetic: ") and said in answer, (name, answer)
    assert done.stderr.count("rankcert: this thread's floating-point arithmetic") == 2


def test_a_denormal_float32_is_not_read_as_zero(library):
    """Reading is guarded as well: with denormals-are-zero a float32 of 1e-40 would become 0 on conversion."""
    code = """
import ctypes, sys
import numpy as np
import rankcert
from rankcert.checker import read_inputs
tiny = np.full((2, 2), 1e-40, dtype=np.float32)
assert read_inputs(tiny, tiny).query.all()
ctypes.CDLL(sys.argv[1]).denormals_are_zero()
if __import__("platform").machine() in ("x86_64", "AMD64"):
    assert not tiny.astype(np.float64).any(), "the switch did nothing"
try:
    read_inputs(tiny, tiny)
except rankcert.UnsafeArithmetic:
    print("refused")
"""
    done = python(code, library)
    assert done.stdout == "refused\n", done.stderr


THREADS = """
import ctypes, sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import numpy as np
import rankcert
from rankcert.checker import engine, kernel
library, switch, how = sys.argv[1:]
hostile = getattr(ctypes.CDLL(library), switch)
n, r = 512, 64
q = k = np.full((n, 32), 1e-3)  # equal keys: uniform rows, and no zero column to leave out
left, right = np.full((n, r), 1 / n / r), np.ones((n, r))
assert n * n * (32 + r) >= engine.SMALL, "too small for the engine to start threads"
ask = partial(rankcert.audit, q, k, left, right, eps=1e-9, log_normaliser=np.full(n, np.log(n) + 32e-6 / 32**0.5))
assert ask(threads=2) and ask(threads=1)
if how == "workers":  # something sets the mode of new threads only
    engine.ThreadPoolExecutor = partial(ThreadPoolExecutor, initializer=hostile)
    run = partial(ask, threads=2)
else:  # the caller's own callback does it between two tiles
    run = partial(ask, threads=1, progress=lambda done, total: hostile())
kernel.require_safe_arithmetic()
try:
    print(run().status)
except rankcert.UnsafeArithmetic:
    print("refused")
if how == "workers":
    kernel.require_safe_arithmetic()  # the calling thread was and is fine
"""


@pytest.mark.parametrize("switch", ["round_up", "flush_to_zero"])
@pytest.mark.parametrize("how", ["workers", "midway"])
def test_unsafe_arithmetic_in_threads_and_midway(library, switch, how):
    done = python(THREADS, library, switch, how)
    assert done.stdout == "refused\n", done.stdout + done.stderr


def test_threads_inherit_the_mode_of_their_creator(library):
    """Why the workers look for themselves: on this platform a mode set here is theirs too."""
    code = """
import ctypes, sys, threading
from rankcert.checker import _kernel
seen = []
ctypes.CDLL(sys.argv[1]).round_down()
thread = threading.Thread(target=lambda: seen.append(_kernel.unsafe_arithmetic()))
thread.start(); thread.join()
print(seen[0], _kernel.unsafe_arithmetic())
"""
    worker, caller = python(code, library).stdout.split()
    assert caller == "1" and worker in (
        "0",
        "1",
    )  # whichever it is, the guard tells the truth about each thread
    if platform.system() == "Linux":
        assert worker == "1"


# Kernel variants

VARIANT = """
import json, sys
import numpy as np
import rankcert
from rankcert.checker import kernel
assert kernel.default_variant() == sys.argv[1]
head = rankcert.example_head("causal")
certificate = rankcert.load(sys.argv[2])
answers = []
for gemm in ("blas", "portable"):
    verdict = rankcert.verify(certificate, head.q, head.k, gemm=gemm, **head.options())
    assert f" {kernel.default_variant()} kernel" in verdict.engine
    answers.append([verdict.status, verdict.worst_row, verdict.row_bounds.tolist()])
wrong = rankcert.audit(head.q, head.k, 1.2 * certificate.left, certificate.right, eps=0.05, **head.options())
answers.append([wrong.status, wrong.worst_row, wrong.row_bounds.tolist()])
print(json.dumps(answers))
"""


def test_variants_agree_within_twice_the_floor(tmp_path):
    head = rankcert.example_head("causal")
    file = tmp_path / "c.safetensors"
    rankcert.certify(head.q, head.k, eps=0.1, **head.options()).save(file)
    ours = rankcert.verify(file, head.q, head.k, **head.options())
    floor = sum(value for name, value in ours.breakdown.items() if name != "factor error")  # of the worst row
    assert 0 < floor < 1e-11
    answers = {}
    for variant in kernel.VARIANTS:
        done = python(VARIANT, variant, file, RANKCERT_KERNEL=variant)
        assert done.returncode == 0, done.stderr
        answers[variant] = json.loads(done.stdout)
    assert len(answers) >= 2 or platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64")
    reference = answers[kernel.VARIANTS[0]]
    for variant, found in answers.items():
        assert [status for status, _, _ in found] == ["PROVED", "PROVED", "REFUTED"], variant
        for (_, worst, bounds), (_, reference_worst, reference_bounds) in zip(found, reference, strict=True):
            assert worst == reference_worst
            assert np.abs(np.subtract(bounds, reference_bounds)).max() <= 2 * floor, variant


def test_an_unknown_variant_is_one_clear_error():
    done = python("import rankcert; rankcert.audit([[1]], [[1]], [[1]], [[1]])", RANKCERT_KERNEL="avx9000")
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rankcert.") and "RANKCERT_KERNEL='avx9000'" in last
    assert all(variant in last for variant in kernel.VARIANTS)


def test_this_process_is_safe():
    """The guard does not cry wolf, and Python's own arithmetic agrees."""
    kernel.require_safe_arithmetic()
    assert 1.0 + 2.0**-53 == 1.0 and 1.0 + 1.5 * 2.0**-53 > 1.0 and math.ulp(0.0) * 0.5 == 0.0
    assert ctypes.c_double(2.0**-1060).value * 0.5 == 2.0**-1061
