"""The certificate record: applying it, saving it, and what a verdict about it is a verdict about."""

import os
import stat
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from golden.make import by_svd
from hostile.plain import binding
from hypothesis import given
from hypothesis import strategies as st
from oracles import ball_errors, dense_attention

from rankcert import certificates, load, verify
from rankcert.certificates import Certificate, make_certificate
from rankcert.checker import applied_row_bounds, check_rows, read_inputs
from rankcert.errors import InvalidInput


def head(n=9, m=13, d=4, seed=0, **options):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), rng.normal(size=(m, d)), options


def certificate(n=9, m=13, d=4, rank=4, eps=1.5, seed=0, **options) -> Certificate:
    q, k, options = head(n, m, d, seed, **options)
    return by_svd(q, k, rank=rank, eps=eps, **options)


def made_up(n, m, rank, *, causal=False, offset=0, seed=0) -> Certificate:
    """A record with random factors, as a file may hold them."""
    rng = np.random.default_rng(seed)
    return Certificate(
        eps=1.0,
        scale=1.0,
        causal=causal,
        offset=offset,
        digests={},
        left=rng.normal(size=(n, rank)),
        right=rng.normal(size=(m, rank)),
        log_normaliser=np.zeros(n),
        method="",
        details={},
    )


def product(record: Certificate) -> np.ndarray:
    """left right^T with what a causal mask hides set to zero."""
    dense = record.left @ record.right.T
    if record.causal:
        n, m = dense.shape
        dense[np.arange(m) > np.arange(n)[:, None] + record.offset] = 0.0
    return dense


# apply


@pytest.mark.parametrize("shape", [(13,), (13, 1), (13, 5), (13, 2, 3), (13, 0), (13, 2, 0), (13, 1, 1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_apply_takes_any_trailing_axes(shape, causal):
    record = certificate(causal=causal, offset=3 * causal)
    values = np.random.default_rng(1).normal(size=shape)
    result = record.apply(values)
    assert result.shape == (9, *shape[1:]) and result.dtype == np.float64
    np.testing.assert_allclose(result, np.tensordot(product(record), values, axes=1), atol=1e-13)


@pytest.mark.parametrize("n, m", [(1, 1), (1, 700), (700, 1), (300, 200), (200, 300), (513, 512), (256, 256)])
@pytest.mark.parametrize("offset", [-700, -255, -1, 0, 1, 255, 256, 400, 2**30, -(2**30)])
def test_causal_apply_is_the_masked_product(n, m, offset):
    record = made_up(n, m, 3, causal=True, offset=offset)
    values = np.random.default_rng(2).normal(size=(m, 2))
    np.testing.assert_allclose(record.apply(values), product(record) @ values, atol=1e-11)


@given(
    st.integers(0, 12),
    st.integers(1, 12),
    st.integers(0, 4),
    st.none() | st.integers(-15, 15),
    st.integers(1, 5),
    st.integers(0, 2**16),
)
def test_apply_by_blocks_of_any_height(n, m, rank, offset, height, seed):
    record = made_up(n, m, rank, causal=offset is not None, offset=offset or 0, seed=seed)
    values = np.random.default_rng(seed + 1).normal(size=(m, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "APPLY_ROWS", height)
        np.testing.assert_allclose(record.apply(values), product(record) @ values, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32, np.bool_])
def test_apply_converts_exactly_or_refuses(dtype):
    record = certificate()
    values = np.arange(13).astype(dtype)
    if dtype == np.bool_:
        with pytest.raises(InvalidInput, match="values must be integer, float16"):
            record.apply(values)
    else:
        np.testing.assert_array_equal(record.apply(values), record.apply(np.arange(13.0)))
        np.testing.assert_array_equal(record.apply(values.tolist()), record.apply(np.arange(13.0)))


@pytest.mark.parametrize(
    "options, hidden",
    [
        ({"key_bias": np.where(np.isin(np.arange(13), [2, 7]), -np.inf, 0.5)}, [2, 7]),
        ({"causal": True, "offset": 1}, [10, 11, 12]),
        ({"causal": True, "offset": 2, "key_bias": np.where(np.arange(13) == 4, -np.inf, 0.0)}, [4, 11, 12]),
    ],
)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_hidden_values_are_not_read(options, hidden, garbage):
    record = certificate(**options)
    values = np.random.default_rng(3).normal(size=(13, 2))
    expected = record.apply(values)
    values[hidden] = garbage
    np.testing.assert_array_equal(record.apply(values), expected)
    # the same with factors that are not zero where no row may look
    if options.get("causal"):
        right = record.right.copy()
        right[hidden[-2:]] = 1.0
        np.testing.assert_array_equal(replace(record, right=right).apply(values), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_a_value_that_is_used_must_be_finite(causal, garbage):
    record = certificate(causal=causal, offset=4 * causal)
    values = np.zeros((13, 2))
    values[8, 1] = garbage  # a causal row before it must not see it, a block product would show it
    with pytest.raises(InvalidInput, match="values row 8 is not finite"):
        record.apply(values)


@pytest.mark.parametrize(
    "values, message",
    [
        (np.zeros(12), r"one row per key \(13\), got shape \(12,\)"),
        (np.zeros((14, 13)), r"got shape \(14, 13\)"),
        (np.zeros(()), r"got shape \(\)"),
        (1.0, r"got shape \(\)"),
        (None, r"got shape \(\)"),
        ([[1.0], [1.0, 2.0]], "not an array of numbers"),
        (["a"] * 13, "dtype <U1"),
        ([None] * 13, "dtype object"),
        (np.zeros(13, dtype=complex), "dtype complex128"),
        (np.ma.masked_array(np.zeros(13)), "masked array"),
        (np.full(13, 2**53 + 1), r"beyond 2\*\*53"),
    ],
)
def test_apply_refuses_what_are_no_values(values, message):
    with pytest.raises(InvalidInput, match=message):
        certificate().apply(values)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "offset": 6},
        {"key_bias": np.where(np.arange(13) % 4 == 1, -np.inf, 0.3), "scale": 0.8},
    ],
)
def test_output_is_within_the_bound(options):
    q, k, _ = head()
    p = dense_attention(q, k, **options)
    rng = np.random.default_rng(4)
    for rank in (1, 3, 8):
        record = by_svd(q, k, rank=rank, eps=3.0, **options)
        assert record.verdict and record.row_bounds.max() == record.bound
        worst = 0.0
        errors = product(record) - p
        for values in (
            rng.normal(size=(13, 3)),
            rng.choice([-1.0, 1.0], size=(13, 50)),
            np.sign(errors).T,  # the values that show a row's whole error
        ):
            off = np.abs(record.apply(values) - p @ values)
            assert (off <= record.row_bounds[:, None] * np.abs(values).max(axis=0) + 1e-12).all()
            worst = max(worst, off.max() / np.abs(values).max())
            norm = np.linalg.norm(values, axis=1).max()
            assert (
                np.linalg.norm(record.apply(values) - p @ values, axis=1) <= record.row_bounds * norm + 1e-12
            ).all()
        assert worst > record.bound * (1 - 1e-9) - 1e-12  # and the bound is no larger than it has to be


def exactly(record: Certificate, values: np.ndarray) -> np.ndarray:
    """What apply would return without rounding, in units of nothing: exact fractions, one value column."""
    left, right = ([[Fraction(x) for x in row] for row in f.tolist()] for f in (record.left, record.right))
    out = []
    for i, u in enumerate(left):
        last = len(right) if not record.causal else min(len(right), i + record.offset + 1)
        terms = (
            sum(a * b for a, b in zip(u, right[j], strict=True)) * Fraction(values[j]) for j in range(last)
        )
        out.append(sum(terms, Fraction(0)))
    return out


@given(
    st.integers(1, 5),
    st.integers(1, 30),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([1.0, 1e8, 1e-140, 1e150]),
    st.integers(0, 2**32 - 1),
)
def test_returned_bounds_include_the_rounding_of_apply(n, m, rank, causal, size, seed):
    rng = np.random.default_rng(seed)
    record = made_up(n, m, rank, causal=causal, offset=int(rng.integers(0, m)), seed=seed)
    left = np.concatenate(
        [record.left, -record.left * (1 + 1e-9 * rng.normal(size=record.left.shape))], axis=1
    )
    right = np.concatenate([record.right, record.right], axis=1) * rng.choice([1.0, 1e6])
    record = replace(record, left=left, right=right)  # columns that cancel, so that rounding shows
    values = size * rng.normal(size=m)
    rounding = applied_row_bounds(np.zeros(n), record.left, record.right)
    errors = [
        abs(Fraction(y) - exact)
        for y, exact in zip(record.apply(values), exactly(record, values), strict=True)
    ]
    assert all(
        e <= Fraction(b) * Fraction(np.abs(values).max()) for e, b in zip(errors, rounding, strict=True)
    )


def test_returned_bounds_are_those_of_the_rows_plus_a_little():
    record = certificate()
    values = np.random.default_rng(1).normal(size=(13, 2))
    out, bounds = record.apply(values, return_bound=True)
    np.testing.assert_array_equal(out, record.apply(values))
    assert (record.row_bounds < bounds).all() and (bounds < record.row_bounds + 1e-13).all()
    assert 1.0 - 1e-2 <= record.cancellation < 100.0
    with pytest.raises(InvalidInput, match="was loaded and not verified: it has no bound to return"):
        made_up(3, 3, 1).apply(np.ones(3), return_bound=True)


def test_rounding_of_apply_is_bounded_tightly_enough_to_be_of_use():
    record = made_up(40, 500, 8)
    rounding = applied_row_bounds(np.zeros(40), record.left, record.right)
    assert (rounding <= 520 * 2.0**-52 * record.cancellation * (1 + 1e-9)).all()


# The record


def test_record_is_frozen_and_so_are_its_arrays():
    record = certificate()
    for array in (record.left, record.right, record.log_normaliser):
        assert array.dtype == np.float64 and array.flags.c_contiguous
        with pytest.raises(ValueError):
            array[0] = 1.0
    with pytest.raises(FrozenInstanceError):
        record.eps = 2.0


def test_factors_in_other_types_are_kept_exactly(tmp_path):
    """The checker takes factors of any exact type; what is saved must be those numbers in the file's type."""
    q, k, _ = head()
    inputs = read_inputs(q, k)
    sound = certificate(eps=1.9)
    left, right = sound.left.astype(np.float32), np.asfortranarray(sound.right.astype(np.float16))
    hint = sound.log_normaliser.astype(np.float32)
    verdict = check_rows(inputs, left, right, eps=1.9, log_normaliser=hint)
    caller = left.copy()
    record = make_certificate(inputs, 1.9, caller, right, hint, method="test", details={}, verdict=verdict)
    assert caller.flags.writeable
    record.save(tmp_path / "c.safetensors")
    again = verify(tmp_path / "c.safetensors", q, k)
    assert again.status == "PROVED" and again.bound == verdict.bound
    np.testing.assert_array_equal(record.left, left)
    np.testing.assert_array_equal(load(tmp_path / "c.safetensors").right, right)


def test_loaded_certificate_has_no_bound(tmp_path):
    record = certificate()
    assert record.bound is not None and record.row_bounds.shape == (9,)
    record.save(tmp_path / "c.safetensors")
    loaded = load(tmp_path / "c.safetensors")
    assert isinstance(loaded, Certificate) and loaded.rank == record.rank
    assert loaded.bound is None and loaded.row_bounds is None and loaded.verdict is None
    q, k, _ = head()
    assert verify(loaded, q, k).bound == record.bound == verify(str(tmp_path / "c.safetensors"), q, k).bound
    values = np.ones((13, 2))
    np.testing.assert_array_equal(loaded.apply(values), record.apply(values))


def test_altered_arrays_are_judged_not_the_stored_verdict():
    q, k, _ = head()
    record = certificate(rank=8, eps=0.5)
    assert record.verdict.status == verify(record, q, k).status == "PROVED"
    for change in (
        {"left": record.left * 1.5},
        {"right": -record.right},
        {"left": np.zeros_like(record.left)},
    ):
        altered = replace(record, **change)
        assert altered.bound == record.bound  # the record still carries the old verdict, and nobody asks it
        verdict = verify(altered, q, k)
        assert verdict.status == "REFUTED" and verdict.bound > 0.5
        (low, high), *_ = ball_errors(q, k, altered.left, altered.right, scale=0.5, rows=[0])
        assert float(low) <= verdict.row_bounds[0] and verdict.row_bounds_lower[0] <= float(high)
    bad = record.left.copy()
    bad[3, 1] = np.nan
    verdict = verify(replace(record, left=bad), q, k)
    assert verdict.status == "UNDECIDED" and "left[3, 1] is nan" in verdict.reason
    shorter = replace(record, left=record.left[:-1], log_normaliser=record.log_normaliser[:-1])
    assert verify(shorter, q, k).reason.startswith("other inputs: shape: the certificate is for 8 queries")
    lost = replace(record, log_normaliser=record.log_normaliser + 3.0)
    assert verify(lost, q, k).status == "UNDECIDED"  # bad advice costs the proof and nothing else


# Binding: what differs in the call


def bound_certificate():
    q, k, options = head(
        key_bias=np.where(np.arange(13) == 5, -np.inf, 0.25), scale=0.75, causal=True, offset=6
    )
    return by_svd(q, k, rank=7, eps=0.5, **options), {"q": q, "k": k, "eps": 0.5, **options}


def moved(array, index, value=None):
    array = array.copy()
    array[index] = np.nextafter(array[index], np.inf) if value is None else value
    return array


CALLS = {
    "scale": lambda call: {"scale": np.nextafter(0.75, 1.0)},
    "scale (the default)": lambda call: {"scale": None},
    "causal": lambda call: {"causal": False, "offset": 0},
    "offset": lambda call: {"offset": 7},
    "offset (the default)": lambda call: {"offset": 0},
    "eps": lambda call: {"eps": np.nextafter(0.5, 0.0)},
    "eps (larger)": lambda call: {"eps": 0.6},
    "query_sha256": lambda call: {"q": moved(call["q"], (8, 3))},
    "query_sha256 (rounded)": lambda call: {"q": call["q"].astype(np.float32)},
    "query_sha256 (order)": lambda call: {"q": call["q"][::-1]},
    "key_sha256": lambda call: {"k": moved(call["k"], (0, 0))},
    "key_bias_sha256": lambda call: {"key_bias": moved(call["key_bias"], 12)},
    "key_bias_sha256 (shifted)": lambda call: {"key_bias": call["key_bias"] + 1.0},
    "shape": lambda call: {"q": call["q"][:8]},
    "key_sha256 (width)": lambda call: {"k": call["k"][:, :3], "q": call["q"][:, :3]},
}


@pytest.mark.parametrize("what", CALLS)
def test_other_inputs_in_the_call_are_refused(what):
    record, call = bound_certificate()
    assert verify(record, **call).status == "PROVED"
    verdict = verify(record, **{**call, **CALLS[what](call)})
    name = what.split()[0] if "width" not in what else "query_sha256"
    assert verdict.status == "UNDECIDED" and verdict.bound == np.inf and verdict.bound_lower == 0.0
    assert verdict.reason.startswith(f"other inputs: {name}: ")
    assert not verdict and verdict.worst_row is None and np.isinf(verdict.row_bounds).all()


def test_unmasking_or_masking_a_key_is_other_inputs():
    record, call = bound_certificate()
    for bias in (moved(call["key_bias"], 5, 0.0), moved(call["key_bias"], 6, -np.inf), None):
        verdict = verify(record, **{**call, "key_bias": bias})
        assert verdict.reason.startswith("other inputs: key_sha256")  # a masked key counts as zero


def test_what_is_hidden_may_differ():
    record, call = bound_certificate()
    for garbage in (np.nan, 7.0):
        assert verify(record, **{**call, "k": moved(call["k"], 5, garbage)}).status == "PROVED"
    assert verify(record, **{**call, "eps": None}).status == "PROVED"


# Binding: what differs in the file


def attack(*, rewritten, made_for) -> Certificate:
    """A certificate sound for `made_for`, its fields and advice rewritten consistently to name `rewritten`."""
    made = by_svd(**{"rank": 7, **made_for})
    names = {name: value for name, value in rewritten.items() if name not in ("q", "k", "eps")}
    claimed = binding(rewritten["q"].tolist(), rewritten["k"].tolist(), **names)
    digests = {name: value for name, value in claimed.items() if name.endswith("_sha256")}
    return replace(
        made,
        eps=rewritten["eps"],
        scale=claimed["scale"],
        causal=claimed["causal"],
        offset=claimed["offset"],
        digests=digests,
        log_normaliser=by_svd(**{"rank": 1, **rewritten}).log_normaliser,
    )


FILES = {
    "scale": {"scale": 2.0},
    "offset": {"offset": 2},
    "causal": {"causal": False, "offset": 0},
    "key_bias": {"key_bias": np.where(np.arange(13) == 5, -np.inf, np.arange(13) / 6)},
    "eps": {"eps": 1.9},
    "q": {"q": np.random.default_rng(10).normal(size=(9, 4))},
    "k": {"k": np.random.default_rng(11).normal(size=(13, 4))},
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_made_for_another_head_is_refused(what, tmp_path):
    """All four digests say honestly, or consistently falsely, that the file is about something else."""
    _, call = bound_certificate()
    other = {**call, **FILES[what]}
    record = attack(rewritten=other, made_for=other)
    record.save(tmp_path / "c.safetensors")
    data = (tmp_path / "c.safetensors").read_bytes()
    assert verify(data, **other).status == "PROVED"
    verdict = verify(data, **call)
    assert verdict.status == "UNDECIDED" and verdict.reason.startswith(f"other inputs: {what}")


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_lies_about_its_head_is_judged_on_the_callers(what):
    """Factors made for another head, under the digests and options of the caller's: judged on the caller's."""
    _, call = bound_certificate()
    record = attack(rewritten=call, made_for={**call, **FILES[what]})
    verdict = verify(record.to_bytes(), **call)
    assert not verdict.reason.startswith("other inputs")
    assert (verdict.eps, verdict.scale, verdict.causal, verdict.offset) == (0.5, 0.75, True, 6)
    options = {name: call[name] for name in ("scale", "key_bias", "causal", "offset")}
    errors = ball_errors(call["q"], call["k"], record.left, record.right, **options)
    for i, (low, high) in enumerate(errors):
        assert float(low) <= verdict.row_bounds[i] and verdict.row_bounds_lower[i] <= float(high)
    true = max(float(high) for _, high in errors)
    assert verdict.status == ("PROVED" if true <= 0.5 else "REFUTED")
    assert verdict.status == "REFUTED" or what in ("eps", "causal")  # which leave these factors good


@pytest.mark.parametrize("what", FILES)
def test_a_file_with_only_some_digests_rewritten_is_refused(what):
    """Every subset of the fields taken from the caller's head, the rest from another one, is still other inputs."""
    record, call = bound_certificate()
    other = by_svd(**{"rank": 7, **call, **FILES[what]})
    ours = {
        "scale": record.scale,
        "causal": record.causal,
        "offset": record.offset,
        "eps": record.eps,
        **record.digests,
    }
    theirs = {
        "scale": other.scale,
        "causal": other.causal,
        "offset": other.offset,
        "eps": other.eps,
        **other.digests,
    }
    differing = [name for name in ours if ours[name] != theirs[name]]
    assert differing and (what == "eps" or "inputs_sha256" in differing)
    for choice in range(2 ** len(differing) - 1):
        taken = {name for bit, name in enumerate(differing) if choice >> bit & 1}
        mixed = {name: ours[name] if name in taken else theirs[name] for name in ours}
        digests = {name: mixed.pop(name) for name in record.digests}
        if not mixed["causal"] and mixed["offset"]:
            continue  # no such file
        verdict = verify(replace(other, **mixed, digests=digests).to_bytes(), **call)
        assert verdict.status == "UNDECIDED" and verdict.reason.startswith("other inputs: ")


# save


def test_save_replaces_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "c.safetensors"
    path.write_bytes(b"old")
    record = certificate()
    record.save(path)
    assert path.read_bytes() == record.to_bytes()
    record.save(str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.safetensors"]


@pytest.mark.parametrize("step", ["replace", "fsync"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_save_changes_nothing(step, error, tmp_path, monkeypatch):
    def fail(*arguments):
        raise error

    path = tmp_path / "c.safetensors"
    path.write_bytes(b"old")
    record = certificate()
    monkeypatch.setattr(certificates.os, step, fail)
    with pytest.raises(type(error)):
        record.save(path)
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


def test_save_into_nowhere_is_an_oserror(tmp_path):
    record = certificate()
    (tmp_path / "directory").mkdir()
    for path in (tmp_path / "absent" / "c.safetensors", tmp_path / "directory"):
        with pytest.raises(OSError):
            record.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["directory"]


FULL_DISK = """
import resource, signal, sys
import numpy as np
from rankcert import load
from rankcert.certificates import Certificate
from dataclasses import replace

record = load(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    record.save(sys.argv[1])
except OSError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of processes are POSIX")
def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path):
    path = tmp_path / "c.safetensors"
    certificate().save(path)
    old = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-P", "-c", FULL_DISK, path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "File too large" in done.stderr
    assert path.read_bytes() == old and len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000, 0o027])
def test_permissions_follow_the_umask(mask, tmp_path):
    path = tmp_path / "c.safetensors"
    record = certificate()
    before = os.umask(mask)
    try:
        record.save(path)
        assert os.umask(mask) == mask  # and is left alone
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_symbolic_link_is_replaced_not_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    try:
        link.symlink_to(target)
    except OSError as error:
        pytest.skip(f"no symbolic links here: {error}")
    certificate().save(link)
    assert target.read_bytes() == b"old" and not link.is_symlink() and Path(link).stat().st_size > 1000
