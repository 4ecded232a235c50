"""The certificate as the checker sees it: a claim about one attention head, and the reader of its file.

A claim carries no bound and no verdict, because none would be believed. The reader treats the file as hostile: it
caps sizes before it allocates, takes nothing it does not know, and names the rule of FORMAT.md that was broken.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rankcert.checker.errors import MalformedCertificate
from rankcert.checker.inputs import SIZE_LIMIT, Inputs

__all__ = [
    "DTYPES",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "MAX_BRACKETS",
    "MAX_HEADER",
    "Claim",
    "Statement",
    "Tensor",
    "certificate_tensors",
    "read_claim",
    "read_fields",
    "read_file",
    "require",
    "statement_fields",
    "take_fields",
    "take_mask",
]

FORMAT_NAME = "rankcert certificate"
FORMAT_VERSION = 1
MAX_FILE = 2**35  # bytes
MAX_HEADER = 2**16
MAX_BRACKETS = 64  # "{" and "[" in one JSON text, which bounds its nesting before it is parsed
MAX_DIGITS = 20  # characters of an integer
DTYPES = {
    "F64": "<f8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "<i1",
}  # of tensors, as the header and as NumPy name them
DIGESTS = ("query_sha256", "key_sha256", "key_bias_sha256", "inputs_sha256")


class Tensor(NamedTuple):
    """A tensor that a file must hold: its shape, and the types it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = ("F64",)


@dataclass(frozen=True, eq=False, kw_only=True)
class Statement:
    """What every file says of itself: about the inputs with these digests, scale and mask, at this `eps`.

    `method` and `details` say how it was found; the checker does not look at them.
    """

    eps: float
    scale: float
    causal: bool
    offset: int
    digests: dict[str, str]
    method: str
    details: dict[str, int | float | str]

    def mismatches(self, inputs: Inputs, eps: float | None) -> Iterator[str]:
        """In what the statement differs from the caller's problem, one readable line each."""
        n, m = self._shape
        if (n, m) != (inputs.n, inputs.m):
            yield (
                f"shape: the {self._what} is for {n} queries and {m} keys, "
                f"the caller's head has {inputs.n} and {inputs.m}"
            )
        for name in ("scale", "causal", "offset"):
            theirs, ours = getattr(self, name), getattr(inputs, name)
            if theirs != ours:
                yield f"{name}: the {self._what} says {theirs!r}, the caller {ours!r}"
        if eps is not None and self.eps != eps:
            yield f"eps: the {self._what} says {self.eps!r}, the caller {eps!r}"
        for name, what in zip(DIGESTS, ("queries", "keys", "key biases", "inputs as a whole"), strict=True):
            if self.digests.get(name) != inputs.digests[name]:
                yield f"{name}: the caller's {what} are not those of the {self._what}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Claim(Statement):
    """`left @ right.T` is within `eps` of the softmax of the inputs with these digests, scale and mask.

    left (n, r), right (m, r), log_normaliser (n,) are float64; `log_normaliser` is advice, believed by nobody.
    """

    left: np.ndarray
    right: np.ndarray
    log_normaliser: np.ndarray

    @property
    def rank(self) -> int:
        """Number of columns of the factors: an upper bound on the rank of their product."""
        return self.left.shape[1]

    @property
    def _what(self) -> str:
        return "certificate"

    @property
    def _shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[0]


def read_claim(source: str | os.PathLike | bytes, *, max_bytes: int = MAX_FILE) -> Claim:
    """Read a certificate from a path or from its bytes. MalformedCertificate names the rule it breaks.

    OSError passes through when the path cannot be read at all.
    """

    fields, arrays = read_file(source, read_fields, certificate_tensors, max_bytes)
    return Claim(**statement_fields(fields), **arrays)


def certificate_tensors(fields: dict) -> dict[str, Tensor]:
    """The tensors that follow a certificate's fields."""
    n, m, r = fields["n"], fields["m"], fields["rank"]
    return {"left": Tensor((n, r)), "right": Tensor((m, r)), "log_normaliser": Tensor((n,))}


def statement_fields(fields: dict) -> dict:
    """What a `Statement` takes of the fields of its file."""
    names = ("eps", "scale", "causal", "offset", "method", "details")
    return {name: fields[name] for name in names} | {"digests": {name: fields[name] for name in DIGESTS}}


def read_file(
    source: str | os.PathLike | bytes,
    read_fields: Callable[[str], dict],
    tensors: Callable[[dict], dict[str, Tensor]],
    max_bytes: int,
) -> tuple[dict, dict[str, np.ndarray]]:
    """Fields and tensors of one file: `read_fields` judges its metadata string, `tensors` says which follow."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = memoryview(source).cast("B")
        if len(data) > max_bytes:
            raise MalformedCertificate("file-too-large", f"{len(data)} bytes, at most {max_bytes} are read")
        return _parse(len(data), lambda start, stop: data[start:stop], read_fields, tensors)
    with open(source, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise MalformedCertificate("file-too-large", f"{size} bytes, at most {max_bytes} are read")

        def fetch(start: int, stop: int):
            file.seek(start)
            return file.read(stop - start)

        return _parse(size, fetch, read_fields, tensors)


def _parse(size: int, fetch, read_fields, tensors) -> tuple[dict, dict[str, np.ndarray]]:
    # Straight down, each step one refusal; nothing is allocated that the checks before it have not bounded.
    require(size >= 8, "truncated", f"{size} bytes; even an empty certificate has 8")
    (header_size,) = struct.unpack("<Q", _exactly(fetch, 0, 8))
    require(header_size <= MAX_HEADER, "header-too-large", f"{header_size} bytes, at most {MAX_HEADER}")
    body = 8 + header_size
    require(body <= size, "truncated", f"the header ends at {body}, the file at {size}")
    header = _json("header", bytes(_exactly(fetch, 8, body)))
    block = header.pop("__metadata__", None)
    require(
        isinstance(block, dict) and set(block) == {"rankcert"} and isinstance(block["rankcert"], str),
        "metadata",
        'must be {"rankcert": "..."} with one JSON string',
    )
    fields = read_fields(block["rankcert"])

    wanted = tensors(fields)
    require(set(header) == set(wanted), "tensors", f"must be {sorted(wanted)}, got {_shown(sorted(header))}")
    spans = {name: _span(name, header[name], tensor) for name, tensor in wanted.items()}
    end = 0
    for start, stop in sorted(spans.values()):
        require(start == end, "layout", f"a tensor starts at {start} where the one before ends at {end}")
        end = stop
    require(
        body + end == size,
        "truncated" if body + end > size else "trailing-bytes",
        f"the tensors end at {body + end}, the file at {size}",
    )
    arrays = {}
    for name, (start, stop) in spans.items():
        data = bytes(_exactly(fetch, body + start, body + stop))
        arrays[name] = np.frombuffer(data, dtype=DTYPES[header[name]["dtype"]]).reshape(wanted[name].shape)
    return fields, arrays


def read_fields(text: str) -> dict:
    """The fields of the metadata string, each as FORMAT.md wants it, or MalformedCertificate."""
    return take_mask(take_fields(text, FORMAT_NAME, FORMAT_VERSION, FIELDS))


def take_mask(fields: dict) -> dict:
    """The fields, if their offset goes with a causal mask."""
    require(
        fields["causal"] or fields["offset"] == 0,
        "offset",
        f"{fields['offset']}, but only a causal head may have one",
    )
    return fields


def take_fields(text: str, format_name: str, format_version: int, table: dict) -> dict:
    """The fields that `table` lists, in its order, of a metadata string of this format and version."""
    meta = _json("metadata", text)
    require(meta.pop("format", None) == format_name, "format", f"must be {format_name!r}")
    version = meta.pop("format_version", None)
    require(
        _is_int(version) and version == format_version,
        "format-version",
        f"{_shown(version)}; this reader knows {format_version}",
    )
    fields = {}
    for name, (fits, what) in table.items():
        require(name in meta, "missing-field", f"{name} is not in the metadata")
        fields[name] = meta.pop(name)
        require(fits(fields[name]), name, f"must be {what}, got {_shown(fields[name])}")
    require(not meta, "unknown-field", f"{_shown(sorted(meta))} in the metadata")
    return fields


def require(condition: bool, reason: str, detail: str) -> None:
    if not condition:
        raise MalformedCertificate(reason, detail)


def _shown(value) -> str:
    return f"{value!r:.100}"  # repr escapes what a terminal would obey


def _exactly(fetch, start: int, stop: int):
    data = fetch(start, stop)
    require(len(data) == stop - start, "truncated", f"the file ends before byte {stop}")
    return data


def _json(what: str, text: bytes | str) -> dict:
    def no_duplicates(pairs):
        names = [name for name, _ in pairs]
        require(len(set(names)) == len(names), "duplicate-key", f"in the {what}")
        return dict(pairs)

    def no_constant(word):
        raise ValueError(f"{word} is not a number")

    def short_integer(word):
        if len(word) > MAX_DIGITS or word == "-0":
            raise ValueError(f"{word:.30} is not an integer of at most {MAX_DIGITS} characters")
        return int(word)

    try:
        text = str(text, "utf-8") if isinstance(text, bytes) else text
        if not text.startswith("{") or text.count("{") + text.count("[") > MAX_BRACKETS:
            raise ValueError(f'it must begin with "{{" and open at most {MAX_BRACKETS} brackets')
        return json.loads(
            text, object_pairs_hook=no_duplicates, parse_constant=no_constant, parse_int=short_integer
        )
    except ValueError as error:  # bad UTF-8 and bad syntax too; the brackets counted, no recursion is deep
        raise MalformedCertificate("json", f"the {what} is not valid JSON: {str(error)[:200]}") from None


def _is_int(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_size(x) -> bool:
    return _is_int(x) and 0 <= x <= SIZE_LIMIT


def _is_float(x) -> bool:
    return isinstance(x, float) and math.isfinite(x)


def _is_digest(x) -> bool:
    return isinstance(x, str) and len(x) == 64 and set(x) <= set("0123456789abcdef")


def _is_text(x) -> bool:
    return isinstance(x, str) and all(" " <= c <= "~" for c in x)


def _is_details(x) -> bool:
    return isinstance(x, dict) and all(
        _is_text(name) and (_is_text(v) or _is_int(v) or _is_float(v)) for name, v in x.items()
    )


# Of each field, in the order they are checked: whether a value fits, and what would. One that does not is refused
# under the field's own name.
POSITIVE = (lambda x: _is_float(x) and x > 0, "a positive finite number, written with a point or exponent")
NUMBER = (_is_float, "a finite number, written with a point or exponent")
COUNT = (lambda x: _is_size(x) and x > 0, "an integer from 1 to 2**30")
TEXT = (_is_text, "a string of printable ASCII")
SIZE = (_is_size, "an integer from 0 to 2**30")
DETAILS = (_is_details, "an object of numbers and strings of printable ASCII")
HEAD = {
    "scale": NUMBER,
    "causal": (lambda x: isinstance(x, bool), "true or false"),
    "offset": (lambda x: _is_int(x) and abs(x) <= SIZE_LIMIT, "an integer within +-2**30"),
    **{name: (_is_digest, "64 lower-case hexadecimal digits") for name in DIGESTS},
}
FIELDS = {
    "n": SIZE,
    "m": COUNT,
    "rank": SIZE,
    "eps": POSITIVE,
    **HEAD,
    "method": TEXT,
    "details": DETAILS,
    "writer": TEXT,
}


def _span(name: str, entry, tensor: Tensor) -> tuple[int, int]:
    """Where the tensor lies in the buffer, after checking that its entry says exactly what the metadata does."""
    require(
        isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"},
        "tensor-entry",
        f"{name} must have dtype, shape and data_offsets",
    )
    require(
        isinstance(entry["dtype"], str) and entry["dtype"] in tensor.dtypes,
        "tensor-dtype",
        f"{name} must be {' or '.join(tensor.dtypes)}, got {_shown(entry['dtype'])}",
    )
    shape, size = tensor.shape, np.dtype(DTYPES[entry["dtype"]]).itemsize * math.prod(tensor.shape)
    require(
        isinstance(entry["shape"], list)
        and all(map(_is_int, entry["shape"]))
        and tuple(entry["shape"]) == shape,
        "tensor-shape",
        f"{name} must be {list(shape)} as the metadata says, got {_shown(entry['shape'])}",
    )
    offsets = entry["data_offsets"]
    require(
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(map(_is_int, offsets))
        and 0 <= offsets[0] <= offsets[1],
        "tensor-offsets",
        f"{name} has {_shown(offsets)}",
    )
    require(
        offsets[1] - offsets[0] == size,
        "tensor-offsets",
        f"{name} of shape {list(shape)} needs {size} bytes, got {offsets[1] - offsets[0]}",
    )
    return offsets[0], offsets[1]
