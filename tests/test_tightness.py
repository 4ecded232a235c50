"""A sound bound could still be useless; these tests say how close to the truth it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ball_errors, dense_attention

from rankcert import audit
from rankcert.checker import Engine, check_rows, find_log_normalisers, read_inputs
from rankcert.checker.kernel import VARIANTS


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 16),
    st.floats(0.1, 4.0),
    st.booleans(),
)
def test_bound_is_within_a_millionth_of_the_error(seed, n, m, d, sigma, causal):
    rng = np.random.default_rng(seed)
    q, k = sigma * rng.normal(size=(n, d)), rng.normal(size=(m, d))
    options = {"scale": 1 / np.sqrt(d), "key_bias": rng.normal(size=m), "causal": causal}
    p = dense_attention(q, k, **options)
    u, s, vt = np.linalg.svd(p, full_matrices=False)
    r = int(rng.integers(1, s.size + 1))
    left, right = u[:, :r] * s[:r], vt[:r].T
    true = max(float(high) for _, high in ball_errors(q, k, left, right, **options))
    for kwargs in ({}, {"gemm": "portable"}):
        verdict = audit(q, k, left, right, **options, **kwargs)
        assert verdict.bound <= 1.000001 * true + 1e-11
        assert verdict.bound_lower >= true / 1.000001 - 1e-11


def test_slack_stays_near_the_predicted_floor():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(40, 32)) * 3, rng.normal(size=(3000, 32))
    p = dense_attention(q, k)
    verdict = audit(q, k, p, np.eye(3000))
    size = np.linalg.norm(q, axis=1).max() * np.linalg.norm(k, axis=1).max() / np.sqrt(32)
    floor = 2.0**-52 * (35 * size + 30 + 2 * 135 + 3000)
    assert verdict.bound <= 4 * floor


@pytest.mark.parametrize("hint", ["given", "found"])
def test_threads_tiles_and_variants_change_only_the_last_digits(hint):
    rng = np.random.default_rng(1)
    n, m = 700, 5000
    q, k = rng.normal(size=(n, 16)), rng.normal(size=(m, 16))
    inputs = read_inputs(q, k, causal=True, offset=m - n)
    left, right = np.full((n, 2), 0.5 / m), np.ones((m, 2))
    log_normaliser = find_log_normalisers(inputs) if hint == "given" else None
    results = [
        check_rows(inputs, left, right, log_normaliser=log_normaliser, engine=engine)
        for engine in (
            *(Engine(threads=t, tile_rows=h) for t in (1, 2, 3) for h in (1, 7, 128, 1000)),
            *(Engine(gemm="portable", variant=v) for v in VARIANTS),
            *(Engine(variant=v) for v in VARIANTS),
        )
    ]
    floor = max(r.row_bounds.max() - r.row_bounds_lower.max() for r in results)
    for result in results:
        assert np.abs(result.row_bounds - results[0].row_bounds).max() <= floor
    # PROVED never against REFUTED, at any tolerance near the error
    for eps in np.linspace(results[0].bound_lower, results[0].bound, 20):
        statuses = {
            "PROVED" if r.bound <= eps else "REFUTED" if r.bound_lower > eps else "?" for r in results
        }
        assert not {"PROVED", "REFUTED"} <= statuses


def test_breakdown_adds_up_to_the_bound():
    rng = np.random.default_rng(2)
    verdict = audit(rng.normal(size=(9, 3)), rng.normal(size=(7, 3)), np.full((9, 1), 1 / 7), np.ones((7, 1)))
    assert sum(verdict.breakdown.values()) == pytest.approx(verdict.bound, rel=1e-13)
    assert verdict.row_bounds[verdict.worst_row] == verdict.bound


def test_hints_found_are_as_good_as_exact_ones():
    rng = np.random.default_rng(3)
    q, k = 5 * rng.normal(size=(30, 8)), 5 * rng.normal(size=(2500, 8))
    bias = np.where(rng.random(2500) < 0.3, -np.inf, 50 * rng.normal(size=2500))
    bias[0] = 0.0
    inputs = read_inputs(q, k, key_bias=bias, causal=True, offset=2400)
    x = np.where(np.arange(2500) <= np.arange(30)[:, None] + 2400, q @ k.T / np.sqrt(8) + bias, -np.inf)
    top = x.max(axis=1)
    assert (
        np.abs(find_log_normalisers(inputs) - top - np.log(np.exp(x - top[:, None]).sum(axis=1))).max()
        < 1e-10
    )
