"""Files made by an enemy: each is refused for the right reason, and none ever makes `verify` say something false.

hostile/make.py spoils a sound certificate in one place, in some 240 ways; its first way of each reason also lies here
as a literal file. Then damage without a plan: every truncation, every flipped bit, random edits. Of a file that is
read in spite of it, an oracle (ball arithmetic from the definition) must confirm what the verdict says.
"""

import json
import math
import os
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import safetensors
from flint import arb
from hostile.make import CAP, CASES, FIELDS, HERE, add, entry, field, literal, part, spoiled
from hostile.plain import EXAMPLE_K, EXAMPLE_Q, Draft, binding, draft, example
from hostile.reasons import reasons_in_the_source
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ball_errors

from rankcert import load, verify
from rankcert.checker import read_claim
from rankcert.checker.claim import MAX_FILE
from rankcert.errors import MalformedCertificate

REASONS = reasons_in_the_source()
WAYS = [(reason, what) for reason, ways in CASES.items() for what in ways]


class Case:
    """A head and a sound certificate about it, as a draft."""

    def __init__(self, q, k, make, **options):
        self.q, self.k, self.options, self.make = np.array(q), np.array(k), options, make

    def draft(self) -> Draft:
        return self.make()

    def judge(self, data: bytes) -> str:
        """What became of the file: its refusal, or the status of a verdict that the oracle has confirmed."""
        try:
            verdict = verify(data, self.q, self.k, **self.options, threads=1)
        except MalformedCertificate as refusal:
            assert refusal.reason in REASONS
            assert len(str(refusal)) < 500 and str(refusal).isprintable()
            return refusal.reason
        safetensors.deserialize(data)  # what is a certificate to us is a safetensors file to everybody
        record = read_claim(data)
        assert (verdict.scale, verdict.causal, verdict.offset) == (
            self.options.get("scale", 1.0),
            self.options.get("causal", False),
            self.options.get("offset", 0),
        )
        assert verdict.eps == record.eps
        if verdict.reason.startswith("other inputs: "):
            assert verdict.status == "UNDECIDED" and verdict.bound == math.inf
            return "other inputs"
        if verdict.bound < math.inf:
            self.confirm(verdict, record)
        else:
            assert verdict.status == "UNDECIDED"
        return verdict.status

    def confirm(self, verdict, record) -> None:
        errors = ball_errors(
            self.q,
            np.nan_to_num(self.k),
            record.left,
            record.right,
            **{"scale": verdict.scale, **self.options},
        )
        for i, (low, high) in enumerate(errors):
            assert not low > arb(float(verdict.row_bounds[i])), i
            assert not high < arb(float(verdict.row_bounds_lower[i])), i
        if verdict.status == "PROVED":
            assert not any(low > arb(record.eps) for low, _ in errors)
        if verdict.status == "REFUTED":
            assert any(high > arb(record.eps) for _, high in errors)


def masked_causal() -> Draft:
    """3 queries, 4 keys, of which one is masked and one out of reach; rank 2; row 2 is off by 0.00064."""
    left = [[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]]
    right = [[1.0, 0.125], [0.0, 0.0], [0.0, 0.875], [3.0, 3.0]]
    q, k, options = MASKED
    head = binding(q, k, **options)
    return draft(left, right, [0.625, 0.0625, 1.5759394198788437], rank=2, eps=0.001, head=head)


MASKED = (
    [[0.5, 1.0], [-0.25, 0.5], [1.0, -1.0]],
    [[1.0, 0.0], [7.0, 7.0], [0.5, -0.5], [math.nan, math.nan]],
    {"scale": 0.75, "key_bias": [0.25, -math.inf, 0.0, 0.5], "causal": True, "offset": 0},
)
CASE_BY_NAME = {
    "example": Case(EXAMPLE_Q, EXAMPLE_K, example),
    "masked": Case(MASKED[0], MASKED[1], masked_causal, **MASKED[2]),
}
EXAMPLE = CASE_BY_NAME["example"]
both_cases = pytest.mark.parametrize("case", CASE_BY_NAME.values(), ids=CASE_BY_NAME)


@both_cases
def test_the_unspoiled_file_is_judged(case):
    assert case.judge(case.draft().to_bytes()) == "PROVED"


# Refusals with a name


def test_every_reason_has_its_ways_and_its_file():
    assert set(CASES) == REASONS
    assert {path.stem for path in HERE.glob("*.safetensors")} == REASONS


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_literal_file_is_refused_for_its_reason(reason):
    path = HERE / f"{reason}.safetensors"
    assert path.read_bytes() == literal(reason)
    if reason == "file-too-large":
        with pytest.raises(MalformedCertificate) as caught:
            read_claim(path, max_bytes=CAP)
        assert caught.value.reason == reason
        return
    for read in (read_claim, load, lambda path: verify(path, EXAMPLE.q, EXAMPLE.k)):
        with pytest.raises(MalformedCertificate) as caught:
            read(path)
        assert caught.value.reason == reason
        assert str(caught.value).startswith(f"{reason}: ") and caught.value.detail


@pytest.mark.parametrize("reason, what", WAYS, ids=map(".".join, WAYS))
def test_every_way_is_refused_for_its_reason(reason, what):
    data = spoiled(CASES[reason][what])
    with pytest.raises(MalformedCertificate) as caught:
        read_claim(data, max_bytes=CAP if reason == "file-too-large" else MAX_FILE)
    assert caught.value.reason == reason
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()  # nothing a terminal obeys
    assert caught.value.__cause__ is None


def one(reason: str, what: str | None = None):
    ways = CASES[reason]
    return reason, ways[what or next(iter(ways))]


# One way for each step from 4 on of FORMAT.md's "Refusals", in its order; any two can be done to one file.
IN_ORDER = [
    one("truncated", "header-size"),
    ("json", part(header_text=b"{,}")),
    ("metadata", part(metadata={"rankcert": "{}", "other": ""})),
    ("json", part(metadata_text="{,}")),
    one("format"),
    one("format-version"),
    *(one(name) for name in FIELDS if name != "offset"),
    one("unknown-field"),
    one("offset", "not-causal"),
    ("tensors", lambda draft: draft.tensors.update(extra={})),
    *(
        step
        for name in ("left", "right", "log_normaliser")
        for step in (
            ("tensor-entry", entry(name, strides=[8])),
            ("tensor-dtype", entry(name, dtype="F32")),
            ("tensor-shape", entry(name, shape=[3, 1])),
            ("tensor-offsets", entry(name, data_offsets=[0, 24])),
        )
    ),
    ("trailing-bytes", add(b"\0")),
]


def test_the_first_broken_rule_is_named():
    """Break any two rules: the refusal is the one that stands first in FORMAT.md."""
    pairs = 0
    for later in range(len(IN_ORDER)):
        for earlier in range(later):
            (first, spoil_first), (_, spoil_second) = IN_ORDER[earlier], IN_ORDER[later]
            with pytest.raises(MalformedCertificate) as caught:
                read_claim(spoiled(spoil_first, spoil_second))
            assert caught.value.reason == first, (IN_ORDER[earlier], IN_ORDER[later])
            pairs += 1
    assert pairs == math.comb(len(IN_ORDER), 2) > 500
    too_long = spoiled(part(header_size=2**64 - 1))  # and truncated
    overlapping = spoiled(entry("right", data_offsets=[0, 16]), add(b"\0"))
    for reason, data, limit in (
        ("file-too-large", too_long[:7], 6),
        ("truncated", too_long[:7], 7),
        ("header-too-large", too_long, MAX_FILE),
        ("layout", overlapping, MAX_FILE),
    ):
        with pytest.raises(MalformedCertificate) as caught:
            read_claim(data, max_bytes=limit)
        assert caught.value.reason == reason


def test_missing_fields_are_named_in_the_order_of_the_table():
    for absent in range(len(FIELDS)):
        spoilers = [lambda draft, name=name: draft.fields.pop(name) for name in FIELDS[absent:]]
        with pytest.raises(MalformedCertificate, match=f"missing-field: {FIELDS[absent]} "):
            read_claim(spoiled(*spoilers))


# Size


def peak_of(read) -> int:
    """Bytes allocated at most while `read` is refused."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedCertificate) as caught:
            read()
        return caught.value.reason, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "reason, what",
    [
        ("truncated", "exabytes"),
        ("truncated", "header-size"),
        ("header-too-large", "most"),
        ("header-too-large", "sign-bit"),
        ("tensor-shape", "gigantic-fields"),
        ("tensor-shape", "gigantic-shape"),
        ("tensor-shape", "beyond-64-bits"),
        ("tensor-offsets", "wrapped"),
        ("layout", "far"),
        ("json", "nested"),
        ("json", "nested-lists"),
        ("json", "nested-metadata"),
        ("json", "long-integer"),
    ],
)
def test_what_a_file_declares_is_not_allocated(reason, what, tmp_path):
    data = spoiled(CASES[reason][what])
    path = tmp_path / "c.safetensors"
    path.write_bytes(data)
    for source in (data, path):
        found, peak = peak_of(lambda source=source: read_claim(source))
        assert found == reason and peak < 2**20


def test_a_file_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "sparse.safetensors"
    path.write_bytes(example().to_bytes())
    try:
        os.truncate(path, MAX_FILE + 1)
    except OSError as error:
        pytest.skip(f"no file of that size here: {error}")
    found, peak = peak_of(lambda: verify(path, EXAMPLE.q, EXAMPLE.k))
    assert found == "file-too-large" and peak < 2**20
    os.truncate(path, MAX_FILE)
    found, peak = peak_of(lambda: verify(path, EXAMPLE.q, EXAMPLE.k))
    assert found == "trailing-bytes" and peak < 2**20


def test_depth_does_not_reach_the_stack():
    """Brackets are counted before parsing, so that a raised recursion limit does not turn nesting into a crash."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        for what in ("nested", "nested-lists", "nested-metadata"):
            assert EXAMPLE.judge(spoiled(CASES["json"][what])) == "json"
    finally:
        sys.setrecursionlimit(limit)


def test_a_digit_limit_of_the_interpreter_changes_nothing():
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        assert EXAMPLE.judge(spoiled(CASES["json"]["long-integer"])) == "json"
    finally:
        sys.set_int_max_str_digits(limit)


def test_what_cannot_be_read_is_an_oserror(tmp_path):
    for path in (tmp_path, tmp_path / "absent.safetensors"):
        for read in (read_claim, load):
            with pytest.raises(OSError):
                read(path)


# Damage without a plan


@both_cases
def test_every_truncation_is_refused(case, tmp_path):
    data = case.draft().to_bytes()
    path = tmp_path / "c.safetensors"
    for stop in range(len(data)):
        assert case.judge(data[:stop]) == "truncated"
    path.write_bytes(data)
    for stop in reversed(range(0, len(data), 7)):
        os.truncate(path, stop)
        with pytest.raises(MalformedCertificate, match="truncated"):
            read_claim(path)


@both_cases
def test_every_flipped_bit_is_refused_or_judged_truly(case):
    data = bytearray(case.draft().to_bytes())
    outcomes = Counter()
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            outcomes[case.judge(bytes(data))] += 1
            data[position] ^= 1 << bit
    assert sum(outcomes.values()) == 8 * len(data)
    # the flips reach all floors: syntax, fields, the digests, and the numbers themselves
    assert {"json", "missing-field", "tensor-offsets", "truncated", "other inputs"} <= set(outcomes)
    assert min(outcomes["PROVED"], outcomes["REFUTED"], outcomes["UNDECIDED"]) > 40


@both_cases
def test_random_edits(case):
    sound = case.draft().to_bytes()
    interesting = st.sampled_from(
        [b"", b"\0", b"\xff", b'"', b"\\", b"{", b"}", b"[", b",", b":", b"0", b"1e9", b"-"]
    )
    edits = st.lists(
        st.tuples(st.integers(0, len(sound)), st.integers(0, 4), interesting | st.binary(max_size=9)),
        min_size=1,
        max_size=3,
    )

    @settings(max_examples=300)
    @given(edits)
    def check(edits):
        data = sound
        for start, drop, new in edits:
            data = data[:start] + new + data[start + drop :]
        case.judge(data)

    check()


@given(st.binary(max_size=300), st.booleans())
def test_random_bytes(data, with_length):
    EXAMPLE.judge(len(data).to_bytes(8, "little") + data if with_length else data)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([0, 1, 2, -1, 2**30, 2**31, 2**63, 2**64, 0.0, 1.0, 0.125, "F64", "F32", "NaN"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@both_cases
def test_random_json(case):
    """Any value in any place of the two JSON objects, the lengths kept consistent."""
    names = sorted(case.draft().fields)
    tensors = sorted(case.draft().tensors)
    keys = ["dtype", "shape", "data_offsets"]

    @settings(max_examples=300)
    @given(
        st.lists(st.tuples(st.sampled_from(names) | st.text(max_size=3), values), max_size=2),
        st.lists(st.tuples(st.sampled_from(tensors), st.sampled_from(keys), values), max_size=2),
        st.booleans(),
    )
    def check(fields, entries, keep_text):
        damaged = case.draft()
        damaged.fields.update(fields)
        for tensor, key, value in entries:
            damaged.tensors[tensor][key] = value
        if not keep_text:
            damaged.metadata_text = json.dumps(damaged.fields, ensure_ascii=False)
        try:
            data = damaged.to_bytes()
        except UnicodeEncodeError:
            return  # a lone surrogate that not even a liar can write in UTF-8
        case.judge(data)

    check()


SPECIAL = [
    0.0,
    -0.0,
    5e-324,
    2.2e-308,
    1e-150,
    1.0,
    2.0**250,
    2.0**251,
    1.7e308,
    math.inf,
    -math.inf,
    math.nan,
]


@both_cases
def test_random_numbers(case):
    """Factors, advice and tolerance of the enemy's choice under the right digests: the verdict is about them."""
    count = len(case.draft().body) // 8
    seen = set()

    @settings(max_examples=400)
    @given(
        st.dictionaries(
            st.integers(0, count - 1), st.sampled_from(SPECIAL) | st.floats(-2, 2) | st.floats(), max_size=4
        ),
        st.floats(5e-324, 4.0) | st.sampled_from([5e-324, 1e-15, math.tanh(0.125), 1.7e308]),
    )
    def check(changes, eps):
        damaged = case.draft()
        body = np.frombuffer(damaged.body, dtype="<f8").copy()
        for position, value in changes.items():
            body[position] = value
        damaged.body = body.tobytes()
        field("eps", eps)(damaged)
        seen.add(case.judge(damaged.to_bytes()))

    check()
    assert seen <= {"PROVED", "REFUTED", "UNDECIDED"} and "UNDECIDED" in seen


@pytest.mark.parametrize("eps", [5e-324, 0.5, math.nextafter(1.0, 0.0), 1.0, 2.0])
def test_rank_0_and_lies_about_shape(eps):
    """A file of rank 0 claims that the zero matrix is near P; it is, from 1 on, and nothing is allocated for it."""
    empty = draft(
        [[], []], [[], []], [math.nan, math.inf], rank=0, eps=eps, head=binding(EXAMPLE_Q, EXAMPLE_K)
    )
    assert EXAMPLE.judge(empty.to_bytes()) == ("PROVED" if eps >= 1 else "REFUTED")
    for name, count in (("n", 3), ("m", 1), ("m", 3)):
        rows = {"n": 2, "m": 2, name: count}
        other = draft(
            [[0.5]] * rows["n"],
            [[1.0]] * rows["m"],
            [0.0] * rows["n"],
            rank=1,
            eps=eps,
            head=binding(EXAMPLE_Q, EXAMPLE_K),
        )
        assert EXAMPLE.judge(other.to_bytes()) == "other inputs"
    wide = draft(
        [[0.0] * 9] * 2, [[0.0] * 9] * 2, [0.7, 0.7], rank=9, eps=eps, head=binding(EXAMPLE_Q, EXAMPLE_K)
    )
    assert EXAMPLE.judge(wide.to_bytes()) in ("PROVED", "REFUTED", "UNDECIDED")
