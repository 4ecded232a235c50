"""The caller's arrays, read once and exactly: what every statement of the checker is about.

Reading converts to float64 without rounding, removes what a mask hides, and refuses what has no meaning.
The SHA-256 digests bind a certificate to these values (FORMAT.md, "Binding").
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rankcert.checker.errors import InvalidInput
from rankcert.checker.kernel import require_safe_arithmetic

__all__ = ["SIZE_LIMIT", "Inputs", "exact_float64", "read_inputs"]

SIZE_LIMIT = 2**30  # rows, columns, head width and rank (guard G)
VALUE_LIMIT = 2.0**100  # |scale|, norms of queries and keys, key biases from above (guard G)


@dataclass(frozen=True, eq=False)
class Inputs:
    """One attention head as the checker sees it: exact float64, hidden keys zeroed, rows all non-empty.

    `key_bias` is always an array (zeros where the caller gave none); -inf marks a masked key.
    """

    query: np.ndarray
    key: np.ndarray
    key_bias: np.ndarray
    scale: float
    causal: bool
    offset: int

    @property
    def n(self) -> int:
        """Number of queries."""
        return self.query.shape[0]

    @property
    def m(self) -> int:
        """Number of keys."""
        return self.key.shape[0]

    @property
    def d(self) -> int:
        """Head width."""
        return self.query.shape[1]

    @cached_property
    def reach(self) -> np.ndarray:
        """For each row the number of leading keys it is allowed to see (int64; all m unless causal)."""
        return _reach(self.n, self.m, self.causal, self.offset)

    @cached_property
    def kept_keys(self) -> np.ndarray:
        """For each key whether some row keeps it: unmasked and within reach of the last row."""
        return _kept_keys(self.key_bias, self.reach)

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the queries, keys and biases, and of all of them together with scale and mask."""
        parts = {
            "query_sha256": _array_digest(self.query),
            "key_sha256": _array_digest(self.key),
            "key_bias_sha256": _array_digest(self.key_bias),
        }
        whole = hashlib.sha256(b"rankcert inputs 1\n")
        for digest in parts.values():
            whole.update(bytes.fromhex(digest))
        whole.update(struct.pack("<d?q", self.scale, self.causal, self.offset))
        return parts | {"inputs_sha256": whole.hexdigest()}


def exact_float64(name: str, values, ndim: int) -> np.ndarray:
    """`values` as a C-ordered float64 array holding exactly the same numbers, or InvalidInput."""
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidInput(f"{name} is a masked array; pass plain values and mask keys with key_bias=-inf")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{name} is not an array of numbers: {error}") from None
    if array.ndim != ndim:
        hint = "; for files of many heads use `rankcert heads`" if array.ndim > ndim == 2 else ""
        raise InvalidInput(f"{name} must be {ndim}-D (one head), got shape {array.shape}{hint}")
    kind, size = array.dtype.kind, array.dtype.itemsize
    if not ((kind == "f" and size <= 8) or kind in "iu"):
        raise InvalidInput(f"{name} must be integer, float16, float32 or float64, got dtype {array.dtype}")
    if kind in "iu" and size == 8 and array.size and max(int(array.max()), -int(array.min())) > 2**53:
        raise InvalidInput(f"{name} has an integer beyond 2**53, which float64 cannot hold exactly")
    if max(array.shape, default=0) > SIZE_LIMIT:
        raise InvalidInput(f"{name} has shape {array.shape}; no side may exceed 2**30")
    return np.asarray(array, dtype=np.float64, order="C")


def read_inputs(q, k, *, scale=None, key_bias=None, causal=False, offset=0) -> Inputs:
    """Read one head. `scale` None means 1/sqrt(d); `key_bias` None means none.

    Raises InvalidInput, naming the argument, what was passed and what was expected.
    """
    require_safe_arithmetic()  # before converting: under DAZ a subnormal float32 would become 0
    query = exact_float64("q", q, 2)
    key = exact_float64("k", k, 2)
    n, d = query.shape
    m = key.shape[0]
    if d == 0 or key.shape[1] == 0:
        raise InvalidInput(
            f"q and k need at least one column (head width d >= 1), got {query.shape} and {key.shape}"
        )
    if key.shape[1] != d:
        raise InvalidInput(f"q and k must have the same width, got q {query.shape} and k {key.shape}")
    if m == 0:
        raise InvalidInput(f"k has no rows (shape {key.shape}); a softmax needs at least one key")
    scale = _read_scale(scale, d)
    causal, offset = _read_mask(causal, offset)
    bias = _read_bias(key_bias, m)
    reach = _reach(n, m, causal, offset)
    _refuse_empty_rows(bias, reach)
    kept = _kept_keys(bias, reach)
    if not kept.all():
        key = np.where(kept[:, None], key, 0.0)  # selection, so that NaN in a hidden key goes nowhere
    _refuse_wild_values("q", query)
    _refuse_wild_values("k", key, "kept key")
    return Inputs(_frozen(query), _frozen(key), _frozen(bias), scale, causal, offset)


def _frozen(array: np.ndarray) -> np.ndarray:
    view = array.view()  # the caller's own array may lie below: its flags are not ours to change
    view.flags.writeable = False
    return view


def _read_scale(scale, d: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(d)
    value = exact_float64("scale", scale, 0)
    if not abs(value) <= VALUE_LIMIT:
        raise InvalidInput(f"scale must be a finite number of size at most 2**100, got {scale!r}")
    return float(value)


def _read_mask(causal, offset) -> tuple[bool, int]:
    if not isinstance(causal, (bool, np.bool_)):
        raise InvalidInput(f"causal must be True or False, got {causal!r}")
    if isinstance(offset, (bool, np.bool_)) or not isinstance(offset, (int, np.integer)):
        raise InvalidInput(f"offset must be an integer, got {offset!r}")
    if not causal and offset != 0:
        raise InvalidInput(f"offset={offset} has a meaning only with causal=True")
    if abs(int(offset)) > SIZE_LIMIT:
        raise InvalidInput(f"offset must lie within +-2**30, got {offset}")
    return bool(causal), int(offset)


def _read_bias(key_bias, m: int) -> np.ndarray:
    if key_bias is None:
        return np.zeros(m)
    bias = exact_float64("key_bias", key_bias, 1)
    if bias.shape != (m,):
        raise InvalidInput(f"key_bias must have one number per key, shape ({m},), got {bias.shape}")
    bad = ~(bias <= VALUE_LIMIT)
    if bad.any():
        j = int(np.argmax(bad))
        raise InvalidInput(f"key_bias[{j}] is {bias[j]}; a bias is at most 2**100 (-inf masks a key)")
    return bias + 0.0  # a copy; -0.0 becomes 0.0, so that equal problems have equal digests


def _reach(n: int, m: int, causal: bool, offset: int) -> np.ndarray:
    if not causal:
        return np.full(n, m, dtype=np.int64)
    return np.clip(np.arange(n, dtype=np.int64) + (offset + 1), 0, m)


def _kept_keys(bias: np.ndarray, reach: np.ndarray) -> np.ndarray:
    furthest = int(reach[-1]) if reach.size else bias.size
    return (bias > -np.inf) & (np.arange(bias.size) < furthest)


def _refuse_empty_rows(bias: np.ndarray, reach: np.ndarray) -> None:
    unmasked_before = np.concatenate([[0], np.cumsum(bias > -np.inf)])
    empty = unmasked_before[reach] == 0
    if empty.any():
        i = int(np.argmax(empty))
        why = "every key is masked" if reach[i] == bias.size else f"it may see the first {reach[i]} keys only"
        raise InvalidInput(f"row {i} keeps no key ({why}); its softmax is undefined")


def _refuse_wild_values(name: str, rows: np.ndarray, what: str = "row") -> None:
    for start in range(0, rows.shape[0], 4096):  # by blocks: no temporary of the array's own size
        block = rows[start : start + 4096]
        norms = np.sqrt((block * block).sum(axis=1))
        bad = ~(norms <= VALUE_LIMIT)
        if bad.any():
            i = start + int(np.argmax(bad))
            fault = "has norm beyond 2**100" if np.isfinite(rows[i]).all() else "is not finite"
            raise InvalidInput(f"{name} must be finite and of norm at most 2**100: {what} {i} {fault}")


def _array_digest(array: np.ndarray) -> str:
    digest = hashlib.sha256(struct.pack(f"<{array.ndim + 1}q", array.ndim, *array.shape))
    digest.update(np.ascontiguousarray(array, dtype="<f8"))
    return digest.hexdigest()
