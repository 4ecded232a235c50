"""PROVED implies that ball arithmetic agrees: the one property everything else stands on.

Random problems are biased towards edges (problems.py); the oracle is 160-bit ball arithmetic from the definition
(oracles.py). Soundness is asserted here for every row, in both directions; tightness in test_tightness.py.
"""

import math

import flint
import numpy as np
import pytest
from flint import arb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import ball_errors, dense_attention, exact_dot, rationals, second_bound
from problems import draw_problem, problems

from rankcert import audit, verify
from rankcert.certificates import make_certificate
from rankcert.checker import Engine, check_rows, logit_residual, read_inputs
from rankcert.checker.exact import enclose_rows
from rankcert.checker.kernel import VARIANTS

ROWS_WANTED = 20_000
BLUR = arb("1e-40")  # more than the width of the oracle's balls, which no float64 bound could resolve anyway


def assert_sound(problem, verdict, ends):
    """Every row's true error lies in [row_bounds_lower, row_bounds], and the status is true."""
    if (
        problem.left.shape[1] == 0
    ):  # rank 0 is judged by rule: the error is 1, which no ball of radius > 0 is below
        assert (verdict.row_bounds == 1.0).all() and (verdict.row_bounds_lower == 1.0).all()
        assert verdict.status == ("PROVED" if verdict.eps >= 1.0 else "REFUTED")
        return
    with flint.ctx.workprec(400):
        for i, (low, high) in enumerate(ends):
            upper, lower = verdict.row_bounds[i], verdict.row_bounds_lower[i]
            assert upper == math.inf or high - BLUR <= arb(upper), (i, upper, high)
            assert lower == -math.inf or arb(lower) <= low + BLUR, (i, lower, low)
        if verdict.status == "PROVED":
            assert all(high - BLUR <= arb(verdict.eps) for _, high in ends)
        if verdict.status == "REFUTED":
            assert any(low + BLUR > arb(verdict.eps) for low, _ in ends)


def near(ends, which: float) -> float:
    """A tolerance a few units of rounding to a few percent away from the largest true error."""
    largest = max(float(high) for _, high in ends)
    return max(largest * (1 + which), 5e-324)


def test_every_row_of_many_thousand():
    seen = {"rows": 0, "PROVED": 0, "REFUTED": 0, "UNDECIDED": 0}

    @settings(
        max_examples=4600,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        problems(),
        st.sampled_from([0.0, 1e-15, -1e-15, 1e-12, -1e-12, 1e-6, -1e-6, 0.05, -0.05, 0.5, -0.5]),
        st.sampled_from(VARIANTS),
        st.sampled_from(["blas", "portable"]),
    )
    def check(problem, which, variant, gemm):
        ends = ball_errors(problem.q, problem.k, problem.left, problem.right, **problem.options)
        inputs = read_inputs(problem.q, problem.k, **problem.options)
        verdict = check_rows(
            inputs,
            problem.left,
            problem.right,
            eps=near(ends, which),
            log_normaliser=problem.hint,
            engine=Engine(gemm=gemm, variant=variant),
        )
        assert_sound(problem, verdict, ends)
        seen["rows"] += len(ends)
        seen[verdict.status] += 1

    check()
    assert seen["rows"] >= ROWS_WANTED, seen
    assert min(seen.values()) >= 100, seen  # all three verdicts were really met


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(0, 5))
def test_exact_rows_and_exact_agree_with_the_definition(problem, rows):
    ends = ball_errors(problem.q, problem.k, problem.left, problem.right, **problem.options)
    eps = near(ends, 1e-12)
    for kwargs in ({"exact": True}, {"exact_rows": rows}):
        verdict = audit(
            problem.q, problem.k, problem.left, problem.right, eps=eps, **problem.options, **kwargs
        )
        assert_sound(problem, verdict, ends)
    inputs = read_inputs(problem.q, problem.k, **problem.options)
    if problem.left.shape[1]:
        lower, upper = enclose_rows(inputs, problem.left, problem.right, range(inputs.n))
        for (low, high), a, b in zip(ends, lower, upper, strict=True):
            assert arb(a) <= high and low <= arb(b)
            assert b - a <= 1e-15 * (1 + b)


@pytest.mark.parametrize("m", [2047, 2048, 2049, 4500])
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_and_tails(m, variant):
    problem = draw_problem(m, (3, m, 2), "normal", "masked", "truncated", "good", "float64", "C", True, m - 2)
    ends = ball_errors(problem.q, problem.k, problem.left, problem.right, **problem.options)
    inputs = read_inputs(problem.q, problem.k, **problem.options)
    for hint in (problem.hint, None):
        engine = Engine(variant=variant, gemm="portable", tile_rows=2)
        verdict = check_rows(inputs, problem.left, problem.right, eps=0.5, log_normaliser=hint, engine=engine)
        assert_sound(problem, verdict, ends)
        assert verdict.bound < max(float(high) for _, high in ends) + 1e-10


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 40), st.integers(1, 8))
def test_second_implementation_agrees(seed, n, m, d):
    rng = np.random.default_rng(seed)
    q, k, b = rng.normal(size=(n, d)), rng.normal(size=(m, d)), rng.normal(size=m)
    left, right = rng.normal(size=(n, 3)) / m, rng.normal(size=(m, 3))
    logits = 0.8 * q @ k.T + b
    hint = np.log(np.exp(logits).sum(axis=1))
    ours = check_rows(read_inputs(q, k, scale=0.8, key_bias=b), left, right, log_normaliser=hint).row_bounds
    theirs = second_bound(q, k, left, right, hint, scale=0.8, key_bias=b)
    assert np.abs(ours - theirs).max() <= 1e-12 * (1 + theirs.max())


@settings(max_examples=300, deadline=None)
@given(problems())
def test_residual_bound_covers_the_softmax_change(problem):
    """Theorem 4 against the definition: exact softmax of l + b, against exact softmax of L + b, in balls."""
    inputs = read_inputs(problem.q, problem.k, **problem.options)
    rng = np.random.default_rng(1)
    r = inputs.d
    left = np.array(inputs.query) * inputs.scale + 0.05 * rng.normal(size=(inputs.n, r))
    right = np.array(inputs.key)
    verdict = logit_residual(inputs, left, right)
    kept = np.flatnonzero(inputs.kept_keys)
    for i in range(inputs.n):
        columns = [j for j in kept if j < inputs.reach[i]]
        change = _softmax_change(inputs, left, right, i, columns)
        assert change <= arb(verdict.row_bounds[i])


def _softmax_change(inputs, left, right, i, columns):
    def softmax(values):
        top = arb(max(float(v) for v in values))
        weights = [(v - top).exp() for v in values]
        total = sum(weights, arb(0))
        return [w / total for w in weights]

    with flint.ctx.workprec(200):
        bias = [arb(float(inputs.key_bias[j])) for j in columns]
        logits = [exact_dot(rationals(inputs.query)[i], key) for key in rationals(inputs.key[columns])]
        others = [exact_dot(rationals(left)[i], key) for key in rationals(right[columns])]
        a = softmax([arb(x) * arb(inputs.scale) + b for x, b in zip(logits, bias, strict=True)])
        c = softmax([arb(x) + b for x, b in zip(others, bias, strict=True)])
        return sum((abs(x - y) for x, y in zip(a, c, strict=True)), arb(0)).lower()


def test_eps_one_float_below_the_error_is_never_proved():
    rng = np.random.default_rng(5)
    for _ in range(50):
        q, k = rng.normal(size=(4, 2)), rng.normal(size=(6, 2))
        left, right = np.full((4, 1), 1 / 6), np.ones((6, 1))
        exact = audit(q, k, left, right, exact=True)
        below = math.nextafter(exact.bound_lower, 0.0)
        for kwargs in ({}, {"exact": True}, {"gemm": "portable"}):
            assert audit(q, k, left, right, eps=below, **kwargs).status != "PROVED"
        assert audit(q, k, left, right, eps=exact.bound, exact=True).status == "PROVED"


def test_lowering_eps_below_the_recomputed_bound_is_not_proved():
    rng = np.random.default_rng(6)
    q, k = rng.normal(size=(20, 3)), rng.normal(size=(30, 3))
    p = dense_attention(q, k)
    inputs = read_inputs(q, k)
    verdict = check_rows(inputs, p, np.eye(30), eps=0.1)
    for eps, status in ((verdict.bound, "PROVED"), (math.nextafter(verdict.bound, 0.0), "UNDECIDED")):
        certificate = make_certificate(
            inputs, eps, p, np.eye(30), np.log(np.ones(20)), method="exact", details={}, verdict=verdict
        )
        hinted = check_rows(inputs, certificate.left, certificate.right, eps=eps)
        assert hinted.status == status
    assert verify(certificate, q, k).status != "PROVED"  # the wrong hint only weakens it


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**251])
@pytest.mark.parametrize("where", ["left", "right", "hint"])
def test_non_finite_claims_are_undecided(bad, where):
    q = k = np.eye(3)
    left, right, hint = np.eye(3), np.eye(3), np.zeros(3)
    {"left": left, "right": right, "hint": hint}[where].flat[1] = bad
    verdict = audit(q, k, left, right, eps=5.0, log_normaliser=hint)
    assert verdict.status == "UNDECIDED" and verdict.bound == math.inf
    if where != "hint":
        assert audit(q, k, left, right, eps=5.0, exact=True).status == "UNDECIDED"


def test_garbage_in_hidden_keys_reaches_no_number():
    rng = np.random.default_rng(7)
    q, k = rng.normal(size=(5, 3)), rng.normal(size=(9, 3))
    bias = np.zeros(9)
    bias[[2, 4]] = -np.inf
    left, right = rng.normal(size=(5, 2)) / 9, rng.normal(size=(9, 2))
    for options, hidden in (
        ({"key_bias": bias}, [2, 4]),
        ({"key_bias": bias, "causal": True, "offset": 2}, [2, 4, 7, 8]),
    ):
        clean = audit(q, k, left, right, **options)
        for garbage in (np.nan, np.inf, 1e308):
            dirty = k.copy()
            dirty[hidden] = garbage
            verdict = audit(q, dirty, left, right, **options)
            assert np.array_equal(verdict.row_bounds, clean.row_bounds)
            assert verdict.digests == clean.digests


@pytest.mark.parametrize(
    "mask", [-1e4, -1e9, float(np.finfo(np.float32).min), float(np.finfo(np.float64).min)]
)
def test_finite_masks_cost_nothing(mask):
    rng = np.random.default_rng(8)
    q, k = rng.normal(size=(6, 3)), rng.normal(size=(9, 3))
    bias = np.zeros(9)
    bias[[1, 5]] = mask
    p = dense_attention(q, k, key_bias=bias)
    verdict = audit(q, k, p, np.eye(9), key_bias=bias)
    assert verdict.bound < 1e-12
    assert audit(q, k, p, np.eye(9), key_bias=np.where(bias < -1, -np.inf, bias)).bound < 1e-12


def test_rows_without_a_key_are_refused_with_their_index():
    q, k = np.ones((4, 2)), np.ones((5, 2))
    with pytest.raises(ValueError, match="row 0 keeps no key"):
        audit(q, k, np.ones((4, 1)), np.ones((5, 1)), key_bias=np.full(5, -np.inf))
    with pytest.raises(ValueError, match=r"row 0 keeps no key.*first 0 keys"):
        audit(q, k, np.ones((4, 1)), np.ones((5, 1)), causal=True, offset=-1)
    bias = np.array([-np.inf, -np.inf, 0, 0, 0.0])
    with pytest.raises(ValueError, match=r"row 0 keeps no key.*first 1 keys"):
        audit(q, k, np.ones((4, 1)), np.ones((5, 1)), causal=True, key_bias=bias)


def test_the_zero_matrix_is_judged_by_rule():
    q = k = np.eye(3)
    empty = np.zeros((3, 0))
    for eps, status in ((0.999, "REFUTED"), (1.0, "PROVED"), (7.0, "PROVED")):
        verdict = audit(q, k, empty, empty, eps=eps)
        assert (verdict.status, verdict.bound, verdict.bound_lower) == (status, 1.0, 1.0)
    none = audit(np.zeros((0, 3)), k, np.zeros((0, 2)), np.zeros((3, 2)), eps=0.1)
    assert (none.status, none.bound) == ("PROVED", 0.0)


def test_a_broken_product_is_caught(monkeypatch):
    from rankcert.checker import engine

    real = np.matmul

    def broken(a, b, out):
        real(a, b, out=out)
        out[: out.shape[0] // 2] *= 1 + 1e-9
        return out

    rng = np.random.default_rng(9)
    q, k = rng.normal(size=(50, 8)), rng.normal(size=(60, 8))
    left, right = rng.normal(size=(50, 4)), rng.normal(size=(60, 4))
    monkeypatch.setattr(engine.np, "matmul", broken)
    verdict = audit(q, k, left, right, eps=1e6)
    assert verdict.status == "UNDECIDED" and "BLAS cannot be trusted" in verdict.reason
    assert audit(q, k, left, right, eps=1e6, gemm="portable").status == "PROVED"
