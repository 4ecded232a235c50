"""Certificates: the record `certify` returns, and the writer of its file.

The file (checker/FORMAT.md) holds the factors and what they are claimed to be, never a bound or a verdict: whoever
loads one calls `rankcert.verify` with their own inputs to learn a bound. It is written with safetensors, under a
temporary name that is renamed when complete.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy

from rankcert.checker import Claim, Inputs, Verdict, read_claim
from rankcert.checker.claim import FORMAT_NAME, FORMAT_VERSION
from rankcert.checker.inputs import exact_float64
from rankcert.errors import InvalidInput

__all__ = ["Candidate", "Certificate", "load"]

APPLY_ROWS = 256  # rows of one block of the causal product


@dataclass(frozen=True)
class Candidate:
    """What became of one construction: `status` is proved, unproved (built, but its bound exceeds eps), or skipped.

    `rank` is the rank built, or the rank it would have had (None: not known). `bound` is proved. `note` says why.
    """

    method: str
    status: str
    rank: int | None
    bound: float | None
    seconds: float
    note: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Certificate(Claim):
    """A factorization of one attention head with the claim that it is within `eps`.

    left (n, rank), right (m, rank): float64; left @ right.T approximates the softmax matrix with exactly these
    numbers, normaliser included. `bound` and `row_bounds` are proved by the checker: max_i and per-row
    sum_j |P_ij - (left right^T)_ij|; None on a certificate that was loaded and not verified yet. Under a causal
    mask only allowed pairs count, and `apply` drops the others. `candidates` says what else was tried.
    """

    verdict: Verdict | None = None
    candidates: tuple[Candidate, ...] = ()

    @property
    def bound(self) -> float | None:
        """The proved bound, or None before verification."""
        return None if self.verdict is None else self.verdict.bound

    @property
    def row_bounds(self) -> np.ndarray | None:
        """The proved bound of every row (n,), or None before verification."""
        return None if self.verdict is None else self.verdict.row_bounds

    def apply(self, values) -> np.ndarray:
        """The approximate attention output: left (right^T values), or its causal form by prefix sums.

        values (m, ...) float; the result (n, ...) is float64. Costs O((n + m) rank) per value column; never n x m.
        Rows of `values` at keys whose factor row is zero (masked keys) are not read, so they may hold anything.
        Each output row is within bound * max_j ||values_j|| of exact attention in any norm, plus the rounding of
        this product (not part of `bound`).
        """
        values = np.asarray(values)
        if values.ndim < 1 or values.shape[0] != self.right.shape[0]:
            raise InvalidInput(
                f"values must have one row per key ({self.right.shape[0]}), got shape {values.shape}"
            )
        used = self.right.any(axis=1)
        flat = exact_float64("values", values.reshape(values.shape[0], -1), 2)
        flat = np.where(used[:, None], flat, 0.0)
        out = self._apply_causal(flat) if self.causal else self.left @ (self.right.T @ flat)
        return out.reshape(self.left.shape[0], *values.shape[1:])

    def _apply_causal(self, flat: np.ndarray) -> np.ndarray:
        n, m = self.left.shape[0], self.right.shape[0]
        out = np.empty((n, flat.shape[1]))
        state, taken = np.zeros((self.rank, flat.shape[1])), 0
        for start in range(0, n, APPLY_ROWS):
            # invariant: state = right[:taken]^T flat[:taken], and every row from `start` on may see those keys
            rows = np.arange(start, min(start + APPLY_ROWS, n))
            reach = np.clip(rows + self.offset + 1, 0, m)
            first, last = reach[0], reach[-1]
            state += self.right[taken:first].T @ flat[taken:first]
            taken = first
            near = self.left[rows] @ self.right[first:last].T
            near[np.arange(first, last) >= reach[:, None]] = 0.0
            out[rows] = self.left[rows] @ state + near @ flat[first:last]
        return out

    def to_bytes(self) -> bytes:
        """The certificate file's bytes: the same record gives the same bytes."""
        return safetensors.numpy.save(self._tensors(), metadata=self._metadata())

    def save(self, path: str | os.PathLike) -> None:
        """Write the certificate file; an existing file is replaced only once the new one is complete."""
        path = Path(path)
        handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".tmp", dir=path.parent)
        os.close(handle)
        try:
            safetensors.numpy.save_file(self._tensors(), temporary, metadata=self._metadata())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)  # mkstemp made it private
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _tensors(self) -> dict[str, np.ndarray]:
        return {
            name: np.ascontiguousarray(getattr(self, name)) for name in ("left", "right", "log_normaliser")
        }

    def _metadata(self) -> dict[str, str]:
        from rankcert import __version__

        fields = {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "n": self.left.shape[0],
            "m": self.right.shape[0],
            "rank": self.rank,
            "eps": self.eps,
            "scale": self.scale,
            "causal": self.causal,
            "offset": self.offset,
            "method": self.method,
            "details": self.details,
            "writer": f"rankcert {__version__}",
            **self.digests,
        }
        # one entry only: safetensors does not keep the order of several
        return {"rankcert": json.dumps(fields, sort_keys=True, allow_nan=False)}


def make_certificate(
    inputs: Inputs,
    eps: float,
    left: np.ndarray,
    right: np.ndarray,
    log_normaliser: np.ndarray,
    *,
    method: str,
    details: dict[str, int | float | str],
    verdict: Verdict,
    candidates: Sequence[Candidate] = (),
) -> Certificate:
    """The record for factors that `verdict` speaks about."""
    return Certificate(
        eps=eps,
        scale=inputs.scale,
        causal=inputs.causal,
        offset=inputs.offset,
        digests=inputs.digests,
        left=left,
        right=right,
        log_normaliser=log_normaliser,
        method=method,
        details=details,
        verdict=verdict,
        candidates=tuple(candidates),
    )


def load(path: str | os.PathLike) -> Certificate:
    """Read a certificate file. Its `bound` is None until `rankcert.verify` proves one from the inputs.

    Raises MalformedCertificate naming the broken rule of the format, OSError if the path cannot be read.
    """
    return Certificate(**vars(read_claim(path)))
