"""Hostile certificates: for every reason there is to refuse a file, the ways of deserving it.

`python tests/hostile/make.py` writes the first way of each reason to <reason>.safetensors here. Every way is a sound
certificate (FORMAT.md's worked example) spoiled in one place; test_hostile.py asks for exactly that refusal.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from hostile.plain import Draft, example

HERE = Path(__file__).parent
BIG = 2**30
Spoiler = Callable[[Draft], object]  # changes the draft, or returns the file's bytes outright


def field(name: str, value) -> Spoiler:
    return lambda draft: draft.fields.update({name: value})


def drop(name: str) -> Spoiler:
    return lambda draft: draft.fields.pop(name)


def entry(tensor: str, **changes) -> Spoiler:
    return lambda draft: draft.tensors[tensor].update(changes)


def part(**changes) -> Spoiler:
    return lambda draft: vars(draft).update(changes)


def header(change: Callable[[bytes], bytes]) -> Spoiler:
    """Change the header's bytes, length prefix to match."""

    def spoil(draft: Draft) -> None:
        data = draft.to_bytes()
        draft.header_text = change(data[8 : len(data) - len(draft.body)])

    return spoil


def text(old: str, new: str) -> Spoiler:
    """Replace a piece of the metadata string."""

    def spoil(draft: Draft) -> None:
        whole = json.dumps(draft.fields, sort_keys=True)
        assert old in whole
        draft.metadata_text = whole.replace(old, new)

    return spoil


def cut(stop: int) -> Spoiler:
    return lambda draft: draft.to_bytes()[:stop]


def add(more: bytes) -> Spoiler:
    return lambda draft: vars(draft).update(body=draft.body + more)


def both(first: Spoiler, second: Spoiler) -> Spoiler:
    return lambda draft: (first(draft), second(draft))


def exabytes(draft: Draft) -> None:
    """2^30 x 2^30 tensors with consistent shapes and offsets, in a file of 900 bytes."""
    draft.fields.update(n=BIG, m=BIG, rank=BIG)
    stops = (8 * BIG * BIG, 8 * BIG * BIG + 8 * BIG, 16 * BIG * BIG + 8 * BIG)
    for name, shape, start, stop in zip(
        ("left", "log_normaliser", "right"),
        ([BIG, BIG], [BIG], [BIG, BIG]),
        (0, *stops),
        stops,
        strict=False,
    ):
        draft.tensors[name].update(shape=shape, data_offsets=[start, stop])


def not_a_size(name: str) -> dict[str, Spoiler]:
    values = {"negative": -1, "true": True, "float": 2.0, "string": "2", "null": None, "beyond": BIG + 1}
    return {what: field(name, value) for what, value in values.items()}


def not_a_digest(name: str) -> dict[str, Spoiler]:
    values = {
        "short": "0" * 63,
        "long": "0" * 65,
        "upper-case": "A" * 64,
        "not-hexadecimal": "g" * 64,
        "other-digits": "\u0661" * 64,
        "list": ["0"] * 64,
        "null": None,
    }
    return {what: field(name, value) for what, value in values.items()}


def not_ascii(name: str) -> dict[str, Spoiler]:
    values = {
        "escape": "\x1b[2J",
        "number": 1,
        "null": None,
        "newline": "a\nb",
        "accent": "\u00e9",
        "surrogate": "\ud800",
        "delete": "\x7f",
    }
    return {what: field(name, value) for what, value in values.items()}


FIELDS = (
    *("n", "m", "rank", "eps", "scale", "causal", "offset"),
    *("query_sha256", "key_sha256", "key_bias_sha256", "inputs_sha256", "method", "details", "writer"),
)

CASES: dict[str, dict[str, Spoiler]] = {
    "file-too-large": {"sound": lambda draft: None},  # under a cap of CAP bytes, as test_hostile.py reads it
    "truncated": {
        "tensor": cut(-1),
        "empty": cut(0),
        "seven-bytes": cut(7),
        "no-header": cut(8),
        "header": cut(-100),
        "tensors": cut(-48),
        "header-size": part(header_size=2**16),
        "exabytes": exabytes,
    },
    "header-too-large": {
        "most": part(header_size=2**64 - 1),
        "by-one": part(header_size=2**16 + 1),
        "sign-bit": part(header_size=2**63),
        "all-there": part(header_text=b"{" + b" " * 2**16 + b"}"),
    },
    "json": {
        "constant": field("eps", float("nan")),
        "infinity": field("eps", float("inf")),
        "minus-infinity": field("scale", float("-inf")),
        "bad-utf8": header(lambda h: h.replace(b"hand", b"h\xffnd")),
        "surrogate-utf8": header(lambda h: h.replace(b"hand", b"h\xed\xa0\x80")),
        "utf16": header(lambda h: h.decode().encode("utf-16-le")),
        "utf32": header(lambda h: h.decode().encode("utf-32-be")),
        "bom": header(lambda h: b"\xef\xbb\xbf" + h),
        "leading-space": header(lambda h: b" " + h),
        "no-header": part(header_text=b""),
        "only-spaces": part(header_text=b"        "),
        "list": part(header_text=b"[1]"),
        "string": part(header_text=b'"{}"'),
        "unterminated": header(lambda h: h.rstrip()[:-1]),
        "second-object": header(lambda h: h.rstrip() + b"{}"),
        "nul-padding": header(lambda h: h.rstrip() + b"\0\0\0"),
        "comma": header(lambda h: h.replace(b"]}}", b"]},}")),
        "comment": header(lambda h: h.replace(b'"left"', b'/**/"left"')),
        "single-quotes": header(lambda h: h.replace(b'"left"', b"'left'")),
        "raw-newline": header(lambda h: h.replace(b'"left"', b'"le\nft"')),
        "nested": part(header_text=b'{"a":' * 13000),
        "nested-lists": part(header_text=b'{"a":' + b"[" * 60000),
        "nested-in-balance": text('"n": 2', '"n": ' + "[" * 63 + "]" * 63),
        "nested-metadata": part(metadata_text='{"a":' + "[" * 60000),
        "brackets": field("method", "[" * 64),
        "long-integer": text('"n": 2', '"n": ' + "1" * 5000),
        "21-digits": text('"n": 2', '"n": 1' + "0" * 20),
        "minus-zero": text('"offset": 0', '"offset": -0'),
        "leading-zero": text('"n": 2', '"n": 02'),
        "plus": text('"n": 2', '"n": +2'),
        "bare-point": text('"eps": 0.125', '"eps": .125'),
        "hexadecimal": text('"n": 2', '"n": 0x2'),
        "metadata-unterminated": text("}", ""),
        "metadata-list": part(metadata_text="[]"),
        "metadata-empty": part(metadata_text=""),
        "metadata-bom": part(metadata_text="\ufeff{}"),
    },
    "duplicate-key": {
        "metadata-field": text('"eps": 0.125', '"eps": 0.125, "eps": 0.5'),
        "same-value": text('"n": 2', '"n": 2, "n": 2'),
        "escaped": text('"n": 2', '"n": 2, "\\u006e": 2'),
        "details": text('"error": "tanh(1/8)"', '"a": 1, "a": 2'),
        "tensor": header(lambda h: h.replace(b'"right":', b'"left":{},"left":')),
        "entry": header(lambda h: h.replace(b'"dtype":"F64"', b'"dtype":"F32","dtype":"F64"', 1)),
        "two-metadata": header(lambda h: b'{"__metadata__":{},' + h[1:]),
    },
    "metadata": {
        "two-entries": part(metadata={"rankcert": "{}", "other": ""}),
        "absent": header(lambda h: h.replace(b"__metadata__", b"__metadatum__")),
        "null": header(lambda h: b'{"__metadata__":null}'),
        "string": part(metadata="{}"),
        "not-a-string": part(metadata={"rankcert": {}}),
        "empty": part(metadata={}),
        "other-name": part(metadata={"Rankcert": "{}"}),
    },
    "format": {
        "other": field("format", "rankcert reduction"),
        "absent": drop("format"),
        "number": field("format", 1),
        "prefix": field("format", "rankcert certificate "),
    },
    "format-version": {
        "two": field("format_version", 2),
        "absent": drop("format_version"),
        "zero": field("format_version", 0),
        "float": field("format_version", 1.0),
        "true": field("format_version", True),
        "string": field("format_version", "1"),
        "list": field("format_version", [1]),
    },
    "missing-field": {name: drop(name) for name in FIELDS},
    "n": not_a_size("n"),
    "m": {"zero": field("m", 0)} | not_a_size("m"),
    "rank": not_a_size("rank"),
    "eps": {
        "zero": field("eps", 0.0),
        "negative": field("eps", -0.125),
        "integer": field("eps", 1),
        "string": field("eps", "0.125"),
        "true": field("eps", True),
        "null": field("eps", None),
        "overflow": text('"eps": 0.125', '"eps": 1e999'),
        "underflow": text('"eps": 0.125', '"eps": 1e-999'),
    },
    "scale": {
        "integer": field("scale", 1),
        "overflow": text('"scale": 1.0', '"scale": -1e999'),
        "null": field("scale", None),
        "string": field("scale", "1.0"),
        "list": field("scale", [1.0]),
    },
    "causal": {
        "one": field("causal", 1),
        "zero": field("causal", 0),
        "null": field("causal", None),
        "string": field("causal", "false"),
    },
    "offset": {
        "not-causal": field("offset", 1),
        "float": field("offset", 0.0),
        "false": field("offset", False),
        "null": field("offset", None),
        "beyond": lambda draft: draft.fields.update(causal=True, offset=BIG + 1),
        "below": lambda draft: draft.fields.update(causal=True, offset=-BIG - 1),
    },
    "query_sha256": not_a_digest("query_sha256"),
    "key_sha256": not_a_digest("key_sha256"),
    "key_bias_sha256": not_a_digest("key_bias_sha256"),
    "inputs_sha256": not_a_digest("inputs_sha256"),
    "method": not_ascii("method"),
    "details": {
        "nested": field("details", {"a": {}}),
        "list": field("details", []),
        "null": field("details", None),
        "null-inside": field("details", {"a": None}),
        "true-inside": field("details", {"a": True}),
        "list-inside": field("details", {"a": [1]}),
        "overflow": text('"tanh(1/8)"', "1e999"),
        "escape": field("details", {"a": "\x1b]0;"}),
        "escape-in-name": field("details", {"\x1b": 1}),
    },
    "writer": not_ascii("writer"),
    "unknown-field": {
        "bound": field("bound", 0.0),
        "verdict": field("verdict", "PROVED"),
        "empty-name": field("", ""),
        "capital": field("Eps", 0.125),
        "long": field("\x1b" * 2000, 1),
    },
    "tensors": {
        "extra": lambda draft: draft.tensors.update(
            extra={"dtype": "F64", "shape": [0], "data_offsets": [48, 48]}
        ),
        "missing": lambda draft: draft.tensors.pop("right"),
        "renamed": lambda draft: draft.tensors.update({"Right": draft.tensors.pop("right")}),
        "none": lambda draft: draft.tensors.clear(),
        "bytes-in-the-name": lambda draft: draft.tensors.update({"\x1b" * 2000: {}}),
    },
    "tensor-entry": {
        "extra-key": entry("left", strides=[8, 8]),
        "no-dtype": lambda draft: draft.tensors["left"].pop("dtype"),
        "no-shape": lambda draft: draft.tensors["right"].pop("shape"),
        "no-offsets": lambda draft: draft.tensors["log_normaliser"].pop("data_offsets"),
        "null": lambda draft: draft.tensors.update(left=None),
        "list": lambda draft: draft.tensors.update(left=["F64", [2, 1], [0, 16]]),
    },
    "tensor-dtype": {
        "f32": entry("left", dtype="F32"),
        "i64": entry("right", dtype="I64"),
        "lower-case": entry("log_normaliser", dtype="f64"),
        "number": entry("left", dtype=64),
        "list": entry("left", dtype=["F64"]),
    },
    "tensor-shape": {
        "transposed": entry("left", shape=[1, 2]),
        "flat": entry("right", shape=[2]),
        "more": entry("left", shape=[2, 1, 1]),
        "column": entry("log_normaliser", shape=[2, 1]),
        "float": entry("left", shape=[2.0, 1]),
        "true": entry("left", shape=[2, True]),
        "string": entry("left", shape="21"),
        "negative": entry("left", shape=[-2, -1]),
        "null": entry("left", shape=None),
        "nested": entry("left", shape=[[2], 1]),
        "other-rank": field("rank", 2),
        "other-n": field("n", 3),
        "other-m": field("m", 1),
        "gigantic-fields": lambda draft: draft.fields.update(n=BIG, m=BIG, rank=BIG),
        "gigantic-shape": entry("left", shape=[BIG, BIG]),
        "beyond-64-bits": entry("left", shape=[2**62, 2**62]),
    },
    "tensor-offsets": {
        "short": entry("left", data_offsets=[0, 8]),
        "long": entry("right", data_offsets=[32, 56]),
        "reversed": entry("left", data_offsets=[16, 0]),
        "negative": entry("left", data_offsets=[-16, 0]),
        "one": entry("left", data_offsets=[16]),
        "three": entry("left", data_offsets=[0, 16, 16]),
        "float": entry("left", data_offsets=[0, 16.0]),
        "true": entry("left", data_offsets=[True, 17]),
        "string": entry("left", data_offsets="01"),
        "null": entry("left", data_offsets=None),
        "nested": entry("left", data_offsets=[[0], 16]),
        "wrapped": entry("left", data_offsets=[0, 2**64 - 1]),
    },
    "layout": {
        "overlap": entry("log_normaliser", data_offsets=[0, 16]),
        "hole": both(entry("right", data_offsets=[40, 56]), add(bytes(8))),
        "hole-at-start": both(
            entry("left", data_offsets=[8, 24]),
            both(entry("log_normaliser", data_offsets=[24, 40]), entry("right", data_offsets=[40, 56])),
        ),
        "overlap-by-one": entry("right", data_offsets=[31, 47]),
        "far": entry("right", data_offsets=[2**62, 2**62 + 16]),
    },
    "trailing-bytes": {
        "one": add(b"\0"),
        "number": add(bytes(8)),
        "certificate": add(example().to_bytes()),
        "newline": add(b"\n"),
    },
}

CAP = 64


def spoiled(*spoilers: Spoiler) -> bytes:
    """The bytes of the worked example after these changes."""
    draft = example()
    for spoil in spoilers:
        data = spoil(draft)
        if isinstance(data, bytes):
            return data
    return draft.to_bytes()


def literal(reason: str) -> bytes:
    """What <reason>.safetensors holds."""
    return spoiled(next(iter(CASES[reason].values())))


if __name__ == "__main__":
    for old in HERE.glob("*.safetensors"):
        old.unlink()
    for reason in CASES:
        (HERE / f"{reason}.safetensors").write_bytes(literal(reason))
    print(f"{len(CASES)} files, {sum(len(ways) for ways in CASES.values())} ways")
