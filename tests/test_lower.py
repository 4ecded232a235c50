"""PROVED by a witness implies that ball arithmetic agrees; and what should be proved, is.

The oracle (oracles.py) computes the limit of a witness by the definition: min over z of |A G z|_inf / |G z|_inf, which
no eps proved by it may reach, since below it and nowhere else the theorem holds for this S and G. Soundness and
tightness are separate assertions. A second one needs no witness: heads whose rank is known by construction.
"""

import math
import re

import flint
import numpy as np
import pytest
from flint import arb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import ball_leakage, ball_limit, dense_attention
from problems import BIASES, DTYPES, ENTRIES, draw_problem

from rankcert.certificates import make_lower_claim
from rankcert.checker import (
    Engine,
    check_bernstein,
    check_leakage,
    lower,
    read_inputs,
    verify_lower,
)
from rankcert.checker.exact import enclose_bernstein_limit, enclose_leakage_sum
from rankcert.checker.kernel import VARIANTS
from rankcert.errors import InvalidInput

BLUR = arb("1e-40")  # more than the width of the oracle's balls
WEIGHTS = ("good", "good", "mutated", "random", "cancelling", "sparse", "singular")


def draw_head(draw):
    """(q, k, options) with all the edges of problems.py, small enough for balls."""
    problem = draw_problem(
        seed=draw(st.integers(0, 2**32 - 1)),
        shape=(draw(st.integers(1, 9)), draw(st.integers(1, 12)), draw(st.integers(1, 5))),
        entries=draw(st.sampled_from(ENTRIES)),
        bias=draw(st.sampled_from(BIASES)),
        factors="tiny",
        hint="none",
        dtype=draw(st.sampled_from(DTYPES)),
        layout="C",
        causal=draw(st.booleans()),
        offset=draw(st.integers(0, 12)),
    )
    return problem.q, problem.k, problem.options


def good_rows(attention: np.ndarray, count: int) -> np.ndarray:
    """Rows that stand far apart: one after the other the one with the largest rest."""
    rest, chosen = attention.copy(), []
    for _ in range(count):
        norms = (rest**2).sum(axis=1)
        norms[chosen] = -1.0
        chosen.append(int(np.argmax(norms)))
        size = np.linalg.norm(rest[chosen[-1]])
        if size > 1e-100:
            rest = rest - np.outer(rest @ (rest[chosen[-1]] / size), rest[chosen[-1]] / size)
    return np.array(chosen)


def good_weights(sums: np.ndarray, most: int = 127) -> np.ndarray:
    """Integers near the pseudo-inverse of sums (N, K), columns scaled to `most`."""
    with np.errstate(all="ignore"):  # of subnormal sums
        inverse = np.nan_to_num(np.linalg.pinv(sums, rcond=1e-9), posinf=0.0, neginf=0.0)
        largest = np.abs(inverse).max(axis=0)
        scaled = np.round(most * (inverse / np.where(largest > 0, largest, 1.0)))
    return scaled.astype(np.int8 if most <= 127 else np.int16)


def add_up(attention: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """Columns added up by groups."""
    sums = np.zeros((attention.shape[0], count + 1))
    np.add.at(sums.T, groups, attention.T)  # -1 goes to the last
    return sums[:, :count]


@st.composite
def witnesses(draw):
    """A head and any witness for it: (q, k, options, rows, groups, weights)."""
    q, k, options = draw_head(draw)
    n, m = len(q), len(k)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    attention = dense_attention(q, k, **options)
    size = draw(st.integers(1, min(n, m)))
    rows = draw(st.sampled_from([good_rows(attention, size), rng.permutation(n)[:size]]))
    if draw(st.booleans()):
        count, groups = m, np.arange(m)
    else:
        count = draw(st.integers(1, m))
        groups = rng.integers(-1, count, size=m)
    if options["causal"] and draw(st.integers(0, 9)):  # one in ten keeps what no witness may have
        groups = np.where(np.arange(m) <= rows.min() + options["offset"], groups, -1)
    weights = good_weights(add_up(attention[rows], groups, count), draw(st.sampled_from([3, 127, 32767])))
    kind = draw(st.sampled_from(WEIGHTS))
    if kind == "mutated":
        weights = weights ^ (1 << rng.integers(0, 7, size=weights.shape)) * (rng.random(weights.shape) < 0.2)
        weights = weights.astype(np.int16)
    elif kind == "random":
        weights = rng.integers(-128, 128, size=weights.shape).astype(np.int8)
    elif kind == "cancelling":
        weights = rng.choice([-32768, 32767], size=weights.shape).astype(np.int16)
    elif kind == "sparse":
        weights = (rng.random(weights.shape) < 0.3).astype(np.int8)
    elif kind == "singular":
        weights[:, 0] = weights[:, -1] if size > 1 else 0
    return q, k, options, rows, groups, weights


def may_see(options, rows, groups) -> bool:
    """Whether all keys with a group are allowed to all rows."""
    return not options["causal"] or (np.flatnonzero(groups >= 0) <= rows.min() + options["offset"]).all()


def assert_limit_is_true(verdict, high: arb) -> None:
    with flint.ctx.workprec(400):
        assert verdict.eps_below == 0.0 or arb(verdict.eps_below) <= high + BLUR, (verdict, high)
    assert verdict.status == ("PROVED" if verdict.eps < verdict.eps_below else "UNDECIDED")
    assert bool(verdict) == (verdict.status == "PROVED") and (verdict or verdict.rank == 0)


# Soundness


def test_no_witness_proves_more_than_it_can():
    seen = {"PROVED": 0, "UNDECIDED": 0, "singular": 0, "refused": 0, "causal": 0}

    @settings(
        max_examples=1500,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        witnesses(),
        st.sampled_from([0.0, 1e-15, -1e-15, 1e-12, -1e-12, -1e-9, 1e-6, -1e-6, 0.05, -0.05, -0.5]),
        st.sampled_from(VARIANTS),
        st.sampled_from(["blas", "portable"]),
    )
    def check(witness, which, variant, gemm):
        q, k, options, rows, groups, weights = witness
        inputs, engine = read_inputs(q, k, **options), Engine(gemm=gemm, variant=variant)
        if not may_see(options, rows, groups):
            verdict = check_bernstein(inputs, rows, groups, weights, eps=1e-9, engine=engine)
            assert verdict.status == "UNDECIDED" and "may not see it" in verdict.reason
            assert verdict.eps_below == 0.0
            seen["refused"] += 1
            return
        low, high = ball_limit(q, k, rows, groups, weights, **options)
        eps = max(min(float(high), 1e300) * (1 + which), 5e-324)
        verdict = check_bernstein(inputs, rows, groups, weights, eps=eps, engine=engine)
        assert_limit_is_true(verdict, high)
        if low == 0:
            assert verdict.eps_below == 0.0  # what has no inverse in balls of 400 bits has none in float64
            seen["singular"] += 1
        seen[verdict.status] += 1
        seen["causal"] += options["causal"] and bool(verdict)

    check()
    assert min(seen.values()) >= 30, seen


@settings(max_examples=400, deadline=None)
@given(witnesses(), st.integers(0, 2**32 - 1), st.floats(-13, -1), st.floats(-13, -1))
def test_advice_may_be_wrong(witness, seed, hint_digits, frame_digits):
    """The log-normalisers and the float inverse are found by code that no proof speaks of: spoil both."""
    q, k, options, rows, groups, weights = witness
    if not may_see(options, rows, groups):
        return
    inputs, rng = read_inputs(q, k, **options), np.random.default_rng(seed)
    frames = []

    def hints(*args):
        true = find(*args)
        return true + 10.0**hint_digits * rng.normal(size=true.shape)

    def frame(*args):
        true = make(*args)
        frames.append(true * (1 + 10.0**frame_digits * rng.normal(size=true.shape)))
        return frames[-1]

    find, make = lower.find_log_normalisers, lower._frame
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "find_log_normalisers", hints)
        patch.setattr(lower, "_frame", frame)
        verdict = check_bernstein(inputs, rows, groups, weights, eps=1e-9)
        leaked = check_leakage(inputs, rows, eps=0.25)
    if frames:
        _, high = ball_limit(q, k, np.sort(rows), groups, frames[0], **options)
        assert_limit_is_true(verdict, high)
    assert_leakage_is_true(leaked, len(rows), ball_leakage(q, k, rows, **options)[1])


def test_rounding_of_the_product_counts(monkeypatch):
    """Theorem 9's own arithmetic: A given, taken as exact, and weights that cancel to many digits."""
    rng = np.random.default_rng(11)
    inputs, lost, given_sums, frames = read_inputs(np.zeros((1, 1)), np.zeros((64, 1))), 0, [], []
    make = lower._frame

    def frame(*args):
        frames.append(make(*args))
        return frames[-1]

    def sweep_weights(inputs, rows, engine, take):
        take(slice(0, 1), slice(0, 64), given_sums[-1])
        return np.zeros(1)

    monkeypatch.setattr(lower, "_frame", frame)
    monkeypatch.setattr(lower, "_sweep_weights", sweep_weights)
    for _ in range(60):
        given_sums.append((1 + 1e-6 * rng.random((1, 64))) / 64)
        weights = rng.permutation(np.repeat([-32767, 32767], 32)).astype(np.int16)[:, None]
        verdict = check_bernstein(inputs, [0], np.arange(64), weights, eps=1e-12)
        size = float(np.abs(frames[-1]).max())
        with flint.ctx.workprec(400):
            pairs = zip(given_sums[-1][0], frames[-1][:, 0], strict=True)
            limit = abs(sum((arb(float(a)) * arb(float(f)) for a, f in pairs), arb(0))) / arb(size)
            assert 0.0 < verdict.eps_below and arb(verdict.eps_below) <= limit
            lost += bool(arb((1 - 1e-12) / size) > limit)
    assert lost >= 15  # without the bound on rounding the limit would often have been too large


def assert_leakage_is_true(verdict, size: int, held: arb) -> None:
    rank = max(verdict.rank, 1)
    with flint.ctx.workprec(400):
        limit = (held - (rank - 1)) / (size + rank - 1)
        assert verdict.eps_below == 0.0 or arb(verdict.eps_below) <= limit + BLUR
    assert verdict.status == ("PROVED" if verdict.eps < verdict.eps_below else "UNDECIDED")


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from([1e-9, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0, 2.0]), st.sampled_from(VARIANTS))
def test_leakage_proves_no_more_than_it_can(data, eps, variant):
    q, k, options = draw_head(data.draw)
    size = data.draw(st.integers(1, len(q)))
    rows = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))).permutation(len(q))[:size]
    inputs = read_inputs(q, k, **options)
    low, high = ball_leakage(q, k, rows, **options)
    verdict = check_leakage(inputs, rows, eps=eps, engine=Engine(variant=variant))
    assert_leakage_is_true(verdict, size, high)
    exact = (float(low) - eps * size) / (1 + eps)
    assert verdict.rank <= max(0, math.ceil(exact + 1e-9))
    assert verdict.rank >= math.ceil(exact - 1e-8 * (1 + size))  # tightness


def test_never_above_a_rank_known_by_construction():
    """`known` distinct queries or keys make that rank; jittering a row's logits by osc moves it 2 tanh(osc/4)."""
    reached = {0.0: 0, 1e-6: 0, 1e-3: 0, 0.03: 0}

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(
        seed=st.integers(0, 2**32 - 1),
        known=st.integers(1, 4),
        few=st.sampled_from(["queries", "keys"]),
        sharp=st.floats(0.5, 12.0),
        jitter=st.sampled_from(sorted(reached)),
        causal=st.booleans(),
    )
    def check(seed, known, few, sharp, jitter, causal):
        rng = np.random.default_rng(seed)
        n, m, d = 8, 14, 5
        q, k = sharp * rng.normal(size=(n, d)), rng.normal(size=(m, d))
        if few == "queries":
            q = q[np.arange(n) % known]
        else:
            k = k[np.arange(m) % known]
        moved = q + jitter * rng.normal(size=q.shape), k + jitter * rng.normal(size=k.shape)
        options = {"scale": 1.0, "causal": causal, "offset": m if causal else 0}  # a mask that hides nothing
        change = moved[0] @ moved[1].T - q @ k.T
        swing = (change.max(axis=1) - change.min(axis=1)).max()
        eps = float(2 * np.tanh(swing / 4)) * (1 + 1e-9) + 1e-12
        inputs, attention = read_inputs(*moved, **options), dense_attention(*moved, **options)
        for size in sorted({1, known, known + 1, n}):
            rows = good_rows(attention, size)
            for most in (127, 32767):
                verdict = check_bernstein(
                    inputs, rows, np.arange(m), good_weights(attention[rows], most), eps=eps
                )
                assert verdict.rank <= known
                assert size <= known or verdict.eps_below <= eps
                reached[jitter] += verdict.rank == known > 1
            assert check_leakage(inputs, rows, eps=eps).rank <= known

    check()
    assert min(reached.values()) >= 10, reached  # and the rank itself is proved, of many


def test_exact_ties_are_not_accepted():
    # P is 1/4 everywhere and A = 1: the limit of this witness is exactly 1
    inputs = read_inputs(np.zeros((2, 3)), np.zeros((4, 3)))
    flat = [0], np.zeros(4, int), np.ones((1, 1), np.int8)
    assert not check_bernstein(inputs, *flat, eps=1.0)
    assert check_bernstein(inputs, *flat, eps=1 - 1e-12)
    assert not check_leakage(inputs, [0], eps=1.0) and check_leakage(inputs, [0], eps=1 - 1e-12).rank == 1
    # P is the unit matrix but for e^-900: f = 3 proves rank r for eps < (4 - r)/(2 + r), and the unit matrix 1
    inputs = read_inputs(900.0 * np.eye(3), np.eye(3), scale=1.0)
    unit = [2, 0, 1], np.arange(3), np.eye(3, dtype=np.int8)
    assert not check_bernstein(inputs, *unit, eps=1.0) and check_bernstein(inputs, *unit, eps=1 - 1e-11)
    for rank, tie in ((2, 0.5), (3, 0.2)):
        assert check_leakage(inputs, [0, 1, 2], eps=tie).rank == rank - 1
        assert check_leakage(inputs, [0, 1, 2], eps=tie - 1e-11).rank == rank
    for exact in (False, True):
        for q, k, scale, witness in (
            (np.zeros((2, 3)), np.zeros((4, 3)), 1.0, flat),
            (900.0 * np.eye(3), np.eye(3), 1.0, unit),
        ):
            rows, groups, weights = witness
            claim = make_lower_claim(
                read_inputs(q, k, scale=scale),
                kind="bernstein",
                eps=1.0,
                rank=len(rows),
                rows=rows,
                groups=groups,
                weights=weights,
                method="tie",
                details={},
            )
            assert verify_lower(claim, q, k, scale=scale, exact=exact).status == "UNDECIDED"


@settings(max_examples=60, deadline=None)
@given(witnesses())
def test_the_limit_itself_is_a_tie(witness):
    q, k, options, rows, groups, weights = witness
    inputs = read_inputs(q, k, **options)
    limit = check_bernstein(inputs, rows, groups, weights, eps=1.0).eps_below
    if limit > 1e-300:
        below = check_bernstein(inputs, rows, groups, weights, eps=math.nextafter(limit, 0.0))
        assert below.rank == len(rows) and below.eps_below == limit
        assert not check_bernstein(inputs, rows, groups, weights, eps=limit)
        assert not check_bernstein(inputs, rows, groups, weights, eps=math.nextafter(limit, 1.0))
    for eps in (0.01, 0.3):
        limit = check_leakage(inputs, rows, eps=eps).eps_below
        if limit > eps:
            rank = check_leakage(inputs, rows, eps=eps).rank
            assert check_leakage(inputs, rows, eps=math.nextafter(limit, 0.0)).rank >= rank
            assert check_leakage(inputs, rows, eps=limit).rank < rank


@settings(max_examples=100, deadline=None)
@given(witnesses())
def test_ball_arithmetic_of_the_checker_agrees_with_the_definition(witness):
    q, k, options, rows, groups, weights = witness
    inputs, rows = read_inputs(q, k, **options), np.sort(rows)
    if not may_see(options, rows, groups):
        return
    for (below, above), (low, high) in (
        (
            enclose_bernstein_limit(inputs, rows, groups, weights),
            ball_limit(q, k, rows, groups, weights, **options),
        ),
        (enclose_leakage_sum(inputs, rows), ball_leakage(q, k, rows, **options)),
    ):
        with flint.ctx.workprec(400):
            assert arb(below) <= high + BLUR and (above == math.inf or low - BLUR <= arb(above))
        assert below < 1e-9 or above - below <= 1e-15 * above


# Tightness


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 14),
    m=st.integers(1, 20),
    sharp=st.floats(0.1, 4.0),
    shared=st.booleans(),
    causal=st.booleans(),
)
def test_a_good_witness_is_proved_up_to_a_billionth_of_its_limit(seed, n, m, sharp, shared, causal):
    rng = np.random.default_rng(seed)
    q, k = sharp * rng.normal(size=(n, 6)), rng.normal(size=(m, 6))
    bias = rng.normal(size=m)
    bias[1:][rng.random(m - 1) < 0.2] = -np.inf
    options = {"scale": 1.0, "key_bias": bias, "causal": causal, "offset": m if causal else 0}
    attention = dense_attention(q, k, **options)
    rows = good_rows(attention, min(n, m, 1 + seed % 5))
    count = max(1, m // 2) if shared else m
    groups = rng.permutation(m) % count
    weights = good_weights(add_up(attention[rows], groups, count))
    low, _ = ball_limit(q, k, rows, groups, weights, **options)
    limit = float(low)
    if limit > 1e-6:  # the rows are independent at all
        for gemm in ("blas", "portable"):
            inputs = read_inputs(q, k, **options)
            verdict = check_bernstein(
                inputs, rows, groups, weights, eps=limit * (1 - 1e-9), engine=Engine(gemm=gemm)
            )
            assert verdict.status == "PROVED" and verdict.rank == len(rows), (limit, verdict)


def test_a_large_witness_over_many_blocks_and_tiles():
    rng = np.random.default_rng(3)
    n, m, size = 500, 5000, 200
    q, k = 4.0 * rng.normal(size=(n, 8)), rng.normal(size=(m, 8))
    k[rng.permutation(m)[:n]] = q / 4.0
    groups = rng.permutation(m) % 900 - 1
    options = {"causal": True, "offset": m - n // 2}
    attention = dense_attention(q, k, **options)
    rows = rng.permutation(np.arange(n // 2, n))[:size]
    groups[np.arange(m) > rows.min() + options["offset"]] = -1
    weights = good_weights(add_up(attention[rows], groups, 899))
    inputs = read_inputs(q, k, **options)
    sums = add_up(attention[rows], groups, 899)
    frame = weights @ np.linalg.inv(sums @ weights)
    limit = 1 / np.abs(frame).sum(axis=1).max()
    verdicts = [
        check_bernstein(inputs, rows, groups, weights, eps=limit * (1 - 1e-8), engine=engine)
        for engine in (
            *(Engine(threads=t, tile_rows=h) for t in (1, 2, 3) for h in (7, 128, 1000)),
            *(Engine(gemm="portable", variant=v) for v in VARIANTS),
        )
    ]
    assert all(v.status == "PROVED" and v.rank == size and v.notion == "causal rank" for v in verdicts)
    limits = [v.eps_below for v in verdicts]
    assert max(limits) <= limit * (1 + 1e-9) and max(limits) - min(limits) <= 1e-10 * limit
    leaks = [
        check_leakage(inputs, rows, eps=0.1, engine=Engine(threads=t, tile_rows=h, gemm=g))
        for t in (1, 2, 3)
        for h in (7, 128)
        for g in ("blas", "portable")
    ]
    allowed = attention[rows][:, : rows.min() + options["offset"] + 1]
    exact = (allowed.max(axis=0).sum() - 0.1 * size) / 1.1
    assert {leak.rank for leak in leaks} == {math.ceil(exact)}


def test_same_numbers_for_every_number_of_threads():
    rng = np.random.default_rng(4)
    q, k = 3.0 * rng.normal(size=(300, 16)), rng.normal(size=(4500, 16))
    inputs, rows = read_inputs(q, k), np.arange(0, 300, 3)
    groups = np.arange(4500) % 300
    weights = good_weights(add_up(dense_attention(q, k)[rows], groups, 300))
    found = {
        (
            check_bernstein(inputs, rows, groups, weights, eps=0.1, engine=Engine(threads=t)).eps_below,
            check_leakage(inputs, rows, eps=0.1, engine=Engine(threads=t)).eps_below,
        )
        for t in (1, 2, 4)
        for _ in range(2)
    }
    assert len(found) <= 2  # tiles as high as the threads make them may change a product's last digits
    (bernstein, leakage), *others = found
    for other in others:
        assert other == pytest.approx((bernstein, leakage), rel=1e-11)


def test_order_of_rows_does_not_matter():
    rng = np.random.default_rng(5)
    q, k = 3.0 * rng.normal(size=(20, 4)), rng.normal(size=(30, 4))
    inputs, attention = read_inputs(q, k), dense_attention(q, k)
    rows = good_rows(attention, 6)
    weights = good_weights(attention[rows])
    limits = {
        check_bernstein(inputs, order, np.arange(30), weights, eps=0.1).eps_below
        for order in (rows, rows[::-1], np.sort(rows).astype(np.uint8), [int(r) for r in rows])
    }
    assert len(limits) == 1 and limits.pop() > 0


# What a head may hold


def test_garbage_in_hidden_keys_reaches_no_number():
    rng = np.random.default_rng(7)
    q, k = 3.0 * rng.normal(size=(5, 3)), rng.normal(size=(9, 3))
    bias = np.zeros(9)
    bias[[2, 4]] = -np.inf
    for options, hidden in (
        ({"key_bias": bias}, [2, 4]),
        ({"key_bias": bias, "causal": True, "offset": 2}, [2, 4, 7, 8]),
    ):
        rows, groups = [1, 3, 4], np.where(np.arange(9) <= 3, np.arange(9), -1)
        weights = good_weights(dense_attention(q, k, **options)[rows][:, :4])
        clean = check_bernstein(read_inputs(q, k, **options), rows, groups, weights, eps=1e-6)
        assert clean.eps_below > 1e-6
        for garbage in (np.nan, np.inf, 1e308):
            dirty = k.copy()
            dirty[hidden] = garbage
            inputs = read_inputs(q, dirty, **options)
            verdict = check_bernstein(inputs, rows, groups, weights, eps=1e-6)
            assert verdict.eps_below == clean.eps_below and verdict.digests == clean.digests
            assert (
                check_leakage(inputs, rows, eps=0.1).eps_below
                == check_leakage(read_inputs(q, k, **options), rows, eps=0.1).eps_below
            )


def test_weights_on_masked_keys_cost_their_norm():
    """P is 0 at a masked key and B is free there: a weight on it helps nothing and counts in the row norm."""
    q, k = 6.0 * np.eye(3), np.eye(3)
    bias = np.array([0.0, 0.0, -np.inf])
    inputs = read_inputs(q[:2], k, scale=1.0, key_bias=bias)
    plain = check_bernstein(
        inputs, [0, 1], np.arange(3), np.array([[1, 0], [0, 1], [0, 0]], np.int8), eps=0.1
    )
    heavy = check_bernstein(
        inputs, [0, 1], np.arange(3), np.array([[1, 0], [0, 1], [2, 2]], np.int8), eps=0.1
    )
    assert plain.eps_below == pytest.approx(math.tanh(3), rel=1e-9)
    # row 3 of F is (2, 2) A^-1, A = rows (s, 1-s), (1-s, s): A^-1 has row sums 1, hence (2, 2)
    assert heavy.eps_below == pytest.approx(0.25, rel=1e-9)


def test_float32_inputs_are_taken_as_the_numbers_they_are():
    rng = np.random.default_rng(8)
    q, k = (3 * rng.normal(size=(12, 4))).astype(np.float32), rng.normal(size=(15, 4)).astype(np.float32)
    rows = good_rows(dense_attention(q, k), 5)
    weights = good_weights(dense_attention(q, k)[rows])
    small, wide = (
        check_bernstein(read_inputs(q.astype(t), k.astype(t)), rows, np.arange(15), weights, eps=0.01)
        for t in (np.float32, np.float64)
    )
    assert small.to_dict() == wide.to_dict()


def test_causal_support_is_verified():
    """Above the mask entries are free: a key that one of the rows may not see proves nothing there."""
    q, k = 2.0 * np.eye(4), 2.0 * np.eye(4)
    options = {"scale": 1.0, "causal": True}
    inputs = read_inputs(q, k, **options)
    unit = np.eye(4, dtype=np.int8)
    full = check_bernstein(inputs, range(4), np.arange(4), unit, eps=0.1)
    assert full.status == "UNDECIDED" and full.reason == "key 1 has a group, but row 0 may not see it"
    assert check_bernstein(read_inputs(q, k, scale=1.0), range(4), np.arange(4), unit, eps=0.1).rank == 4
    # rows 2 and 3 see keys 0, 1, 2 both
    groups = np.array([0, 0, 1, -1])
    part = check_bernstein(inputs, [2, 3], groups, np.eye(2, dtype=np.int8), eps=0.1)
    assert part.status == "UNDECIDED" and part.eps_below > 0  # sound, and weak: row 3 sits on key 3
    q[3] = q[0]
    part = check_bernstein(read_inputs(q, k, **options), [2, 3], groups, np.eye(2, dtype=np.int8), eps=0.1)
    assert (part.status, part.rank, part.notion) == ("PROVED", 2, "causal rank")
    claim = make_lower_claim(
        inputs,
        kind="bernstein",
        eps=0.1,
        rank=4,
        rows=range(4),
        groups=np.arange(4),
        weights=unit,
        method="",
        details={},
    )
    for exact in (False, True):
        assert "may not see it" in verify_lower(claim, 2.0 * np.eye(4), k, **options, exact=exact).reason
    # leakage counts the keys that all rows may see: one for rows 0 to 3, three for rows 2 and 3
    assert check_leakage(inputs, range(4), eps=0.1).rank == 1
    assert check_leakage(read_inputs(8.0 * np.eye(4), k, scale=1.0), range(4), eps=0.01).rank == 4


# What is no witness


UNIT = np.eye(2, dtype=np.int8)


@pytest.mark.parametrize(
    "rows, groups, weights, what",
    [
        ([0, 0], [0, 1, -1], UNIT, "0 occurs more than once"),
        ([0, 3], [0, 1, -1], UNIT, "query indices from 0 to 2, got 3"),
        ([-1, 0], [0, 1, -1], UNIT, "query indices"),
        ([0.0, 1.0], [0, 1, -1], UNIT, "rows must be integers"),
        ([True, False], [0, 1, -1], UNIT, "rows must be integers"),
        ([[0, 1]], [0, 1, -1], UNIT, "rows must be 1-D"),
        ([[0], [1, 2]], [0, 1, -1], UNIT, "rows is not an array"),
        ([0, 1, 2, 0], [0, 1, -1], np.ones((4, 4), np.int8), "more than once"),
        ([0, 1], [0, 1], UNIT, "one number per key"),
        ([0, 1], [0, 2, -1], UNIT, "groups must be -1 or a row of weights"),
        ([0, 1], [0, 1, -2], UNIT, "groups must be -1 or a row of weights"),
        ([0, 1], [0.0, 1.0, -1.0], UNIT, "groups must be integers"),
        ([0, 1], [0, 1, -1], np.eye(2), "int8 or int16"),
        ([0, 1], [0, 1, -1], np.eye(2, dtype=np.int32), "int8 or int16"),
        ([0, 1], [0, 1, -1], np.eye(2, dtype=np.uint8), "int8 or int16"),
        ([0, 1], [0, 1, -1], np.ones((2, 3), np.int8), "one column per row"),
        ([0, 1], [0, 1, -1], np.ones(2, np.int8), "one column per row"),
        ([], [0, 1, -1], np.ones((2, 2), np.int8), "one column per row"),
    ],
)
def test_arrays_that_are_no_witness_are_refused(rows, groups, weights, what):
    inputs = read_inputs(np.eye(3), np.eye(3))
    with pytest.raises(InvalidInput, match=what):
        check_bernstein(inputs, rows, groups, weights, eps=0.1)
    if "group" not in what and "column" not in what and "int8" not in what and "per key" not in what:
        with pytest.raises(InvalidInput, match=what):
            check_leakage(inputs, rows, eps=0.1)


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan, math.inf, "much"])
def test_no_tolerance(eps):
    inputs = read_inputs(np.eye(3), np.eye(3))
    for check in (lambda: check_leakage(inputs, [0], eps=eps), lambda: check_leakage(inputs, [], eps=eps)):
        with pytest.raises(InvalidInput, match="eps must be"):
            check()
    with pytest.raises(InvalidInput, match="eps must be"):
        check_bernstein(inputs, [0], np.zeros(3, int), np.ones((1, 1), np.int8), eps=eps)


def test_the_empty_witness_proves_rank_0():
    for inputs in (read_inputs(np.eye(3), np.eye(3)), read_inputs(np.empty((0, 3)), np.eye(3))):
        for verdict in (
            check_bernstein(inputs, [], [-1] * 3, np.empty((0, 0), np.int8), eps=2.0),
            check_bernstein(inputs, np.empty(0, int), [0] * 3, np.empty((1, 0), np.int8), eps=1e-9),
            check_leakage(inputs, [], eps=0.5),
        ):
            assert (verdict.status, verdict.rank, verdict.kind) == ("PROVED", 0, "rule")
            assert verdict.eps_below == math.inf and verdict.to_dict()["eps_below"] is None


@pytest.mark.parametrize(
    "weights, what",
    [
        (np.zeros((3, 2), np.int8), "singular"),
        (np.ones((3, 2), np.int8), "singular|ill-conditioned"),
        (np.ones((1, 2), np.int8), "1 groups of keys cannot tell 2 rows apart"),
        (np.empty((0, 2), np.int8), "0 groups of keys cannot tell 2 rows apart"),
        (np.full((3, 2), 32767, np.int16), "singular|ill-conditioned"),
    ],
)
def test_singular_weights_prove_nothing(weights, what):
    inputs = read_inputs(np.eye(3), np.eye(3))
    groups = np.minimum(np.arange(3), weights.shape[0] - 1)
    verdict = check_bernstein(inputs, [0, 2], groups, weights, eps=1e-300)
    assert verdict.status == "UNDECIDED" and verdict.eps_below == 0.0 and verdict.rank == 0
    assert re.search(what, verdict.reason)
    assert verdict.breakdown == {}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**101])
def test_whatever_the_float_inverse_returns_nothing_false_is_proved(bad, monkeypatch):
    inputs = read_inputs(9.0 * np.eye(3), np.eye(3))
    witness = [0, 1, 2], np.arange(3), np.eye(3, dtype=np.int8)

    def broken(matrix):
        result = np.eye(3)
        result[1, 2] = bad
        return result

    monkeypatch.setattr(lower.np.linalg, "inv", broken)
    verdict = check_bernstein(inputs, *witness, eps=1e-30)
    assert verdict.status == "UNDECIDED" and verdict.eps_below == 0.0
    for hint in (bad, 800.0, -800.0):
        monkeypatch.setattr(lower, "find_log_normalisers", lambda *_, hint=hint: np.full(3, hint))
        for verdict in (
            check_bernstein(inputs, *witness, eps=1e-30),
            check_leakage(inputs, [0, 1, 2], eps=1e-30),
        ):
            assert verdict.status == "UNDECIDED" and verdict.eps_below == 0.0


def test_a_broken_product_is_caught(monkeypatch):
    from rankcert.checker import engine

    real = np.matmul

    def broken(a, b, out):
        real(a, b, out=out)
        out[: out.shape[0] // 2] *= 1 + 1e-9
        return out

    rng = np.random.default_rng(9)
    q, k = 3 * rng.normal(size=(50, 8)), rng.normal(size=(60, 8))
    attention = dense_attention(q, k)
    rows = good_rows(attention, 10)
    witness = rows, np.arange(60), good_weights(attention[rows])
    inputs = read_inputs(q, k)
    monkeypatch.setattr(engine.np, "matmul", broken)
    for verdict in (check_bernstein(inputs, *witness, eps=1e-3), check_leakage(inputs, rows, eps=0.01)):
        assert verdict.status == "UNDECIDED" and "BLAS cannot be trusted" in verdict.reason
    portable = Engine(gemm="portable")
    assert check_bernstein(inputs, *witness, eps=1e-3, engine=portable).rank == 10
    assert check_leakage(inputs, rows, eps=0.01, engine=portable).rank >= 1


def test_breakdown_gives_the_limit():
    rng = np.random.default_rng(10)
    q, k = 3 * rng.normal(size=(20, 8)), rng.normal(size=(30, 8))
    rows = good_rows(dense_attention(q, k), 8)
    verdict = check_bernstein(
        read_inputs(q, k), rows, np.arange(30), good_weights(dense_attention(q, k)[rows]), eps=1e-3
    )
    parts = verdict.breakdown
    assert verdict.eps_below == pytest.approx((1 - parts["defect"]) / parts["row norm"] - parts["rounding"])
    assert verdict.to_dict()["breakdown"] == parts and verdict.kind == "bernstein"
    leak = check_leakage(read_inputs(q, k), rows, eps=0.05)
    held = leak.breakdown["largest attentions"] - leak.breakdown["rounding"]
    assert leak.eps_below == pytest.approx((held - leak.rank + 1) / (len(rows) + leak.rank - 1))
