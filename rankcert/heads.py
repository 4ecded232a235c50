"""Attention heads in files: reading one or all, and the real ones shipped with the package."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from rankcert.errors import InvalidInput

__all__ = ["EXAMPLES", "Head", "example_head", "read_arrays", "read_head", "read_heads", "read_npy"]

EXAMPLES = ("diffuse", "peaked", "causal")
ZIP_STARTS = (b"PK\x03\x04", b"PK\x05\x06")
NAMES = {"q": ("Q", "q"), "k": ("K", "k")}


@dataclass(frozen=True, eq=False)
class Head:
    """One head as it stands in a file: q (n, d), k (m, d), and what else the file says (None: it does not)."""

    q: np.ndarray
    k: np.ndarray
    scale: float | None = None
    key_bias: np.ndarray | None = None
    causal: bool | None = None
    offset: int | None = None
    origin: str = ""

    def options(self) -> dict:
        """Keyword arguments for `certify`, `verify`, `audit`: only what the file says."""
        named = {name: getattr(self, name) for name in ("scale", "key_bias", "causal", "offset")}
        return {name: value for name, value in named.items() if value is not None}


def example_head(name: str = "diffuse") -> Head:
    """A small real head shipped with the package: "diffuse", "peaked" (both bidirectional) or "causal".

    `origin` says which model, layer, head and text it comes from; licences: rankcert/data/README.md.

    >>> import rankcert
    >>> rankcert.example_head("causal").q.shape
    (256, 64)
    """
    if name not in EXAMPLES:
        raise InvalidInput(f"the example heads are {', '.join(EXAMPLES)}; got {name!r}")
    with resources.as_file(resources.files("rankcert") / "data" / f"{name}.npz") as path:
        return read_head([path])


def read_head(paths: Sequence[str | os.PathLike], layer: int | None = None, head: int | None = None) -> Head:
    """Read one head from an .npz or .safetensors file, or from two .npy files (queries, then keys).

    A file names its arrays Q and K (or q and k), 2-D (n, d), or with leading axes (heads,) or (layers, heads) of
    which `layer` and `head` choose one by position; `scale`, `causal`, `offset` and `key_bias` are read when there.
    .npy files are memory-mapped. Raises InvalidInput, naming the file.
    """
    arrays, where = _open(paths)
    q, k = (
        _choose(_named(arrays, names, where), layer, head, f"{names[0]} of {where}")
        for names in NAMES.values()
    )
    return Head(q, k, **_said(arrays, where))


def read_heads(paths: Sequence[str | os.PathLike]) -> dict[tuple[int, int], Head]:
    """Read all heads of the files that `read_head` reads: {(layer, head): Head}, layer by layer.

    Q and K have the same leading axes; what else the file says holds for every head. Layers and heads are called by
    their positions, or as arrays of integers `layers` (one for each layer) and `heads` (one for each head, or for each
    layer and head) say. A head's q and k are views of the file's arrays. Raises InvalidInput, naming the file.
    """
    arrays, where = _open(paths)
    q, k = (_named(arrays, names, where) for names in NAMES.values())
    for name, array in (("Q", q), ("K", k)):
        if array.ndim not in (2, 3, 4):
            raise InvalidInput(_unshaped(f"{name} of {where}", array))
    if q.shape[:-2] != k.shape[:-2]:
        raise InvalidInput(f"Q and K of {where} must have the same leading axes, got {q.shape} and {k.shape}")
    count = (1,) * (4 - q.ndim) + q.shape[:-2]
    q, k = (array.reshape(count + array.shape[-2:]) for array in (q, k))
    layers = _numbers(arrays, "layers", [(count[0], 1)], count, where)
    heads = _numbers(arrays, "heads", [(1, count[1]), count], count, where)
    said = _said(arrays, where)
    found = {(int(layers[at]), int(heads[at])): Head(q[at], k[at], **said) for at in np.ndindex(*count)}
    if not found:
        raise InvalidInput(f"{where} holds no head: Q has shape {q.shape}")
    if len(found) < count[0] * count[1]:
        raise InvalidInput(f"layers and heads of {where} give two heads the same name")
    return found


def read_arrays(path: str | os.PathLike) -> Mapping[str, np.ndarray]:
    """All arrays of an .npz or .safetensors file (never pickled objects); InvalidInput if it is not one."""
    path = Path(path)
    with _refusing(path), open(path, "rb") as file:
        if path.suffix.lower() == ".safetensors":
            return _read_safetensors(path)
        if file.read(4) not in ZIP_STARTS:  # NumPy would take it for a pickle, and advise to allow that
            raise ValueError("not a zip archive")
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}


def read_npy(path: str | os.PathLike, *, memory_map: bool = False) -> np.ndarray:
    """The array of an .npy file (never pickled objects); InvalidInput if it is not one."""
    path = Path(path)
    with _refusing(path):
        if memory_map:
            return np.lib.format.open_memmap(path, mode="r")
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    import safetensors

    with safetensors.safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}
        said = file.metadata() or {}
    scalars = ("scale", "causal", "offset")
    return {name: np.asarray(json.loads(said[name])) for name in scalars if name in said} | arrays


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Whatever a library raises over a file becomes one InvalidInput that names the file."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # every library has its own idea of a broken file
        kind = path.suffix or "array"
        raise InvalidInput(f"{path} is not a readable {kind} file: {str(error)[:200]}") from None


def _open(paths: Sequence[str | os.PathLike]) -> tuple[Mapping[str, np.ndarray], str]:
    """The arrays of one .npz or .safetensors file, or those of two .npy files as q and k; and what to call them."""
    paths = [Path(path) for path in paths]
    suffixes = [path.suffix.lower() for path in paths]
    if suffixes == [".npy", ".npy"]:
        arrays = {"q": read_npy(paths[0], memory_map=True), "k": read_npy(paths[1], memory_map=True)}
    elif suffixes in ([".npz"], [".safetensors"]):
        arrays = read_arrays(paths[0])
    else:
        shown = " ".join(map(str, paths)) or "nothing"
        raise InvalidInput(
            f"expected one .npz or .safetensors file, or two .npy files (queries, keys); got {shown}"
        )
    return arrays, str(paths[0])


def _said(arrays: Mapping[str, np.ndarray], where: str) -> dict:
    """What a file says beside queries and keys, as fields of a Head."""
    bias, origin = arrays.get("key_bias"), arrays.get("origin")
    return {
        "scale": _scalar(arrays, "scale", float, where),
        "key_bias": None if bias is None else np.asarray(bias),
        "causal": _scalar(arrays, "causal", bool, where),
        "offset": _scalar(arrays, "offset", int, where),
        "origin": where if origin is None else str(origin),
    }


def _numbers(
    arrays: Mapping[str, np.ndarray],
    name: str,
    shapes: Sequence[tuple[int, int]],
    count: tuple[int, int],
    where: str,
) -> np.ndarray:
    """What a file calls its layers or heads, for each of both: as many numbers as one of the shapes has."""
    if name not in arrays:
        return np.indices(count)[("layers", "heads").index(name)]
    numbers = np.asarray(arrays[name])
    for shape in shapes:
        if numbers.dtype.kind in "iu" and numbers.size == shape[0] * shape[1]:
            return np.broadcast_to(numbers.reshape(shape), count)
    raise InvalidInput(
        f"{name} in {where} must be integers, one for each of {count[0]} layers and {count[1]} heads; "
        f"got {numbers.dtype} of shape {numbers.shape}"
    )


def _unshaped(what: str, array: np.ndarray) -> str:
    return f"{what} must be (n, d), (heads, n, d) or (layers, heads, n, d), got {array.shape}"


def _named(arrays: Mapping[str, np.ndarray], names: Sequence[str], where: str) -> np.ndarray:
    found = [name for name in names if name in arrays]
    if len(found) != 1:
        raise InvalidInput(
            f"{where} must hold one array named {' or '.join(names)}; it holds {sorted(arrays)}"
        )
    return arrays[found[0]]


def _choose(array: np.ndarray, layer: int | None, head: int | None, what: str) -> np.ndarray:
    indices = {2: (), 3: (("head", head),), 4: (("layer", layer), ("head", head))}.get(array.ndim)
    if indices is None:
        raise InvalidInput(_unshaped(what, array))
    if (layer is not None and array.ndim < 4) or (head is not None and array.ndim < 3):
        raise InvalidInput(f"{what} has shape {array.shape}: there is no layer or head to choose")
    for name, index in indices:
        count = array.shape[0]
        if index is None:
            raise InvalidInput(f"{what} has shape {array.shape}: choose one with {name} (0 to {count - 1})")
        if not 0 <= index < count:
            raise InvalidInput(f"{what} has {name} 0 to {count - 1}, got {index}")
        array = array[index]
    return array


def _scalar(arrays: Mapping[str, np.ndarray], name: str, kind: type, where: str):
    if name not in arrays:
        return None
    value = np.asarray(arrays[name])
    kinds = {float: "fiu", int: "iu", bool: "b"}[kind]
    if value.ndim or value.dtype.kind not in kinds:
        raise InvalidInput(
            f"{name} in {where} must be one {kind.__name__}, got {value.dtype} of shape {value.shape}"
        )
    return kind(value)
