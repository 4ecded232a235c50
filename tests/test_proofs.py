"""The proof of the exponential runs here, and the kernel is held against it."""

import importlib.util
from pathlib import Path

import flint
import numpy as np
import pytest
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

from rankcert.checker.kernel import EPS_M, VARIANTS, exponentials

HERE = Path(__file__).parent
HEADER = (HERE.parent / "rankcert" / "checker" / "kernel.h").read_text("utf-8")


def load_proof():
    spec = importlib.util.spec_from_file_location("exp_kernel", HERE / "proofs" / "exp_kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROOF = load_proof()


def test_the_proof_of_theorem_1_holds_for_the_constants_in_the_source():
    constants = PROOF.read_constants(HEADER)
    with flint.ctx.workprec(200):
        assert PROOF.wrong_constants(constants) == []
        assert PROOF.proved_bound(constants, fused=True) <= 1.92
        assert PROOF.proved_bound(constants, fused=False) <= 2.42


@pytest.mark.parametrize("name", ["EXP_C3", "EXP_C13", "EXP_LN2HI", "EXP_LN2LO", "EXP_LOG2E", "EXP_SHIFT"])
def test_the_proof_fails_when_a_constant_is_disturbed(name):
    constants = PROOF.read_constants(HEADER)
    constants[name] *= 1.01
    with flint.ctx.workprec(200):
        assert PROOF.wrong_constants(constants) or PROOF.proved_bound(constants, True, intervals=400) > 2.5


def test_lemma_1_constants():
    u, eps_m = arb(2) ** -53, arb(EPS_M)
    with flint.ctx.workprec(300):
        for k in (1, 2, 3, 25, 132, 2**12, 2**21, 2**31, 2**40, 2**51):
            assert (1 + u) ** k - 1 <= arb(2) / 3 * k * eps_m
            assert (1 - u) ** -k <= 1 + k * eps_m


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernel_meets_theorem_1(variant):
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(-708, 700, 4000),
            rng.uniform(-30, 0, 4000),
            rng.normal(size=2000) * 10.0 ** rng.uniform(-300, 0, 2000),
            np.arange(-1021, 1010) * np.log(2.0),
            (np.arange(-1021, 1009) + 0.5) * np.log(2.0),
            [0.0, -0.0, -708.0, 700.0, 5e-324, -5e-324, np.nextafter(-708, 0), np.nextafter(700, 0)],
        ]
    )
    x = x[(x >= -708) & (x <= 700)]
    y = exponentials(x, variant)
    with flint.ctx.workprec(160):
        for a, b in zip(x.tolist(), y.tolist(), strict=True):
            true = arb(a).exp()
            assert abs(arb(b) - true) <= arb(1.25 * EPS_M) * true, (a, b)


@pytest.mark.parametrize("variant", VARIANTS)
@given(x=st.floats(allow_nan=True, allow_infinity=True))
@settings(max_examples=300, deadline=None)
def test_kernel_outside_the_range(variant, x):
    (y,) = exponentials(np.array([x]), variant)
    if np.isnan(x):
        assert np.isnan(y)
    elif x < -708:
        assert y == 0.0
    elif x > 700:
        assert y == np.inf
    else:
        assert 0.0 < y < np.inf


def test_every_constant_of_the_code_is_cited_in_the_proofs():
    """PROOFS.md names each theorem and lemma the sources cite, and the sources cite each of them."""
    import re

    folder = HERE.parent / "rankcert" / "checker"
    proofs = (folder / "PROOFS.md").read_text("utf-8")
    stated = set(re.findall(r"\*\*((?:Theorem|Lemma) \d+)", proofs))
    sources = "".join(p.read_text("utf-8") for p in [*folder.glob("*.py"), *folder.glob("*.h")])
    sources = re.sub(r"docs/THEORY\.md[^.]*\.", "", sources)  # lemmas of another document
    cited = set(re.findall(r"(?:Theorem|Lemma) \d+", sources))
    assert cited <= stated, cited - stated
    assert {f"Theorem {i}" for i in (1, 2, 4, 9, 10)} | {f"Lemma {i}" for i in (3, 4, 5, 6, 11)} <= cited
