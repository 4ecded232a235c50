"""Heads in files: what is read, and that whatever cannot be read is one InvalidInput naming the file."""

import io
import pickle
import re
import zipfile

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from rankcert.errors import InvalidInput
from rankcert.heads import EXAMPLES, Head, example_head, read_arrays, read_head, read_heads

Q = np.arange(6.0).reshape(3, 2)
K = np.arange(8.0).reshape(4, 2) - 3.0
STACK = np.arange(2.0 * 5 * 4 * 2).reshape(2, 5, 4, 2)


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    """Every test runs in its own directory and names files without a path."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, metadata: dict | None = None, **arrays) -> str:
    if name.endswith(".npz"):
        np.savez(name, **arrays)
    else:
        safetensors.numpy.save_file(
            {key: np.asarray(value, order="C") for key, value in arrays.items()}, name, metadata=metadata
        )
    return name


def refused(paths, **options) -> str:
    """The message of the one InvalidInput that reading raises; on one line, naming the file."""
    with pytest.raises(InvalidInput) as caught:
        read_head(paths, **options)
    message = str(caught.value)
    assert type(caught.value) is InvalidInput
    assert caught.value.__context__ is None or caught.value.__suppress_context__  # one error, not a chain
    assert paths[0] in message and "\n" not in message and len(message) < 400
    return message


both_formats = pytest.mark.parametrize("name", ["head.npz", "head.safetensors"])


# What is read


@both_formats
@pytest.mark.parametrize("names", [("Q", "K"), ("q", "k"), ("Q", "k")])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int32])
def test_a_plain_head(name, names, dtype):
    write(name, **{names[0]: Q.astype(dtype), names[1]: K.astype(dtype)})
    found = read_head([name])
    assert isinstance(found, Head) and found.options() == {} and found.origin == name
    for array, expected in ((found.q, Q), (found.k, K)):
        assert array.dtype == dtype and not isinstance(array, np.memmap)
        np.testing.assert_array_equal(array, expected)


@both_formats
def test_positions_choose_from_leading_axes(name):
    write(name, Q=STACK, K=-STACK)
    for layer in range(2):
        for head in range(5):
            found = read_head([name], layer=layer, head=head)
            np.testing.assert_array_equal(found.q, STACK[layer, head])
            np.testing.assert_array_equal(found.k, -STACK[layer, head])
    write(name, Q=STACK[0], K=STACK[1, :, :3])
    found = read_head([name], head=4)
    np.testing.assert_array_equal(found.q, STACK[0, 4])
    np.testing.assert_array_equal(found.k, STACK[1, 4, :3])


def test_npy_files_are_queries_then_keys_and_mapped(inside):
    np.save("first.npy", Q)
    np.save("second.npy", np.asfortranarray(STACK[0]))
    found = read_head(["first.npy", "first.npy"])
    assert isinstance(found.q, np.memmap) and found.options() == {} and found.origin == "first.npy"
    found = read_head(["second.npy", inside / "second.npy"], head=1)
    np.testing.assert_array_equal(found.q, STACK[0, 1])
    np.testing.assert_array_equal(found.k, STACK[0, 1])


@pytest.mark.parametrize(
    "extra, expected",
    [
        ({"scale": 0.25}, {"scale": 0.25}),
        ({"scale": np.float32(0.25)}, {"scale": 0.25}),
        ({"scale": 2}, {"scale": 2.0}),
        ({"causal": True}, {"causal": True}),
        ({"causal": False}, {"causal": False}),
        ({"causal": True, "offset": 3}, {"causal": True, "offset": 3}),
        ({"causal": True, "offset": np.int16(-3)}, {"causal": True, "offset": -3}),
        ({"other": Q, "note": "text"}, {}),
    ],
)
def test_options_in_an_npz(extra, expected):
    found = read_head([write("head.npz", Q=Q, K=K, **extra)]).options()
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in expected.items()
    }


def test_key_bias_and_origin():
    bias = np.array([0.0, -np.inf, 1.0, 2.0])
    for name in ("head.npz", "head.safetensors"):
        found = read_head([write(name, Q=Q, K=K, key_bias=bias)])
        np.testing.assert_array_equal(found.key_bias, bias)
        assert set(found.options()) == {"key_bias"}
    assert read_head([write("head.npz", Q=Q, K=K, origin="layer 3")]).origin == "layer 3"


def test_options_in_a_safetensors_file():
    said = {"scale": "0.25", "causal": "true", "offset": "3", "model": "any"}
    name = write("head.safetensors", metadata=said, Q=Q, K=K)
    assert read_head([name]).options() == {"scale": 0.25, "causal": True, "offset": 3}
    # arrays of these names come before the metadata
    name = write("head.safetensors", metadata=said, Q=Q, K=K, scale=np.array(0.5), causal=np.array(False))
    assert read_head([name]).options() == {"scale": 0.5, "causal": False, "offset": 3}


def test_suffixes_in_capitals_are_the_same_formats():
    write("head.npz", Q=Q, K=K)
    with open("head.npz", "rb") as source, open("HEAD.NPZ", "wb") as target:
        target.write(source.read())
    np.testing.assert_array_equal(read_head(["HEAD.NPZ"]).q, Q)


@pytest.mark.parametrize("name", EXAMPLES)
def test_shipped_heads(name):
    found = example_head(name)
    assert found.q.ndim == found.k.ndim == 2 and found.q.shape[1] == found.k.shape[1]
    assert np.isfinite(found.q).all() and np.isfinite(found.k).all()
    assert found.scale is not None and found.origin and not found.origin.endswith(".npz")
    assert bool(found.causal) == (name == "causal")


def test_unknown_example():
    with pytest.raises(InvalidInput, match="the example heads are diffuse, peaked, causal; got 'sharp'"):
        example_head("sharp")


# What is refused


@pytest.mark.parametrize(
    "paths, shown",
    [
        (["head.csv"], "head.csv"),
        (["head"], "head"),
        (["one.npy"], "one.npy"),
        (["1.npy", "2.npy", "3.npy"], "1.npy 2.npy 3.npy"),
        (["1.npz", "2.npz"], "1.npz 2.npz"),
        (["1.npy", "2.npz"], "1.npy 2.npz"),
        (["."], "."),
    ],
)
def test_other_files(paths, shown):
    message = refused(paths)
    assert (
        message == f"expected one .npz or .safetensors file, or two .npy files (queries, keys); got {shown}"
    )


def test_no_file():
    with pytest.raises(InvalidInput, match=r"got nothing$"):
        read_head([])


@pytest.mark.parametrize("paths", [["absent.npz"], ["absent.safetensors"], ["absent.npy", "absent.npy"]])
def test_absent_files(paths):
    assert refused(paths).startswith(f"cannot read {paths[0]}: No such file or directory")


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK", b"\x80\x04N."])
def test_an_npz_that_is_no_archive(content, inside):
    """Empty, text, a cut-off archive, a pickle: nobody is advised to allow pickles."""
    (inside / "head.npz").write_bytes(content)
    assert refused(["head.npz"]) == "head.npz is not a readable .npz file: not a zip archive"
    np.save("array.npy", Q)
    (inside / "array.npy").rename("head.npz")
    assert refused(["head.npz"]) == "head.npz is not a readable .npz file: not a zip archive"


def test_the_second_of_two_files_is_named_too():
    np.save("q.npy", Q)
    with pytest.raises(InvalidInput, match=r"^cannot read k\.npy: No such file"):
        read_head(["q.npy", "k.npy"])


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "npy"])
def test_directories(suffix, inside):
    (inside / f"d.{suffix}").mkdir()
    assert refused([f"d.{suffix}"] * (2 if suffix == "npy" else 1)).startswith(f"cannot read d.{suffix}: ")


@both_formats
@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"Q": Q}, "must hold one array named K or k; it holds ['Q']"),
        ({"K": K}, "must hold one array named Q or q; it holds ['K']"),
        ({"query": Q, "key": K}, "must hold one array named Q or q; it holds ['key', 'query']"),
        ({"Q": Q, "q": Q, "K": K}, "must hold one array named Q or q; it holds ['K', 'Q', 'q']"),
    ],
)
def test_missing_and_ambiguous_arrays(name, arrays, message):
    assert refused([write(name, **arrays)]) == f"{name} {message}"


@both_formats
@pytest.mark.parametrize("shape", [(), (6,), (1, 1, 1, 3, 2)])
def test_arrays_of_other_dimension(name, shape):
    write(name, Q=np.ones(shape), K=K)
    assert (
        refused([name]) == f"Q of {name} must be (n, d), (heads, n, d) or (layers, heads, n, d), got {shape}"
    )
    write(name, Q=Q, K=np.ones(shape))
    assert refused([name]).startswith(f"K of {name} must be (n, d)")


@both_formats
@pytest.mark.parametrize(
    "axes, choice, message",
    [
        (0, {"layer": 0}, "has shape (4, 2): there is no layer or head to choose"),
        (0, {"head": 0}, "has shape (4, 2): there is no layer or head to choose"),
        (1, {"layer": 0, "head": 0}, "has shape (5, 4, 2): there is no layer or head to choose"),
        (1, {}, "has shape (5, 4, 2): choose one with head (0 to 4)"),
        (1, {"head": 5}, "has head 0 to 4, got 5"),
        (1, {"head": -1}, "has head 0 to 4, got -1"),
        (2, {}, "has shape (2, 5, 4, 2): choose one with layer (0 to 1)"),
        (2, {"head": 0}, "has shape (2, 5, 4, 2): choose one with layer (0 to 1)"),
        (2, {"layer": 1}, "has shape (5, 4, 2): choose one with head (0 to 4)"),
        (2, {"layer": 2, "head": 0}, "has layer 0 to 1, got 2"),
        (2, {"layer": -1, "head": 0}, "has layer 0 to 1, got -1"),
        (2, {"layer": 0, "head": 5}, "has head 0 to 4, got 5"),
    ],
)
def test_positions_out_of_range(name, axes, choice, message):
    stack = STACK[(0,) * (2 - axes)]
    write(name, Q=stack, K=stack)
    assert refused([name], **choice) == f"Q of {name} {message}"


def test_keys_that_have_no_such_head():
    write("head.npz", Q=STACK[0], K=STACK[0, :2])
    assert refused(["head.npz"], head=3) == "K of head.npz has head 0 to 1, got 3"
    write("head.npz", Q=STACK[0], K=K)
    assert refused(["head.npz"], head=3).startswith("K of head.npz has shape (4, 2): there is no")


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"scale": [0.5]}, "scale in head.npz must be one float, got float64 of shape (1,)"),
        ({"scale": "0.5"}, "scale in head.npz must be one float, got <U3 of shape ()"),
        ({"scale": True}, "scale in head.npz must be one float, got bool of shape ()"),
        ({"scale": 1j}, "scale in head.npz must be one float, got complex128 of shape ()"),
        ({"causal": 1}, "causal in head.npz must be one bool, got int64 of shape ()"),
        ({"causal": [True]}, "causal in head.npz must be one bool, got bool of shape (1,)"),
        ({"offset": 1.0}, "offset in head.npz must be one int, got float64 of shape ()"),
        ({"offset": True}, "offset in head.npz must be one int, got bool of shape ()"),
    ],
)
def test_options_of_the_wrong_kind(extra, message):
    extra = {name: np.asarray(value, dtype=np.int64 if value == 1 and value is not True and isinstance(value, int)
                              else None) for name, value in extra.items()}  # fmt: skip
    assert refused([write("head.npz", Q=Q, K=K, **extra)]) == message


@pytest.mark.parametrize(
    "said",
    [
        {"scale": "half"},
        {"scale": ""},
        {"scale": "[1.0]"},
        {"scale": "{}"},
        {"scale": "null"},
        {"scale": '"1.0"'},
        {"scale": "1" * 5000},
        {"scale": "[" * 50000},
        {"causal": "True"},
        {"causal": "1"},
        {"offset": "1.0"},
        {"offset": "1" * 30},
    ],
)
def test_metadata_of_the_wrong_kind(said):
    message = refused([write("head.safetensors", metadata=said, Q=Q, K=K)])
    assert message.startswith("head.safetensors is not a readable") or re.match(
        r"\w+ in head\.safetensors must be one (float|bool|int), got ", message
    )


OBJECTS = np.array([[1.0, None], [2.0, "x"]], dtype=object)


class Bomb:
    """Unpickling this would leave a file behind."""

    def __reduce__(self):
        return open, ("exploded", "w")


def test_pickled_objects_are_never_loaded(inside):
    np.savez("head.npz", Q=OBJECTS, K=K)
    np.save("q.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    np.save("k.npy", K)
    (inside / "bare.npz").write_bytes(pickle.dumps(Bomb()))
    (inside / "bare.npy").write_bytes(pickle.dumps(Bomb()))
    np.savez("bomb.npz", Q=Q, K=K, scale=np.array(Bomb(), dtype=object))
    for paths in (["head.npz"], ["q.npy", "k.npy"], ["bare.npz"], ["bare.npy", "k.npy"], ["bomb.npz"]):
        assert "is not a readable .np" in refused(paths)
    assert not (inside / "exploded").exists()


BROKEN = {
    "empty": b"",
    "text": b"Q,K\n1.0,2.0\n",
    "zeros": bytes(100),
    "npy magic": b"\x93NUMPY",
    "zip magic": b"PK\x03\x04" + bytes(40),
    "html": b"<!DOCTYPE html><html></html>",
}


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "npy"])
@pytest.mark.parametrize("what", BROKEN)
def test_files_of_another_kind(suffix, what, inside):
    (inside / f"head.{suffix}").write_bytes(BROKEN[what])
    message = refused([f"head.{suffix}"] * (2 if suffix == "npy" else 1))
    assert message.startswith(f"head.{suffix} is not a readable .{suffix} file: ")


def npy(header: str, body: bytes = bytes(48)) -> bytes:
    """A version 1.0 .npy file with this header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + body


HEADERS = {
    "unclosed": "{'descr': '<f8', 'fortran_order': False, 'shape': (3, 2)",
    "brackets": "(" * 3000,
    "quotes": "'''",
    "expression": "{'descr': '<f8', 'fortran_order': False, 'shape': (10**30, 2)}",
    "negative": "{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 2)}",
    "beyond the file": "{'descr': '<f8', 'fortran_order': False, 'shape': (1000, 1000)}",
    "beyond 64 bits": "{'descr': '<f8', 'fortran_order': False, 'shape': (1" + "0" * 30 + ", 2)}",
    "other keys": "{1: 2}",
    "unknown dtype": "{'descr': 'zz', 'fortran_order': False, 'shape': (3, 2)}",
    "call": "__import__('os').mkdir('exploded')",
}


@pytest.mark.parametrize("what", HEADERS)
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_arrays_with_a_broken_header(suffix, what, inside):
    (inside / "head.npy").write_bytes(npy(HEADERS[what]))
    np.save("k.npy", K)
    paths = ["head.npy", "k.npy"]
    if suffix == "npz":
        with zipfile.ZipFile("head.npz", "w") as archive:
            archive.write("head.npy", "Q.npy")
            archive.write("k.npy", "K.npy")
        paths = ["head.npz"]
    assert refused(paths).startswith(f"head.{suffix} is not a readable .{suffix} file: ")
    assert not (inside / "exploded").exists()


def test_an_archive_under_the_name_of_an_array(inside):
    np.savez("head.npz", Q=Q, K=K)
    (inside / "head.npz").rename("head.npy")
    assert refused(["head.npy", "head.npy"]).startswith("head.npy is not a readable .npy file: ")


def test_an_array_under_the_name_of_an_archive(inside):
    np.save("head.npy", Q)
    (inside / "head.npy").rename("head.npz")
    assert refused(["head.npz"]).startswith("head.npz is not a readable .npz file: ")


def contents(suffix: str) -> bytes:
    buffer = io.BytesIO()
    if suffix == "npz":
        np.savez(buffer, Q=Q, K=K, scale=0.5)
    elif suffix == "npy":
        np.save(buffer, Q)
    else:
        return safetensors.numpy.save({"Q": Q, "K": K}, metadata={"scale": "0.5"})
    return buffer.getvalue()


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "npy"])
def test_every_truncation(suffix, inside):
    whole = contents(suffix)
    path = inside / f"head.{suffix}"
    for stop in [*range(0, len(whole), 11), *range(len(whole) - 25, len(whole))]:
        path.write_bytes(whole[:stop])
        refused([path.name] * (2 if suffix == "npy" else 1))


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "npy"])
def test_random_damage_is_refused_or_read(suffix, inside):
    whole = contents(suffix)
    path = inside / f"head.{suffix}"

    @settings(max_examples=150)
    @given(
        st.lists(
            st.tuples(st.integers(0, len(whole)), st.integers(0, 3), st.binary(max_size=3)),
            min_size=1,
            max_size=3,
        )
    )
    def check(edits):
        data = whole
        for start, drop, new in edits:
            data = data[:start] + new + data[start + drop :]
        path.write_bytes(data)
        try:
            found = read_head([path.name] * (2 if suffix == "npy" else 1))
        except InvalidInput as error:
            assert path.name in str(error)
        else:
            assert found.q.ndim == found.k.ndim == 2

    check()


@both_formats
def test_read_arrays_reads_all_of_them(name):
    write(name, left=Q, right=K)
    found = read_arrays(name)
    assert set(found) == {"left", "right"}
    np.testing.assert_array_equal(found["left"], Q)
    with pytest.raises(InvalidInput, match=r"^cannot read absent\.npz: No such file or directory$"):
        read_arrays("absent.npz")


# All heads of a file


@both_formats
def test_all_heads_in_order(name):
    write(name, Q=STACK, K=STACK + 1, scale=0.5, causal=True, key_bias=np.arange(4.0))
    found = read_heads([name])
    assert list(found) == [(layer, head) for layer in range(2) for head in range(5)]
    for (layer, head), one in found.items():
        alone = read_head([name], layer, head)
        assert np.array_equal(one.q, alone.q) and np.array_equal(one.k, alone.k)
        assert one.options().keys() == {"scale", "causal", "key_bias"} and one.origin == name


def test_fewer_axes_are_one_layer_and_one_head():
    write("three.npz", Q=STACK[0], K=STACK[1])
    write("two.npz", Q=Q, K=K)
    assert list(read_heads(["three.npz"])) == [(0, head) for head in range(5)]
    ((place, head),) = read_heads(["two.npz"]).items()
    assert place == (0, 0) and np.array_equal(head.q, Q) and np.array_equal(head.k, K)
    np.save("q.npy", STACK)
    np.save("k.npy", STACK)
    mapped = read_heads(["q.npy", "k.npy"])
    assert len(mapped) == 10 and isinstance(mapped[1, 4].q, np.memmap)


def test_heads_are_views_of_what_was_read():
    write("heads.npz", Q=STACK, K=STACK)
    assert all(
        head.q.base is not None and head.k.base is not None for head in read_heads(["heads.npz"]).values()
    )


@pytest.mark.parametrize(
    "shape, layers, heads, places",
    [
        ((2, 2), [4, 9], None, [(4, 0), (4, 1), (9, 0), (9, 1)]),
        ((2, 2), None, [5, 3], [(0, 5), (0, 3), (1, 5), (1, 3)]),
        ((3, 1), [0, 8, 16], [1, 7, 5], [(0, 1), (8, 7), (16, 5)]),
        ((2, 2), [1, 1], [[0, 1], [2, 3]], [(1, 0), (1, 1), (1, 2), (1, 3)]),
    ],
)
def test_names_of_layers_and_heads(shape, layers, heads, places):
    names = {"layers": layers, "heads": heads}
    names = {name: np.array(value) for name, value in names.items() if value is not None}
    stack = np.arange(shape[0] * shape[1] * 6.0).reshape(*shape, 3, 2)
    write("heads.npz", Q=stack, K=stack, **names)
    found = read_heads(["heads.npz"])
    assert list(found) == places
    assert np.array_equal([head.q for head in found.values()], stack.reshape(-1, 3, 2))


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"Q": STACK, "K": STACK[:, :1]}, "same leading axes"),
        ({"Q": STACK, "K": STACK[0]}, "same leading axes"),
        ({"Q": np.ones(3), "K": np.ones(3)}, "Q of heads.npz must be"),
        ({"Q": Q, "K": STACK[None]}, "K of heads.npz must be"),
        ({"Q": STACK[:0], "K": STACK[:0]}, "holds no head"),
        ({"Q": STACK, "K": STACK, "layers": np.arange(3)}, "layers in heads.npz must be integers"),
        ({"Q": STACK, "K": STACK, "heads": np.arange(2)}, "heads in heads.npz must be integers"),
        ({"Q": STACK, "K": STACK, "layers": np.array(["a", "b"])}, "layers in heads.npz must be integers"),
        ({"Q": STACK, "K": STACK, "layers": np.zeros(2, int)}, "the same name"),
        ({"Q": STACK}, "one array named K or k"),
    ],
)
def test_files_of_no_heads(arrays, message):
    write("heads.npz", **arrays)
    with pytest.raises(InvalidInput, match=message) as caught:
        read_heads(["heads.npz"])
    assert "heads.npz" in str(caught.value)


def test_all_heads_of_no_file():
    for paths in ([], ["absent.npz"], ["heads.txt"]):
        with pytest.raises(InvalidInput):
            read_heads(paths)
