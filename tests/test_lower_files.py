"""The files of lower bounds and brackets: FORMAT.md against the code, round trips, hostile files, other inputs.

Structure that they share with certificates is tested once more where it is cheap: the readers must be as strict.
"""

import base64
import json
import math
import re
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from flint import arb
from golden.make import HERE as GOLDEN
from golden.make import golden_head
from hostile.make import CASES, add, both, cut, drop, entry, field, not_a_size
from hostile.plain import EXAMPLE_K, EXAMPLE_Q, binding, bracket_draft, example, lower_draft, lower_example
from hostile.reasons import reasons_in_the_source
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ball_leakage, ball_limit

import rankcert
from rankcert import verify_bracket, verify_lower
from rankcert.certificates import (
    Certificate,
    bracket_pieces,
    lower_pieces,
    make_lower_claim,
    write_pieces,
)
from rankcert.checker import LowerClaim, claim, lower_claim, read_bracket, read_claim, read_inputs, read_lower
from rankcert.checker.claim import MAX_FILE
from rankcert.errors import InvalidInput, MalformedCertificate

SPEC = Path(claim.__file__).with_name("FORMAT.md").read_text("utf-8")
Q, K = np.array(EXAMPLE_Q), np.array(EXAMPLE_K)
STATEMENT = ("eps", "scale", "causal", "offset", "digests", "method", "details")


def block(info: str) -> str:
    (found,) = re.findall(rf"^```{info}\n(.*?)^```$", SPEC, re.M | re.S)
    return found


def sound():
    """The worked example with the fields that hostile/make.py looks for."""
    draft = lower_example()
    draft.fields.update(eps=0.125, details={"error": "tanh(1/8)"})
    return draft


def sound_bracket():
    return bracket_draft(example(), sound())


def spoiled(make, *spoilers) -> bytes:
    draft = make()
    for spoil in spoilers:
        data = spoil(draft)
        if isinstance(data, bytes):
            return data
    return draft.to_bytes()


def written(lower) -> bytes:
    return b"".join(lower_pieces(lower))


# FORMAT.md


def test_worked_example():
    data = base64.b64decode(block("base64 lower"))
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    fields = json.loads(block("json lower fields"))
    assert json.loads(header.pop("__metadata__")["rankcert"]) == fields
    assert header == json.loads(block("json lower tensors"))
    assert data[8 + size :] == bytes.fromhex(block("hex lower"))
    assert data == lower_example().to_bytes() and f"file, {len(data)} bytes, in base64" in SPEC
    record = read_lower(data)
    for name in ("n", "m", "kind", "rank", "eps", "scale", "causal", "offset", "method", "details"):
        assert getattr(record, name) == fields[name] and type(getattr(record, name)) is type(fields[name])
    assert record.rows.tolist() == record.groups.tolist() == [0, 1]
    assert record.weights.tolist() == [[1, 0], [0, 1]] and record.weights.dtype == np.int8
    for exact in (False, True):
        verdict = verify_lower(data, Q, K, exact=exact).to_dict()
        expected = json.loads(block("json lower verdict"))
        assert round(verdict["eps_below"], 10) == expected["eps_below"] == round(math.tanh(0.125), 10)
        assert {name: verdict[name] for name in expected if name != "eps_below"} == {
            name: value for name, value in expected.items() if name != "eps_below"
        }


def test_fields_are_documented_in_the_order_they_are_read():
    section = SPEC.split("\n## Lower bounds\n", 1)[1].split("\n## Brackets\n", 1)
    names = [
        name.strip(" `")
        for line in re.findall(r"^\| (`[a-z_].*?) \|", section[0].split("| field |")[1], re.M)
        for name in line.split(",")
    ]
    table = list(lower_claim.LOWER_FIELDS)
    run = table[table.index("eps") : table.index("inputs_sha256") + 1]
    at = names.index("eps` to `inputs_sha256")
    names[at : at + 1] = run
    assert names[: len(table) + 2] == ["format", "format_version", *table]
    text = section[1].split("Those with")[0].replace("\n", " ")
    names = re.findall(r"`([a-z_0-9]+)`", text.split("in this order:")[1].replace('`"rankcert bracket"`', ""))
    at = names.index("inputs_sha256")
    names[at - 1 : at + 1] = run
    assert names == ["format", "format_version", *lower_claim.BRACKET_FIELDS]
    assert set(lower_claim.LOWER_FIELDS) | {"format", "format_version"} == set(lower_example().fields)
    assert set(lower_claim.BRACKET_FIELDS) | {"format", "format_version"} == set(sound_bracket().fields)


# Round trips

floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(
    st.characters(min_codepoint=0x20, max_codepoint=0x7E).filter(lambda c: c not in "[{"), max_size=30
)


@st.composite
def lower_claims(draw) -> LowerClaim:
    """Any record the format can hold: no rows, no groups, all integers."""
    n, m = draw(st.integers(0, 5)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = np.sort(rng.permutation(n)[: draw(st.integers(0, n))]).astype(np.int32)
    kind = draw(st.sampled_from(["bernstein", "leakage"]))
    groups = weights = None
    if kind == "bernstein":
        count = draw(st.integers(0, 5))
        groups = rng.integers(-1, count, size=m).astype(np.int32)
        dtype = draw(st.sampled_from([np.int8, np.int16]))
        info = np.iinfo(dtype)
        weights = rng.integers(info.min, info.max, size=(count, rows.size), endpoint=True).astype(dtype)
    causal = draw(st.booleans())
    return LowerClaim(
        eps=draw(st.floats(min_value=5e-324, allow_infinity=False)),
        scale=draw(floats),
        causal=causal,
        offset=draw(st.integers(-(2**30), 2**30)) if causal else 0,
        digests={name: draw(st.text("0123456789abcdef", min_size=64, max_size=64)) for name in claim.DIGESTS},
        method=draw(texts),
        details=draw(st.dictionaries(texts, st.integers(-(10**18), 10**18) | floats | texts, max_size=4)),
        n=n,
        m=m,
        kind=kind,
        rank=rows.size if kind == "bernstein" else draw(st.integers(0, 2**30)),
        rows=rows,
        groups=groups,
        weights=np.asfortranarray(weights) if weights is not None else None,
    )


def assert_same(a, b) -> None:
    for name in (*STATEMENT, "n", "m", "kind", "rank"):
        assert getattr(a, name) == getattr(b, name) and type(getattr(a, name)) is type(getattr(b, name))
    for name in ("rows", "groups", "weights"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None) and (
            x is None or (np.array_equal(x, y) and x.dtype == y.dtype and x.shape == y.shape)
        )


@given(lower_claims())
def test_what_is_written_is_read_back(record):
    data = written(record)
    assert data == written(record)
    for as_type in (bytes, bytearray, memoryview):
        assert_same(record, read_lower(as_type(data)))
    tensors = safetensors.numpy.load(data)
    assert set(tensors) == {"rows", "groups", "weights"} - (
        {"groups", "weights"} if record.groups is None else set()
    )
    assert all(np.array_equal(tensors[name], getattr(record, name)) for name in tensors)


@given(lower_claims(), st.integers(0, 3))
def test_a_bracket_is_read_back_as_its_ends(record, rank):
    upper = Certificate(
        **{name: getattr(record, name) for name in (*STATEMENT[:5], "details")},
        method="hand",
        left=np.full((record.n, rank), np.nan),
        right=np.ones((record.m, rank)),
        log_normaliser=np.zeros(record.n),
    )
    data = b"".join(bracket_pieces(upper, record))
    again, low = read_bracket(data)
    assert_same(record, low)
    assert b"".join(Certificate(**vars(again))._pieces()) == upper.to_bytes()
    assert b"".join(bracket_pieces(again, low)) == data


def test_files_are_written_whole(tmp_path):
    record = read_lower(sound().to_bytes())
    path = tmp_path / "lower.safetensors"
    write_pieces(path, lower_pieces(record))
    assert path.read_bytes() == written(record) and [p.name for p in tmp_path.iterdir()] == [path.name]
    assert_same(read_lower(path), record)
    assert verify_lower(path, Q, K).eps_below == verify_lower(record, Q, K).eps_below


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"details": {"a": True}}, "details"),
        ({"method": "\x1b[2J"}, "method"),
        ({"eps": 1}, "eps"),
        ({"kind": "packing"}, "kind"),
        ({"rank": 3}, "row_count"),
        ({"kind": "leakage"}, "group_count"),
        ({"offset": 1}, "offset"),
        ({"digests": {}}, "missing-field"),
    ],
)
def test_what_the_reader_would_refuse_is_not_written(change, reason):
    record = LowerClaim(**{**vars(read_lower(sound().to_bytes())), **change})
    with pytest.raises(MalformedCertificate) as caught:
        written(record)
    assert caught.value.reason == reason


def test_ends_about_different_things_make_no_bracket():
    upper, low = read_claim(example().to_bytes()), read_lower(sound().to_bytes())
    bracket_pieces(upper, low)
    for name, value in (
        ("eps", 0.25),
        ("scale", 2.0),
        ("causal", True),
        ("offset", 1),
        ("digests", {name: "0" * 64 for name in claim.DIGESTS}),
    ):
        other = LowerClaim(**{**vars(low), name: value})
        with pytest.raises(InvalidInput, match=f"differ in {name}"):
            bracket_pieces(upper, other)
    with pytest.raises(InvalidInput, match="one eps"):
        verify_bracket((upper, LowerClaim(**{**vars(low), "eps": 0.25})), Q, K)


# Hostile files

ALIKE = {  # ways that speak of a certificate's tensors are replaced below
    reason: {
        what: spoil
        for what, spoil in ways.items()
        if what not in ("comment", "single-quotes", "raw-newline", "exabytes", "tensors")
        and not (reason == "duplicate-key" and what in ("tensor", "entry"))
    }
    for reason, ways in CASES.items()
    if not reason.startswith("tensor") and reason not in ("layout", "missing-field")
}
BAD_KIND = {
    "other": field("kind", "spectral"),
    "null": field("kind", None),
    "list": field("kind", ["leakage"]),
}


def ints(name: str, *values: int):
    """Put these int32 in the place of the first ones of a tensor."""

    def spoil(draft):
        start = draft.tensors[name]["data_offsets"][0]
        new = struct.pack(f"<{len(values)}i", *values)
        draft.body = draft.body[:start] + new + draft.body[start + len(new) :]

    return spoil


LOWER_CASES = ALIKE | {
    "missing-field": {name: drop(name) for name in lower_claim.LOWER_FIELDS},
    "kind": BAD_KIND,
    "row_count": not_a_size("row_count") | {"other": field("row_count", 1), "rank": field("rank", 1)},
    "group_count": not_a_size("group_count")
    | {"leakage": both(field("kind", "leakage"), field("row_count", 7))},
    "tensors": {
        "missing": lambda draft: draft.tensors.pop("groups"),
        "extra": lambda draft: draft.tensors.update(left=dict(draft.tensors["rows"])),
        "leakage": lambda draft: draft.fields.update(kind="leakage", group_count=0),
    },
    "tensor-entry": {
        "extra-key": entry("rows", strides=[8]),
        "null": lambda draft: draft.tensors.update(weights=None),
    },
    "tensor-dtype": {
        "f64": entry("rows", dtype="F64"),
        "i64": entry("groups", dtype="I64"),
        "u8": entry("weights", dtype="U8"),
        "i32": entry("weights", dtype="I32"),
        "lower-case": entry("weights", dtype="i8"),
        "list": entry("weights", dtype=["I8"]),
        "narrow": entry("rows", dtype="I16"),
    },
    "tensor-shape": {
        "transposed": both(field("group_count", 1), entry("weights", shape=[2, 1])),
        "flat": entry("weights", shape=[4]),
        "other-m": field("m", 3),
        "other-count": field("group_count", 3),
        "gigantic": lambda draft: draft.fields.update(row_count=2**30, rank=2**30, group_count=2**30),
    },
    "tensor-offsets": {
        "short": entry("rows", data_offsets=[8, 12]),
        "sixteen": entry("weights", dtype="I16"),
        "wrapped": entry("rows", data_offsets=[0, 2**64 - 1]),
    },
    "layout": {
        "overlap": entry("rows", data_offsets=[0, 8]),
        "hole": both(entry("weights", data_offsets=[20, 24]), add(bytes(4))),
    },
    "rows": {
        "equal": ints("rows", 1, 1),
        "falling": ints("rows", 1, 0),
        "negative": ints("rows", -1, 0),
        "beyond": ints("rows", 0, 2),
        "lowest": ints("rows", -(2**31), 2**31 - 1),
    },
    "groups": {
        "below": ints("groups", -2),
        "beyond": ints("groups", 0, 2),
        "most": ints("groups", 2**31 - 1),
    },
}
LOWER_REASONS = (
    (reasons_in_the_source() - set(claim.FIELDS)) | set(lower_claim.LOWER_FIELDS) | {"rows", "groups"}
)
WAYS = [(reason, what) for reason, ways in LOWER_CASES.items() for what in ways]


def test_every_reason_has_its_ways():
    assert set(LOWER_CASES) == LOWER_REASONS and all(LOWER_CASES.values())
    documented = SPEC.split("\n## Lower bounds\n")[1]
    assert all(f"| `{reason}` |" in documented for reason in ("row_count", "group_count", "rows", "groups"))


@pytest.mark.parametrize("reason, what", WAYS, ids=map(".".join, WAYS))
def test_every_way_is_refused_for_its_reason(reason, what):
    limit = 64 if reason == "file-too-large" else MAX_FILE
    spoil = LOWER_CASES[reason][what]
    with pytest.raises(MalformedCertificate) as caught:
        read_lower(spoiled(sound, spoil), max_bytes=limit)
    assert caught.value.reason == reason
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


@pytest.mark.parametrize(
    "reason, spoil",
    [
        ("truncated", cut(-1)),
        ("offset", field("offset", 1)),
        ("row_count", field("lower_rank", 1)),
        ("group_count", field("lower_kind", "leakage")),
        ("lower_details", field("lower_details", {"a": None})),
        ("tensors", lambda draft: draft.tensors.pop("left")),
        ("tensors", lambda draft: draft.tensors.pop("rows")),
        ("tensor-dtype", entry("left", dtype="I32")),
        ("tensor-dtype", entry("weights", dtype="F64")),
        ("tensor-shape", field("rank", 2)),
        ("layout", entry("rows", data_offsets=[0, 8])),
        ("trailing-bytes", add(b"\0")),
        ("rows", ints("rows", 1, 0)),
        ("groups", ints("groups", 5)),
    ],
)
def test_a_spoiled_bracket_is_refused(reason, spoil):
    assert read_bracket(sound_bracket().to_bytes())
    with pytest.raises(MalformedCertificate) as caught:
        read_bracket(spoiled(sound_bracket, spoil))
    assert caught.value.reason == reason


@pytest.mark.parametrize("name", lower_claim.BRACKET_FIELDS)
def test_every_field_of_a_bracket_is_needed_and_checked(name):
    for spoil, reason in ((drop(name), "missing-field"), (field(name, None), name), (field(name, [1]), name)):
        with pytest.raises(MalformedCertificate) as caught:
            read_bracket(spoiled(sound_bracket, spoil))
        assert caught.value.reason == reason


def test_a_format_is_not_read_as_another():
    makers = {read_claim: example, read_lower: sound, read_bracket: sound_bracket}
    for read in makers:
        for other, make in makers.items():
            if other is read:
                read(make().to_bytes())
                continue
            with pytest.raises(MalformedCertificate) as caught:
                read(make().to_bytes())
            assert caught.value.reason == "format"


CAUSAL_Q = [[2.0, 0.0], [0.5, -1.0], [-1.0, 2.0]]
CAUSAL_K = [[1.5, 0.0], [-1.0, 1.0], [math.nan, 0.0], [math.nan, 7.0]]
CAUSAL = {"scale": 1.0, "key_bias": [0.25, 0.0, -math.inf, 0.0], "causal": True, "offset": 0}


def causal_example():
    """Rows 1 and 2 see keys 0 and 1; key 2 is masked, key 3 out of reach."""
    head = binding(CAUSAL_Q, CAUSAL_K, **CAUSAL)
    return lower_draft([1, 2], [0, 1, -1, -1], [[100, -3], [2, 90]], m=4, n=3, eps=0.25, head=head)


def leakage_example():
    head = binding(CAUSAL_Q, CAUSAL_K, **CAUSAL)
    return lower_draft([1, 2], None, None, m=4, n=3, eps=0.05, head=head, kind="leakage", rank=2)


EXAMPLES = {
    "plain": (lower_example, Q, K, {}),
    "causal": (causal_example, np.array(CAUSAL_Q), np.array(CAUSAL_K), CAUSAL),
    "leakage": (leakage_example, np.array(CAUSAL_Q), np.array(CAUSAL_K), CAUSAL),
}


def judge(data: bytes, q, k, options) -> str:
    """What became of the file: its refusal, or the status of a verdict that the oracle has confirmed."""
    try:
        verdict = verify_lower(data, q, k, **options, threads=1)
    except MalformedCertificate as refusal:
        assert refusal.reason in LOWER_REASONS
        return refusal.reason
    record = read_lower(data)
    if verdict.reason.startswith("other inputs: "):
        assert verdict.rank == 0 and verdict.eps_below == 0.0
        return "other inputs"
    if verdict:
        assert verdict.rank >= record.rank and verdict.eps == record.eps < verdict.eps_below
    if verdict.rank:
        head = {"scale": 1.0, **options}
        if record.kind == "bernstein":
            _, high = ball_limit(q, np.nan_to_num(k), record.rows, record.groups, record.weights, **head)
            assert verdict.rank == record.rows.size and arb(record.eps) < high
        else:
            held, size = ball_leakage(q, np.nan_to_num(k), record.rows, **head)[1], record.rows.size
            assert arb(record.eps) < (held - (verdict.rank - 1)) / (size + verdict.rank - 1)
    return verdict.status


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_truncation_is_refused(name):
    make, q, k, options = EXAMPLES[name]
    data = make().to_bytes()
    assert judge(data, q, k, options) == "PROVED"
    for stop in range(len(data)):
        assert judge(data[:stop], q, k, options) == "truncated"


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_flipped_bit_is_refused_or_judged_truly(name):
    make, q, k, options = EXAMPLES[name]
    data, outcomes = bytearray(make().to_bytes()), Counter()
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            outcomes[judge(bytes(data), q, k, options)] += 1
            data[position] ^= 1 << bit
    assert {"json", "missing-field", "rows", "other inputs", "PROVED", "UNDECIDED"} <= set(outcomes)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(EXAMPLES)),
    st.lists(
        st.tuples(st.integers(0, 1200), st.integers(0, 4), st.binary(max_size=9)), min_size=1, max_size=3
    ),
)
def test_random_edits(name, edits):
    make, q, k, options = EXAMPLES[name]
    data = make().to_bytes()
    for start, removed, new in edits:
        data = data[:start] + new + data[start + removed :]
    judge(data, q, k, options)


# Other inputs


def test_a_verdict_is_about_the_callers_inputs():
    rng = np.random.default_rng(0)
    q, k, bias = 3 * rng.normal(size=(6, 3)), rng.normal(size=(7, 3)), rng.normal(size=7)
    head = {"key_bias": bias, "scale": 0.5, "causal": True, "offset": 3}
    inputs = read_inputs(q, k, **head)
    groups = np.array([0, 1, 2, -1, -1, -1, -1])
    weights = np.array([[90, 1], [2, 77], [0, 3]], dtype=np.int16)
    record = make_lower_claim(
        inputs,
        kind="bernstein",
        eps=1e-3,
        rank=2,
        rows=[0, 1],
        groups=groups,
        weights=weights,
        method="hand",
        details={},
    )
    certificate = rankcert.certify(q, k, eps=1e-3, **head)
    data, pair = written(record), (certificate, record)
    bracket = b"".join(bracket_pieces(certificate, record))
    assert verify_lower(data, q, k, **head).rank == 2 and verify_bracket(bracket, q, k, **head)
    assert verify_lower(record, q, k, **head, exact=True).rank == 2
    tilted = np.nextafter(q, 9)
    changes = {
        "shape": ((q[:5], k), {}),
        "scale": ((q, k), {"scale": 0.25}),
        "causal": ((q, k), {"causal": False, "offset": 0}),
        "offset": ((q, k), {"offset": 4}),
        "eps": ((q, k), {"eps": 2e-3}),
        "query_sha256": ((tilted, k), {}),
        "key_sha256": ((q, np.nextafter(k, 9)), {}),
        "key_bias_sha256": ((q, k), {"key_bias": np.nextafter(bias, 9)}),
    }
    for name, (arrays, change) in changes.items():
        for exact in (False, True):
            for source in (record, data):
                verdict = verify_lower(source, *arrays, **{**head, **change}, exact=exact)
                assert (verdict.status, verdict.rank, verdict.eps_below) == ("UNDECIDED", 0, 0.0)
                assert verdict.reason.startswith(f"other inputs: {name}: "), verdict.reason
                assert "certificate" not in verdict.reason
        for source in (pair, bracket):
            verdict = verify_bracket(source, *arrays, **{**head, **change})
            assert verdict.status == "UNDECIDED" and not verdict.lower and not verdict.upper
            assert verdict.reason.count(f"other inputs: {name}: ") == 2
    # the same fields altered in the file
    for name, value in (
        ("scale", 0.25),
        ("offset", 4),
        ("causal", False),
        ("n", 7),
        ("query_sha256", "0" * 64),
        ("key_sha256", "0" * 64),
        ("key_bias_sha256", "0" * 64),
        ("inputs_sha256", "0" * 64),
    ):
        change = (
            {name: value}
            if name in ("scale", "offset", "causal", "n")
            else {"digests": record.digests | {name: value}}
        )
        change |= {"offset": 0} if name == "causal" else {}
        altered = LowerClaim(**{**vars(record), **change})
        for source in (altered, written(altered)):
            reason = verify_lower(source, q, k, **head).reason
            assert reason.startswith(f"other inputs: {'shape' if name == 'n' else name}: "), reason


def test_the_claim_is_held_to_its_rank_and_eps():
    record = read_lower(leakage_example().to_bytes())
    q, k = np.array(CAUSAL_Q), np.array(CAUSAL_K)
    for exact in (False, True):
        verdict = verify_lower(record, q, k, **CAUSAL, exact=exact)
        assert (verdict.status, verdict.rank) == ("PROVED", 2)
        more = LowerClaim(**{**vars(record), "rank": 3})
        verdict = verify_lower(more, q, k, **CAUSAL, exact=exact)
        assert (verdict.status, verdict.rank) == ("UNDECIDED", 2)
        assert verdict.reason == "the witness proves rank 2, not the 3 claimed"
        fewer = LowerClaim(**{**vars(record), "rank": 1})
        verdict = verify_lower(fewer, q, k, **CAUSAL, exact=exact)
        assert (verdict.status, verdict.rank) == ("PROVED", 2)
        wider = LowerClaim(**{**vars(record), "eps": 0.9})
        assert not verify_lower(wider, q, k, **CAUSAL, exact=exact)
        lie = LowerClaim(**{**vars(read_lower(sound().to_bytes())), "rank": 3, "eps": 0.1})
        assert verify_lower(lie, Q, K, exact=exact).status == "UNDECIDED"
        nothing = LowerClaim(**{**vars(record), "rank": 1, "rows": np.empty(0, np.int32)})
        assert verify_lower(nothing, q, k, **CAUSAL, exact=exact).status == "UNDECIDED"


def test_bracket_verdict():
    rng = np.random.default_rng(1)
    q, k = 3 * rng.normal(size=(8, 4)), rng.normal(size=(9, 4))
    certificate = rankcert.certify(q, k, eps=0.2)
    inputs = read_inputs(q, k)
    ends = {"kind": "leakage", "eps": 0.2, "method": "hand", "details": {"why": "test"}}
    good = make_lower_claim(inputs, rank=1, rows=[0], **ends)
    bad = make_lower_claim(inputs, rank=8, rows=range(8), **ends)
    proved = verify_bracket((certificate, good), q, k, eps=0.2)
    assert (
        proved
        and proved.status == "PROVED"
        and proved.lower.rank == 1 <= proved.upper.rank == certificate.rank
    )
    assert f"from 1 to {certificate.rank}" in proved.reason
    open_ = verify_bracket(b"".join(bracket_pieces(certificate, bad)), q, k)
    assert not open_ and open_.status == "UNDECIDED" and open_.upper and not open_.lower
    assert open_.reason == f"lower: {open_.lower.reason}"
    assert json.loads(json.dumps(open_.to_dict()))["upper"]["status"] == "PROVED"
    exact = verify_bracket((certificate, good), q, k, exact=True)
    assert exact and "ball arithmetic" in exact.lower.engine and "ball arithmetic" in exact.upper.engine


# Golden files


@pytest.mark.parametrize("version", range(1, lower_claim.LOWER_VERSION + 1))
def test_golden_files_are_proved_for_ever(version):
    head = golden_head()
    expected = json.loads((GOLDEN / f"lower-version-{version}.json").read_text("ascii"))
    for exact in (False, True):
        verdict = verify_lower(GOLDEN / f"lower-version-{version}.safetensors", **head, exact=exact)
        assert verdict.status == "PROVED" and verdict.rank == expected["rank"]
        assert verdict.eps_below == pytest.approx(expected["eps_below"], rel=1e-11)
    verdict = verify_bracket(GOLDEN / f"bracket-version-{version}.safetensors", **head)
    assert verdict and (verdict.lower.rank, verdict.upper.rank) == (expected["rank"], expected["upper"])
    assert sorted(path.name for path in GOLDEN.glob("[bl]*.safetensors")) == sorted(
        f"{kind}-version-{v}.safetensors"
        for kind in ("lower", "bracket")
        for v in range(1, lower_claim.LOWER_VERSION + 1)
    )
