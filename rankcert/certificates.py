"""Certificates: the record `certify` returns, and the writer of its file.

The file (checker/FORMAT.md) holds the factors and what they are claimed to be, never a bound or a verdict: whoever
loads one calls `rankcert.verify` with their own inputs to learn a bound. It is written under a temporary name that is
renamed when complete.
"""

import json
import math
import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rankcert.checker import (
    Claim,
    Inputs,
    LowerClaim,
    Verdict,
    applied_row_bounds,
    cancellation_upper,
    read_claim,
)
from rankcert.checker.claim import (
    DTYPES,
    FORMAT_NAME,
    FORMAT_VERSION,
    MAX_BRACKETS,
    MAX_HEADER,
    Statement,
    read_fields,
)
from rankcert.checker.inputs import exact_float64
from rankcert.checker.lower import read_rows, read_weights
from rankcert.checker.lower_claim import (
    BRACKET_FORMAT,
    BRACKET_VERSION,
    LOWER_FORMAT,
    LOWER_VERSION,
    read_bracket_fields,
    read_lower_fields,
)
from rankcert.errors import InvalidInput

__all__ = [
    "Candidate",
    "Certificate",
    "bracket_pieces",
    "file_pieces",
    "load",
    "lower_pieces",
    "make_certificate",
    "make_lower_claim",
    "write_pieces",
]

APPLY_ROWS = 256  # rows of one block of the causal product


@dataclass(frozen=True)
class Candidate:
    """What became of one construction: `status` is proved, unproved (built, but its bound exceeds eps), or skipped.

    `rank` is the rank built, or the rank it would have had (None: not known). `bound` is proved. `note` says why.
    `seconds` went into planning and building, `check_seconds` into the checker.
    """

    method: str
    status: str
    rank: int | None
    bound: float | None
    seconds: float
    note: str
    check_seconds: float = 0.0


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

    @property
    def cancellation(self) -> float:
        """max_i sum_l |left_il| sum_j |right_jl|, rounded up: how far `apply` amplifies rounding; 1 is none.

        An inference in float32 loses about 2^-24 times this much of max_j ||values_j||.
        """
        return cancellation_upper(self.left, self.right)

    def apply(self, values, *, return_bound: bool = False) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The approximate attention output: left (right^T values), or its causal form by prefix sums.

        values (m, ...) finite; the result (n, ...) is float64. Costs O((n + m) rank) per value column; never n x m.
        Rows of `values` at keys whose factor row is zero (masked keys), or which no row may see, may hold anything.
        Each output row is within row_bounds * max_j ||values_j|| of exact attention, plus the rounding of this
        product. With return_bound=True: (result, bounds), where bounds (n,) include that rounding: row i is within
        bounds[i] * max_j ||values_j|| in every l_p norm over the other axes, if that maximum is within 2^-500 and
        2^500. Raises InvalidInput for values that do not fit, and for return_bound without a verdict.

        Source: rankcert/checker/PROOFS.md, Theorem 8.
        """
        if return_bound and self.row_bounds is None:
            raise InvalidInput("this certificate was loaded and not verified: it has no bound to return")
        n, m = self.left.shape[0], self.right.shape[0]
        try:
            shape = np.shape(values)
        except ValueError as error:  # a ragged list
            raise InvalidInput(f"values is not an array of numbers: {error}") from None
        if len(shape) < 1 or shape[0] != m:
            raise InvalidInput(f"values must have one row per key ({m}), got shape {shape}")
        flat = exact_float64("values", values, len(shape)).reshape(m, math.prod(shape[1:]))
        used = self.right.any(axis=1)
        if self.causal:
            used[max(0, n + self.offset) :] = False
        if not used.all():
            flat = np.where(used[:, None], flat, 0.0)
        bad = ~np.isfinite(flat).all(axis=1)
        if bad.any():  # it would reach rows that may not see this key
            raise InvalidInput(f"values row {int(np.argmax(bad))} is not finite, and its key is in use")
        out = self._apply_causal(flat) if self.causal else self.left @ (self.right.T @ flat)
        out = out.reshape(n, *shape[1:])
        if not return_bound:
            return out
        return out, applied_row_bounds(self.row_bounds, self.left, self.right)

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
        return b"".join(self._pieces())

    def save(self, path: str | os.PathLike) -> None:
        """Write the certificate file; an existing file is replaced only once the new one is complete."""
        write_pieces(path, self._pieces())

    def _pieces(self) -> list[bytes | np.ndarray]:
        tensors = {name: getattr(self, name) for name in ("left", "log_normaliser", "right")}
        return file_pieces(self._fields(), tensors)

    def _fields(self) -> str:
        fields = {
            "format": FORMAT_NAME,
            "format_version": FORMAT_VERSION,
            "n": self.left.shape[0],
            "m": self.right.shape[0],
            "rank": self.rank,
            **_statement_fields(self),
        }
        return _checked_text(fields, read_fields)


def _statement_fields(statement: Statement) -> dict:
    """What every file says, whatever its statement is."""
    from rankcert import __version__

    names = ("eps", "scale", "causal", "offset", "method")
    fields = {name: getattr(statement, name) for name in names}
    fields |= {"details": dict(statement.details), "writer": f"rankcert {__version__}"}
    return fields | statement.digests


def _checked_text(fields: dict, read) -> str:
    text = json.dumps(fields, sort_keys=True, allow_nan=False)
    read(text)  # what the reader would refuse is not written
    return text


def lower_pieces(lower: LowerClaim) -> list[bytes | np.ndarray]:
    """The file of a lower bound (checker/FORMAT.md) in order: length and header in one, then the tensors."""
    fields = {
        "format": LOWER_FORMAT,
        "format_version": LOWER_VERSION,
        "n": lower.n,
        "m": lower.m,
        "kind": lower.kind,
        "rank": lower.rank,
        **_witness_counts(lower),
        **_statement_fields(lower),
    }
    return file_pieces(_checked_text(fields, read_lower_fields), _witness_tensors(lower))


def bracket_pieces(certificate: Claim, lower: LowerClaim) -> list[bytes | np.ndarray]:
    """The file of a bracket (checker/FORMAT.md): a certificate and a lower bound about the same head and eps."""
    for name in ("eps", "scale", "causal", "offset", "digests"):
        if getattr(certificate, name) != getattr(lower, name):
            raise InvalidInput(f"the certificate and the lower bound of a bracket differ in {name}")
    fields = {
        "format": BRACKET_FORMAT,
        "format_version": BRACKET_VERSION,
        "n": lower.n,
        "m": lower.m,
        "rank": certificate.rank,
        "lower_kind": lower.kind,
        "lower_rank": lower.rank,
        "lower_method": lower.method,
        "lower_details": dict(lower.details),
        **_witness_counts(lower),
        **_statement_fields(certificate),
    }
    tensors = {name: getattr(certificate, name) for name in ("left", "log_normaliser", "right")}
    return file_pieces(_checked_text(fields, read_bracket_fields), tensors | _witness_tensors(lower))


def _witness_counts(lower: LowerClaim) -> dict[str, int]:
    groups = 0 if lower.weights is None else lower.weights.shape[0]
    return {"row_count": lower.rows.size, "group_count": groups}


def _witness_tensors(lower: LowerClaim) -> dict[str, np.ndarray]:
    tensors = {"groups": lower.groups, "rows": lower.rows, "weights": lower.weights}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def file_pieces(fields: str, tensors: Mapping[str, np.ndarray]) -> list[bytes | np.ndarray]:
    """A file in order (checker/FORMAT.md): length and header in one, then the tensors as given."""
    entries, arrays, stop = {}, [], 0
    for name, tensor in tensors.items():
        dtype = next(code for code, plain in DTYPES.items() if tensor.dtype == plain)
        array = np.ascontiguousarray(tensor, dtype=DTYPES[dtype])
        start, stop = stop, stop + array.nbytes
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, stop]}
        arrays.append(array)
    header = json.dumps({"__metadata__": {"rankcert": fields}, **entries}, separators=(",", ":"))
    header += " " * (-len(header) % 8)
    if len(header) > MAX_HEADER or header.count("{") + header.count("[") > MAX_BRACKETS:
        raise InvalidInput("the details of this record do not fit into the header of its file")
    return [struct.pack("<Q", len(header)) + header.encode("ascii"), *arrays]


def write_pieces(path: str | os.PathLike, pieces: Sequence[bytes | np.ndarray]) -> None:
    """Write a file under a temporary name beside it, and rename it once it is complete and on disk."""
    path = Path(path)
    temporary = path.parent / f".rankcert-{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def make_certificate(
    inputs: Inputs,
    eps: float,
    left: np.ndarray,
    right: np.ndarray,
    log_normaliser: np.ndarray,
    *,
    method: str,
    details: Mapping[str, int | float | str],
    verdict: Verdict,
    candidates: Sequence[Candidate] = (),
) -> Certificate:
    """The record for factors that `verdict` speaks about; it holds them as float64 that cannot be written to."""
    arrays = {
        "left": exact_float64("left", left, 2),
        "right": exact_float64("right", right, 2),
        "log_normaliser": exact_float64("log_normaliser", log_normaliser, 1),
    }
    arrays = {name: array.view() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return Certificate(
        eps=eps,
        scale=inputs.scale,
        causal=inputs.causal,
        offset=inputs.offset,
        digests=inputs.digests,
        **arrays,
        method=method,
        details=dict(details),
        verdict=verdict,
        candidates=tuple(candidates),
    )


def make_lower_claim(
    inputs: Inputs,
    *,
    kind: str,
    eps: float,
    rank: int,
    rows,
    groups=None,
    weights=None,
    method: str,
    details: Mapping[str, int | float | str],
) -> LowerClaim:
    """The record of a witness, as its file would hold it: rows sorted, arrays that cannot be written to.

    kind "bernstein" takes rows (N,), groups (m,) and int8 or int16 weights (K, N), rank = N; "leakage" rows alone.
    Whether it proves anything is for the checker to say. InvalidInput for arrays that are no witness.
    """
    rows = read_rows(inputs, rows)
    if kind == "bernstein":
        groups, weights = read_weights(inputs, rows, groups, weights)
        groups, weights = groups.astype(np.int32), np.array(weights)
    else:
        groups = weights = None
    arrays = {"rows": rows.astype(np.int32), "groups": groups, "weights": weights}
    for array in arrays.values():
        if array is not None:
            array.flags.writeable = False
    return LowerClaim(
        eps=eps,
        scale=inputs.scale,
        causal=inputs.causal,
        offset=inputs.offset,
        digests=inputs.digests,
        method=method,
        details=dict(details),
        n=inputs.n,
        m=inputs.m,
        kind=kind,
        rank=rank,
        **arrays,
    )


def load(path: str | os.PathLike) -> Certificate:
    """Read a certificate file. Its `bound` is None until `rankcert.verify` proves one from the inputs.

    Raises MalformedCertificate naming the broken rule of the format, OSError if the path cannot be read.
    """
    return Certificate(**vars(read_claim(path)))
