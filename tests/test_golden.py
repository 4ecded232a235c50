"""Certificates of every format version, written once and kept: they are read and proved for ever."""

import json
from pathlib import Path

import pytest

from rankcert import load, verify
from rankcert.checker import Engine, check_rows, read_inputs
from rankcert.checker.claim import FORMAT_VERSION
from rankcert.checker.kernel import VARIANTS
from rankcert.heads import read_head

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = range(1, FORMAT_VERSION + 1)


def files(version: int):
    path = GOLDEN / f"version-{version}.safetensors"
    head = read_head([path.with_suffix(".npz")])
    expected = json.loads(path.with_suffix(".json").read_text("ascii"))
    return path, head, expected


def test_every_version_has_its_file():
    assert sorted(path.name for path in GOLDEN.glob("version-*.safetensors")) == [
        f"version-{version}.safetensors" for version in VERSIONS
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_certificate_is_proved_with_its_bound(version):
    path, head, expected = files(version)
    verdict = verify(path, head.q, head.k, **head.options())
    assert verdict.status == "PROVED"
    assert verdict.bound == pytest.approx(expected.pop("bound"), rel=1e-12, abs=0)
    assert verdict.digests == expected
    assert verdict.causal and verdict.offset == 3 and verdict.scale == 0.4 and verdict.notion == "causal rank"


@pytest.mark.parametrize("version", VERSIONS)
def test_bound_does_not_depend_on_the_engine(version):
    path, head, expected = files(version)
    inputs = read_inputs(head.q, head.k, **head.options())
    certificate = load(path)
    for variant in VARIANTS:
        for gemm in ("blas", "portable"):
            verdict = check_rows(
                inputs,
                certificate.left,
                certificate.right,
                eps=certificate.eps,
                log_normaliser=certificate.log_normaliser,
                engine=Engine(gemm=gemm, variant=variant),
            )
            assert verdict.status == "PROVED"
            assert verdict.bound == pytest.approx(expected["bound"], rel=1e-12, abs=0)


@pytest.mark.parametrize("version", VERSIONS)
def test_rewriting_keeps_the_claim(version, tmp_path):
    path, head, expected = files(version)
    certificate = load(path)
    assert certificate.details == {"note": "golden", "seed": 1, "tolerance": 0.25}
    certificate.save(tmp_path / "again.safetensors")
    verdict = verify(tmp_path / "again.safetensors", head.q, head.k, **head.options())
    assert verdict.bound == pytest.approx(expected["bound"], rel=1e-12, abs=0)
