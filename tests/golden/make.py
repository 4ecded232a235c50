"""Writes the golden certificate of the format's newest version: `python tests/golden/make.py`.

A release that changes the format adds a file and keeps the old ones: they must be readable for ever. The head is
stored beside the certificate, so that nothing depends on how arrays are generated.
"""

import json
import sys
from pathlib import Path

import numpy as np

from rankcert.certificates import Certificate, make_certificate
from rankcert.checker import check_rows, find_log_normalisers, read_inputs
from rankcert.checker.claim import FORMAT_VERSION

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


if __name__ == "__main__":
    main()
