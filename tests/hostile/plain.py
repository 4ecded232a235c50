"""The certificate file once more, from the words of rankcert/checker/FORMAT.md: struct, json and hashlib, no rankcert.

A `Draft` is a certificate on its way to bytes, every part of which a test or make.py may spoil first.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass

ORDER = ("left", "log_normaliser", "right")  # of the tensors in the file, as the safetensors library has it


def array_digest(shape, values) -> str:
    """SHA-256 of the number of dimensions, the shape, and the values in C order."""
    text = struct.pack("<q", len(shape))
    for side in shape:
        text += struct.pack("<q", side)
    for value in values:
        text += struct.pack("<d", value)
    return hashlib.sha256(text).hexdigest()


def binding(q, k, *, scale=None, key_bias=None, causal=False, offset=0) -> dict:
    """The seven fields that say which head a certificate is about; q and k are lists of rows (q not empty)."""
    n, m, d = len(q), len(k), len(k[0])
    scale = 1.0 / math.sqrt(d) if scale is None else scale
    bias = [0.0] * m if key_bias is None else [0.0 if b == 0.0 else b for b in key_bias]
    seen = min(max(n + offset, 0), m) if causal and n else m
    keys = [k[j] if bias[j] != -math.inf and j < seen else [0.0] * d for j in range(m)]
    digests = {
        "query_sha256": array_digest((n, d), [x for row in q for x in row]),
        "key_sha256": array_digest((m, d), [x for row in keys for x in row]),
        "key_bias_sha256": array_digest((m,), bias),
    }
    whole = b"rankcert inputs 1\n"
    for digest in digests.values():
        whole += bytes.fromhex(digest)
    whole += struct.pack("<d", scale) + (b"\x01" if causal else b"\x00") + struct.pack("<q", offset)
    digests["inputs_sha256"] = hashlib.sha256(whole).hexdigest()
    return {"scale": scale, "causal": causal, "offset": offset} | digests


@dataclass
class Draft:
    """The parts of a file: metadata fields, tensor entries, tensor bytes. `None` means: follow from the others."""

    fields: dict
    tensors: dict
    body: bytes
    metadata: object = None  # the value of __metadata__
    metadata_text: str | None = None
    header_text: bytes | None = None
    header_size: int | None = None

    def to_bytes(self) -> bytes:
        text = self.metadata_text
        if text is None:
            text = json.dumps(self.fields, sort_keys=True)
        metadata = {"rankcert": text} if self.metadata is None else self.metadata
        header = self.header_text
        if header is None:
            header = json.dumps({"__metadata__": metadata, **self.tensors}, separators=(",", ":")).encode()
            header += b" " * (-len(header) % 8)
        size = len(header) if self.header_size is None else self.header_size
        return struct.pack("<Q", size) + header + self.body


def draft(left, right, log_normaliser, *, rank, eps, head: dict, method="hand", details=None) -> Draft:
    """A sound draft; left and right are lists of rows, `head` the result of `binding`."""
    n, m = len(left), len(right)
    shapes = {"left": [n, rank], "log_normaliser": [n], "right": [m, rank]}
    values = {
        "left": [x for row in left for x in row],
        "log_normaliser": log_normaliser,
        "right": [x for row in right for x in row],
    }
    tensors, body = {}, b""
    for name in ORDER:
        start = len(body)
        body += struct.pack(f"<{len(values[name])}d", *values[name])
        tensors[name] = {"dtype": "F64", "shape": shapes[name], "data_offsets": [start, len(body)]}
    fields = {
        "format": "rankcert certificate",
        "format_version": 1,
        "n": n,
        "m": m,
        "rank": rank,
        "eps": eps,
        "method": method,
        "details": {} if details is None else details,
        "writer": "hand",
    }
    return Draft(fields | head, tensors, body)


def lower_draft(
    rows, groups, weights, *, m, n, eps, head: dict, kind="bernstein", rank=None, details=None
) -> Draft:
    """A sound draft of a lower bound with int8 weights (a list of K rows); no groups and weights for leakage."""
    count = 0 if weights is None else len(weights)
    parts = {"rows": ("I32", [len(rows)], rows, "i")}
    if kind == "bernstein":
        flat = [x for row in weights for x in row]
        parts |= {"groups": ("I32", [m], groups, "i"), "weights": ("I8", [count, len(rows)], flat, "b")}
    tensors, body = {}, b""
    for name, (dtype, shape, values, code) in sorted(parts.items()):
        start = len(body)
        body += struct.pack(f"<{len(values)}{code}", *values)
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, len(body)]}
    fields = {
        "format": "rankcert lower bound",
        "format_version": 1,
        "n": n,
        "m": m,
        "kind": kind,
        "rank": len(rows) if rank is None else rank,
        "row_count": len(rows),
        "group_count": count,
        "eps": eps,
        "method": "hand",
        "details": {} if details is None else details,
        "writer": "hand",
    }
    return Draft(fields | head, tensors, body)


def bracket_draft(upper: Draft, lower: Draft) -> Draft:
    """The two as one file, upper first; they must be about one head and eps."""
    fields = {**upper.fields, "format": "rankcert bracket"}
    fields |= {f"lower_{name}": lower.fields[name] for name in ("kind", "rank", "method", "details")}
    fields |= {name: lower.fields[name] for name in ("row_count", "group_count")}
    tensors = {name: dict(entry) for name, entry in upper.tensors.items()}
    for name, entry in lower.tensors.items():
        tensors[name] = entry | {"data_offsets": [len(upper.body) + x for x in entry["data_offsets"]]}
    return Draft(fields, tensors, upper.body + lower.body)


# The worked example of FORMAT.md: two queries that lean a little to one key or the other, taken as if they did not.
EXAMPLE_Q = [[1.0], [-1.0]]
EXAMPLE_K = [[0.125], [-0.125]]


def example() -> Draft:
    """left right^T = 1/2 everywhere; the true error is tanh(1/8) = 0.12435... in both rows, and eps is 1/8."""
    return draft(
        [[1.0], [1.0]],
        [[0.5], [0.5]],
        [0.7009394198788436, 0.7009394198788436],  # log(2 cosh(1/8))
        rank=1,
        eps=0.125,
        head=binding(EXAMPLE_Q, EXAMPLE_K),
        details={"error": "tanh(1/8)"},
    )


def lower_example() -> Draft:
    """Each key its own group, weights I: P^-1 has row norms 1/tanh(1/8), so rank 2 is needed below 0.12435..."""
    return lower_draft(
        [0, 1],
        [0, 1],
        [[1, 0], [0, 1]],
        m=2,
        n=2,
        eps=0.124,
        head=binding(EXAMPLE_Q, EXAMPLE_K),
        details={"limit": "tanh(1/8)"},
    )
