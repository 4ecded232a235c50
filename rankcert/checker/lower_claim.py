"""The lower bound and the bracket as files, and their readers (FORMAT.md): as hostile to a file as `read_claim`."""

import os
from dataclasses import dataclass

import numpy as np

from rankcert.checker.claim import (
    COUNT,
    DETAILS,
    HEAD,
    MAX_FILE,
    POSITIVE,
    SIZE,
    TEXT,
    Claim,
    Statement,
    Tensor,
    certificate_tensors,
    read_file,
    require,
    statement_fields,
    take_fields,
    take_mask,
)

__all__ = [
    "BRACKET_FIELDS",
    "BRACKET_FORMAT",
    "BRACKET_VERSION",
    "LOWER_FIELDS",
    "LOWER_FORMAT",
    "LOWER_VERSION",
    "LowerClaim",
    "read_bracket",
    "read_bracket_fields",
    "read_lower",
    "read_lower_fields",
]

LOWER_FORMAT = "rankcert lower bound"
LOWER_VERSION = 1
BRACKET_FORMAT = "rankcert bracket"
BRACKET_VERSION = 1

KIND = (lambda x: isinstance(x, str) and x in ("bernstein", "leakage"), '"bernstein" or "leakage"')
LOWER_FIELDS = {
    "n": SIZE,
    "m": COUNT,
    "kind": KIND,
    "rank": SIZE,
    "row_count": SIZE,
    "group_count": SIZE,
    "eps": POSITIVE,
    **HEAD,
    "method": TEXT,
    "details": DETAILS,
    "writer": TEXT,
}
BRACKET_FIELDS = {
    "n": SIZE,
    "m": COUNT,
    "rank": SIZE,
    "lower_kind": KIND,
    "lower_rank": SIZE,
    "row_count": SIZE,
    "group_count": SIZE,
    "eps": POSITIVE,
    **HEAD,
    "method": TEXT,
    "details": DETAILS,
    "lower_method": TEXT,
    "lower_details": DETAILS,
    "writer": TEXT,
}


@dataclass(frozen=True, eq=False, kw_only=True)
class LowerClaim(Statement):
    """Every matrix within `eps` of the softmax of the inputs with these digests, scale and mask has rank >= `rank`.

    kind "bernstein": rows int32 (rank,), increasing; groups int32 (m,); weights int8 or int16 (K, rank), as in
    `check_bernstein`. kind "leakage": rows only, any number of them, as in `check_leakage`; groups and weights None.
    """

    n: int
    m: int
    kind: str
    rank: int
    rows: np.ndarray
    groups: np.ndarray | None
    weights: np.ndarray | None

    @property
    def _what(self) -> str:
        return "lower bound"

    @property
    def _shape(self) -> tuple[int, int]:
        return self.n, self.m


def read_lower(source: str | os.PathLike | bytes, *, max_bytes: int = MAX_FILE) -> LowerClaim:
    """Read a lower bound from a path or from its bytes. MalformedCertificate names the rule it breaks.

    OSError passes through when the path cannot be read at all.
    """
    fields, arrays = read_file(source, read_lower_fields, _lower_tensors, max_bytes)
    return _lower_claim(fields, arrays)


def read_bracket(source: str | os.PathLike | bytes, *, max_bytes: int = MAX_FILE) -> tuple[Claim, LowerClaim]:
    """Read the two ends of a bracket, a certificate and a lower bound about one head and eps, as `read_lower` does."""
    fields, arrays = read_file(
        source,
        read_bracket_fields,
        lambda f: certificate_tensors(f) | _lower_tensors(_lower_end(f)),
        max_bytes,
    )
    upper = {name: arrays.pop(name) for name in ("left", "right", "log_normaliser")}
    return Claim(**statement_fields(fields), **upper), _lower_claim(_lower_end(fields), arrays)


def read_lower_fields(text: str) -> dict:
    """The fields of a lower bound's metadata string, each as FORMAT.md wants it, or MalformedCertificate."""
    fields = take_mask(take_fields(text, LOWER_FORMAT, LOWER_VERSION, LOWER_FIELDS))
    _require_counts(fields)
    return fields


def read_bracket_fields(text: str) -> dict:
    """The fields of a bracket's metadata string, each as FORMAT.md wants it, or MalformedCertificate."""
    fields = take_mask(take_fields(text, BRACKET_FORMAT, BRACKET_VERSION, BRACKET_FIELDS))
    _require_counts(_lower_end(fields))
    return fields


def _lower_end(fields: dict) -> dict:
    """The fields of a bracket as those of its lower bound."""
    return fields | {name: fields[f"lower_{name}"] for name in ("kind", "rank", "method", "details")}


def _require_counts(fields: dict) -> None:
    if fields["kind"] == "bernstein":
        require(fields["row_count"] == fields["rank"], "row_count", "must be the rank in a bernstein witness")
    else:
        require(fields["group_count"] == 0, "group_count", "must be 0 in a leakage witness")


def _lower_tensors(fields: dict) -> dict[str, Tensor]:
    rows = {"rows": Tensor((fields["row_count"],), ("I32",))}
    if fields["kind"] == "leakage":
        return rows
    return rows | {
        "groups": Tensor((fields["m"],), ("I32",)),
        "weights": Tensor((fields["group_count"], fields["row_count"]), ("I8", "I16")),
    }


def _lower_claim(fields: dict, arrays: dict[str, np.ndarray]) -> LowerClaim:
    rows, groups, weights = (arrays.get(name) for name in ("rows", "groups", "weights"))
    increasing = bool((rows[1:] > rows[:-1]).all())
    inside = not rows.size or (0 <= rows[0] and rows[-1] < fields["n"])
    require(increasing and inside, "rows", f"must increase, from 0 to {fields['n'] - 1} at most")
    if groups is not None:
        known = bool(((-1 <= groups) & (groups < fields["group_count"])).all())
        require(known, "groups", f"must be -1 or from 0 to {fields['group_count'] - 1}")
    return LowerClaim(
        **statement_fields(fields),
        **{name: fields[name] for name in ("n", "m", "kind", "rank")},
        rows=rows,
        groups=groups,
        weights=weights,
    )
