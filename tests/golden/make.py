"""Writes the golden files of the formats' newest versions: `python tests/golden/make.py`.

A release that changes the format adds a file and keeps the old ones: they must be readable for ever. The head is
stored beside the certificate, so that nothing depends on how arrays are generated.
"""

import json
import sys
from pathlib import Path

import numpy as np

from rankcert.certificates import (
    Certificate,
    bracket_pieces,
    lower_pieces,
    make_certificate,
    make_lower_claim,
    write_pieces,
)
from rankcert.checker import check_rows, find_log_normalisers, read_inputs, verify_bracket
from rankcert.checker.claim import FORMAT_VERSION
from rankcert.checker.lower_claim import LOWER_VERSION

HERE = Path(__file__).parent


def by_svd(q, k, *, rank: int, eps: float, details=None, **options) -> Certificate:
    """A certificate of the given rank from the truncated singular value decomposition, whatever its verdict."""
    inputs = read_inputs(q, k, **options)
    logits = inputs.scale * (inputs.query @ inputs.key.T) + inputs.key_bias
    logits[np.arange(inputs.m) >= inputs.reach[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    u, values, vt = np.linalg.svd(weights / weights.sum(axis=1, keepdims=True), full_matrices=False)
    left = u[:, :rank] * values[:rank]
    right = np.where(inputs.kept_keys[:, None], vt[:rank].T, 0.0)
    hint = find_log_normalisers(inputs)
    verdict = check_rows(inputs, left, right, eps=eps, log_normaliser=hint)
    return make_certificate(
        inputs, eps, left, right, hint, method="svd", details=details or {}, verdict=verdict
    )


def golden_head() -> dict:
    """Every option at once: binary32 queries, a bias, a masked key and one out of reach that both hold NaN."""
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(12, 4)).astype(np.float32), rng.normal(size=(16, 4))
    key_bias = 0.5 * rng.normal(size=16)
    key_bias[[3, 8]] = -np.inf
    k[[3, 15]] = np.nan
    return {"q": q, "k": k, "key_bias": key_bias, "scale": 0.4, "causal": True, "offset": 3}


def main() -> None:
    name = HERE / f"version-{FORMAT_VERSION}"
    head = golden_head()
    certificate = by_svd(**head, rank=6, eps=0.25, details={"note": "golden", "seed": 1, "tolerance": 0.25})
    if not certificate.verdict:
        sys.exit(f"not proved: {certificate.verdict.reason}")
    certificate.save(name.with_suffix(".safetensors"))
    np.savez(name.with_suffix(".npz"), **head)
    expected = {"bound": certificate.bound, **certificate.digests}
    name.with_suffix(".json").write_text(json.dumps(expected, indent=2) + "\n", encoding="ascii")
    print(f"{name.with_suffix('.safetensors')}: bound {certificate.bound!r}, rank {certificate.rank}")
    write_lower(certificate, head)


def write_lower(certificate: Certificate, head: dict) -> None:
    """A lower bound for the same head and eps, and the bracket of the two. Rows 8 and 9 both see keys 0 to 11."""
    lower = make_lower_claim(
        read_inputs(**head),
        kind="bernstein",
        eps=certificate.eps,
        rank=2,
        rows=[8, 9],
        groups=[0, 1, 2, -1, 2, 0, 0, 1, -1, 0, 0, -1, -1, -1, -1, -1],
        weights=np.array([[127, -39], [-65, 92], [0, 127]], dtype=np.int8),
        method="hand",
        details={"note": "golden"},
    )
    ends = verify_bracket((certificate, lower), **head)
    if not ends:
        sys.exit(f"not proved: {ends.reason}")
    write_pieces(HERE / f"lower-version-{LOWER_VERSION}.safetensors", lower_pieces(lower))
    write_pieces(HERE / f"bracket-version-{LOWER_VERSION}.safetensors", bracket_pieces(certificate, lower))
    expected = {"rank": ends.lower.rank, "eps_below": ends.lower.eps_below, "upper": ends.upper.rank}
    path = HERE / f"lower-version-{LOWER_VERSION}.json"
    path.write_text(json.dumps(expected, indent=2) + "\n", encoding="ascii")
    print(ends.reason, ends.lower.eps_below)


if __name__ == "__main__":
    main()
