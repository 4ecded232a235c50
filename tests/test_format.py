"""rankcert/checker/FORMAT.md held against the code, in both directions.

The worked example is parsed out of the document; the digests are computed again in hostile/plain.py from its words;
its tables must name what claim.py names, in that order. Then: whatever is written is read back bit for bit.
"""

import base64
import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hostile.plain import EXAMPLE_K, EXAMPLE_Q, binding, draft, example
from hostile.reasons import reasons_in_the_source
from hypothesis import given
from hypothesis import strategies as st
from oracles import ball_errors

from rankcert import load, verify
from rankcert.certificates import Certificate
from rankcert.checker import claim, read_claim, read_inputs
from rankcert.errors import InvalidInput, MalformedCertificate

SPEC = Path(claim.__file__).with_name("FORMAT.md").read_text("utf-8")


def block(info: str) -> str:
    """The one fenced block with this info string."""
    (found,) = re.findall(rf"^```{info}\n(.*?)^```$", SPEC, re.M | re.S)
    return found


def column(heading: str, which: int) -> list[str]:
    """A column of the first table below a heading."""
    section = SPEC.split(f"\n## {heading}\n", 1)[1]
    table = re.search(r"^\|.*?\n\n", section, re.M | re.S).group()
    return [line.split("|")[1 + which].strip(" `") for line in table.strip().splitlines()[2:]]


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype == np.float64 and a.tobytes() == b.tobytes()


# The worked example


def test_example_is_the_bytes_its_description_says():
    data = base64.b64decode(block("base64"))
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    assert f"first eight bytes give H = {size}." in SPEC and f"The whole file, {len(data)} bytes" in SPEC
    assert json.loads(header.pop("__metadata__")["rankcert"]) == json.loads(block("json fields"))
    assert header == json.loads(block("json tensors"))
    assert data[8 + size :] == bytes.fromhex(block("hex"))
    assert data == example().to_bytes()


def test_example_is_read_as_described():
    record = read_claim(base64.b64decode(block("base64")))
    fields = json.loads(block("json fields"))
    for name in ("eps", "scale", "causal", "offset", "rank", "method", "details"):
        assert getattr(record, name) == fields[name] and type(getattr(record, name)) is type(fields[name])
    assert record.digests == {name: fields[name] for name in fields if name.endswith("_sha256")}
    assert (record.left.tolist(), record.right.tolist()) == ([[1.0], [1.0]], [[0.5], [0.5]])
    assert record.log_normaliser == pytest.approx([math.log(2 * math.cosh(0.125))] * 2, rel=1e-15)


def test_example_has_the_verdict_described():
    data = base64.b64decode(block("base64"))
    verdict = verify(data, np.array(EXAMPLE_Q), np.array(EXAMPLE_K)).to_dict()
    expected = json.loads(block("json verdict"))
    assert round(verdict["bound"], 10) == expected["bound"] == round(math.tanh(0.125), 10)
    assert {name: verdict[name] for name in expected if name != "bound"} == {
        name: value for name, value in expected.items() if name != "bound"
    }
    for low, high in ball_errors(EXAMPLE_Q, EXAMPLE_K, [[1.0]] * 2, [[0.5]] * 2, scale=1.0):
        assert low <= high and float(high) <= verdict["bound"] <= float(low) * (1 + 1e-12)
    other = verify(data, np.array(EXAMPLE_Q), np.array([[0.125], [-0.25]])).to_dict()
    expected = json.loads(block("json other inputs"))
    assert {name: other[name] for name in expected} == expected


# The tables


def test_every_reason_is_documented_and_every_documented_reason_exists():
    documented = set(column("Refusals", 1))
    assert "*the field's name*" in documented
    assert (documented - {"*the field's name*"}) | set(claim.FIELDS) == reasons_in_the_source()


def test_fields_are_documented_in_the_order_they_are_read():
    names = column("Fields", 0)
    assert names == ["format", "format_version", *claim.FIELDS]
    assert len(names) == 16 and "exactly these sixteen names" in SPEC
    assert sorted(names) == sorted(example().fields)
    assert column("Fields", 1)[1] == f"integer, {claim.FORMAT_VERSION}"


def test_numbers_in_the_text_are_those_of_the_reader():
    assert claim.MAX_HEADER == 2**16 and claim.MAX_FILE == 2**35
    assert f"at most {claim.MAX_BRACKETS} of the characters" in SPEC
    assert f"of at most {claim.MAX_DIGITS} characters" in SPEC
    section = SPEC.split("## Layout", 1)[1]
    assert re.findall(r"^\| `(left|right|log_normaliser)` \|", section, re.M) == [
        "left",
        "right",
        "log_normaliser",
    ]


# What the limits still allow


def test_limits_are_reached():
    at_limit = example()
    at_limit.fields["details"] = {"brackets": "[" * 51}  # and 13 that every header has
    assert read_claim(at_limit.to_bytes()).details == at_limit.fields["details"]
    assert Certificate(**vars(read_claim(at_limit.to_bytes()))).to_bytes()
    at_limit.fields["details"] = {"brackets": "[" * 52}
    with pytest.raises(MalformedCertificate, match="64 brackets"):
        read_claim(at_limit.to_bytes())
    at_limit.fields["details"] = {"digits": -(10**18), "most": 10**19}
    assert read_claim(at_limit.to_bytes()).details == {"digits": -(10**18), "most": 10**19}
    padded = example()
    text = padded.to_bytes()[8 : -len(padded.body)]
    padded.header_text = text + b" " * (2**16 - len(text))
    assert read_claim(padded.to_bytes()).rank == 1
    assert read_claim(example().to_bytes(), max_bytes=len(example().to_bytes())).rank == 1


def test_tensors_are_read_in_any_order_of_the_buffer():
    record = read_claim(example().to_bytes())
    for order in (("right", "left", "log_normaliser"), ("log_normaliser", "right", "left")):
        other = example()
        body = b""
        for name in order:
            start = len(body)
            body += getattr(record, name).tobytes()
            other.tensors[name]["data_offsets"] = [start, len(body)]
        other.body = body
        again = read_claim(other.to_bytes())
        for name in order:
            assert same_bits(getattr(again, name), getattr(record, name))


# Round trips

floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(
    st.characters(min_codepoint=0x20, max_codepoint=0x7E).filter(lambda c: c not in "[{"), max_size=30
)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


@st.composite
def certificates(draw) -> Certificate:
    """Any record the format can hold: all bit patterns, no queries, rank 0."""
    n, m, r = draw(st.integers(0, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    left, right, log_normaliser = (
        rng.integers(0, 2**64, size=shape, dtype=np.uint64).view(np.float64) for shape in ((n, r), (m, r), n)
    )
    causal = draw(st.booleans())
    return Certificate(
        eps=draw(st.floats(min_value=5e-324, allow_infinity=False)),
        scale=draw(floats),
        causal=causal,
        offset=draw(st.integers(-(2**30), 2**30)) if causal else 0,
        digests={name: draw(digests) for name in claim.DIGESTS},
        left=left,
        right=np.asfortranarray(right),
        log_normaliser=log_normaliser,
        method=draw(texts),
        details=draw(st.dictionaries(texts, st.integers(-(10**18), 10**18) | floats | texts, max_size=5)),
    )


def assert_same_record(a: Certificate, b) -> None:
    for name in ("eps", "scale", "causal", "offset", "digests", "method", "details"):
        assert getattr(a, name) == getattr(b, name), name
        assert type(getattr(a, name)) is type(getattr(b, name))
    assert math.copysign(1, a.scale) == math.copysign(1, b.scale)
    for name in ("left", "right", "log_normaliser"):
        assert same_bits(getattr(a, name), getattr(b, name)), name


@given(certificates())
def test_what_is_written_is_read_back(certificate):
    data = certificate.to_bytes()
    assert data == certificate.to_bytes()
    assert_same_record(certificate, read_claim(data))
    for as_type in (bytearray, memoryview):
        assert_same_record(certificate, read_claim(as_type(data)))
    tensors = safetensors.numpy.load(data)
    assert set(tensors) == {"left", "right", "log_normaliser"}
    assert all(same_bits(getattr(certificate, name), tensors[name]) for name in tensors)


def test_save_writes_the_same_bytes_and_load_reads_them(tmp_path):
    path = tmp_path / "c.safetensors"

    @given(certificates())
    def check(certificate):
        certificate.save(path)
        assert path.read_bytes() == certificate.to_bytes()
        loaded = load(path)
        assert_same_record(certificate, loaded)
        assert loaded.bound is None and loaded.row_bounds is None and loaded.candidates == ()
        assert loaded.to_bytes() == path.read_bytes()

    check()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


WRITE = """
import sys
sys.path[:0] = [{tests!r}]
from golden.make import by_svd, golden_head
details = {{name: i for i, name in enumerate("the same record gives the same bytes".split())}}
sys.stdout.buffer.write(by_svd(**golden_head(), rank=3, eps=0.5, details=details).to_bytes())
"""


def test_same_bytes_in_every_process():
    written = set()
    for seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", WRITE.format(tests=str(Path(__file__).parent))],
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": f"UTC+{seed}"},
            stdout=subprocess.PIPE,
            check=True,
        )
        written.add(done.stdout)
    assert len(written) == 1
    assert read_claim(written.pop()).rank == 3


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"details": {"a": True}}, "details"),
        ({"details": {"a": None}}, "details"),
        ({"details": {"a": {}}}, "details"),
        ({"details": {"é": 1}}, "details"),
        ({"details": {"a": "[" * 64}}, "json"),
        ({"details": {"a": 10**20}}, "json"),
        ({"method": "\x1b[2J"}, "method"),
        ({"method": None}, "method"),
        ({"eps": 1}, "eps"),
        ({"eps": 0.0}, "eps"),
        ({"scale": 1}, "scale"),
        ({"offset": 3}, "offset"),
        ({"right": np.zeros((0, 1))}, "m"),
        ({"digests": {}}, "missing-field"),
        ({"digests": {name: "0" for name in claim.DIGESTS}}, "query_sha256"),
    ],
)
def test_what_the_reader_would_refuse_is_not_written(change, reason, tmp_path):
    record = Certificate(**{**vars(read_claim(example().to_bytes())), **change})
    for write in (record.to_bytes, lambda: record.save(tmp_path / "c.safetensors")):
        with pytest.raises(MalformedCertificate) as caught:
            write()
        assert caught.value.reason == reason
    assert list(tmp_path.iterdir()) == []


def test_header_beyond_the_cap_is_not_written():
    record = vars(read_claim(example().to_bytes()))
    fits = Certificate(**{**record, "details": {"a": "x" * 60000}})
    assert read_claim(fits.to_bytes()).details == fits.details
    for details in ({"a": "x" * 65000}, {"a": '"' * 25000}, {"a": "[" * 52}, {"a": "{" * 62}):
        with pytest.raises(InvalidInput, match="do not fit"):
            Certificate(**{**record, "details": details}).to_bytes()
    with pytest.raises(ValueError):
        Certificate(**{**record, "details": {"a": math.nan}}).to_bytes()


# Binding


@st.composite
def heads(draw):
    """q, k and options as plain lists and as arrays; hidden keys of the arrays hold NaN."""
    n, m, d = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    numbers = st.floats(-1e6, 1e6)
    row = st.lists(numbers, min_size=d, max_size=d)
    q, k = draw(st.lists(row, min_size=n, max_size=n)), draw(st.lists(row, min_size=m, max_size=m))
    options = {"scale": draw(st.none() | numbers)}
    if draw(st.booleans()):
        bias = draw(st.lists(numbers | st.just(-math.inf) | st.just(-0.0), min_size=m, max_size=m))
        options["key_bias"] = [draw(numbers), *bias[1:]]
    if draw(st.booleans()):
        options |= {"causal": True, "offset": draw(st.integers(0, 7))}
    return q, k, options


@given(heads())
def test_digests_are_those_of_the_specification(head):
    q, k, options = head
    expected = binding(q, k, **options)
    inputs = read_inputs(np.array(q), np.array(k), **options)
    assert {
        **inputs.digests,
        "scale": inputs.scale,
        "causal": inputs.causal,
        "offset": inputs.offset,
    } == expected
    # hidden keys do not show, whatever they hold and whatever the layout in memory
    garbage = np.asfortranarray(k)
    garbage[~inputs.kept_keys] = np.nan
    assert read_inputs(np.array(q)[::-1][::-1], garbage, **options).digests == inputs.digests


def test_exact_copies_in_other_types_agree():
    rng = np.random.default_rng(0)
    halves = rng.normal(size=(4, 3)).astype(np.float16)
    integers = rng.integers(-9, 9, size=(4, 3)).astype(np.int8)
    for small in (halves, integers):
        expected = binding(small.astype(float).tolist(), small.astype(float).tolist())
        for dtype in (small.dtype, np.float32, np.float64, ">f8"):
            found = read_inputs(small.astype(dtype), small.astype(dtype)).digests
            assert found == {name: expected[name] for name in found}


def test_signs_of_zero():
    def digest(q=0.0, k=0.0, bias=0.0, scale=0.0):
        return read_inputs([[q]], [[k]], key_bias=[bias], scale=scale).digests

    assert digest(bias=-0.0) == digest()
    assert digest(q=-0.0)["query_sha256"] != digest()["query_sha256"]
    assert digest(k=-0.0)["key_sha256"] != digest()["key_sha256"]
    assert digest(scale=-0.0)["inputs_sha256"] != digest()["inputs_sha256"]
    plain = binding([[0.0]], [[0.0]], key_bias=[-0.0], scale=-0.0)
    assert plain["inputs_sha256"] == digest(scale=-0.0)["inputs_sha256"]


def test_no_queries():
    k = [[1.0, 2.0], [3.0, 4.0]]
    for options in ({}, {"causal": True, "offset": -1}, {"key_bias": [0.0, -math.inf]}):
        found = read_inputs(np.empty((0, 2)), np.array(k), **options).digests
        expected = binding([], k, **options)
        assert found == {name: expected[name] for name in found}


def test_every_part_of_the_head_shows_in_its_own_digest_and_in_the_whole():
    base = {
        "q": [[1.0], [2.0]],
        "k": [[3.0], [4.0]],
        "key_bias": [0.0, 1.0],
        "scale": 0.5,
        "causal": True,
        "offset": 1,
    }
    changes = {
        "query_sha256": {"q": [[1.0], [2.5]]},
        "key_sha256": {"k": [[3.0], [4.5]]},
        "key_bias_sha256": {"key_bias": [0.0, 1.5]},
        "scale": {"scale": 0.25},
        "offset": {"offset": 0},
        "causal": {"causal": False, "offset": 0},
    }
    before = read_inputs(**base).digests
    for name, change in changes.items():
        after = read_inputs(**{**base, **change}).digests
        differing = {part for part in before if before[part] != after[part]}
        assert differing == ({name} & set(before)) | {"inputs_sha256"}, name


def test_shape_is_part_of_the_digest():
    flat = np.arange(12.0)
    found = {
        read_inputs(flat.reshape(shape), flat.reshape(shape)).digests["query_sha256"]
        for shape in ((12, 1), (1, 12), (3, 4), (4, 3), (2, 6))
    }
    assert len(found) == 5


def test_draft_by_hand_is_what_the_writer_writes():
    """The plain writer and the package's agree on everything but who signs."""
    data = example().to_bytes()
    ours = Certificate(**vars(read_claim(data))).to_bytes()
    theirs = draft(
        [[1.0], [1.0]],
        [[0.5], [0.5]],
        read_claim(data).log_normaliser.tolist(),
        rank=1,
        eps=0.125,
        head=binding(EXAMPLE_Q, EXAMPLE_K),
        details={"error": "tanh(1/8)"},
    )
    from rankcert import __version__

    theirs.fields["writer"] = f"rankcert {__version__}"
    assert ours == theirs.to_bytes()
