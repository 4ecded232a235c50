"""What does not change the attention matrix must not change what is proved about it, beyond rounding.

docs/THEORY.md, Lemma 2: centring, gauge, permutations, duplicates, and row scalars.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankcert import audit, certify, geometry_report
from rankcert.checker import check_rows, read_inputs

SLACK = 1e-11  # bounds are a true error plus rounding terms of about 1e-13 at these sizes


@st.composite
def cases(draw):
    seed = draw(st.integers(0, 2**32 - 1))
    n, m, d = draw(st.integers(1, 15)), draw(st.integers(2, 15)), draw(st.integers(1, 4))
    rng = np.random.default_rng(seed)
    q, k, bias = rng.normal(size=(n, d)), rng.normal(size=(m, d)), rng.normal(size=m)
    left, right = rng.random(size=(n, 2)) / m, rng.random(size=(m, 2))
    return rng, q, k, bias, left, right


def bounds(q, k, left, right, **options):
    return audit(q, k, left, right, scale=0.8, **options).row_bounds


@settings(max_examples=80, deadline=None)
@given(cases(), st.booleans())
def test_centring_keys_changes_nothing(case, causal):
    rng, q, k, bias, left, right = case
    moved = k - rng.normal(size=k.shape[1])
    before = bounds(q, k, left, right, key_bias=bias, causal=causal)
    after = bounds(q, moved, left, right, key_bias=bias, causal=causal)
    assert np.abs(before - after).max() <= SLACK


@settings(max_examples=80, deadline=None)
@given(cases(), st.booleans())
def test_centring_queries_is_a_key_bias(case, causal):
    rng, q, k, bias, left, right = case
    c = rng.normal(size=q.shape[1])
    before = bounds(q, k, left, right, key_bias=bias, causal=causal)
    after = bounds(q - c, k, left, right, key_bias=bias + 0.8 * (k @ c), causal=causal)
    assert np.abs(before - after).max() <= SLACK


@settings(max_examples=80, deadline=None)
@given(cases(), st.booleans())
def test_gauge_changes_nothing(case, causal):
    rng, q, k, bias, left, right = case
    d = q.shape[1]
    a = np.linalg.qr(rng.normal(size=(d, d)))[0] * 2.0 ** rng.integers(-2, 3, size=d)
    before = bounds(q, k, left, right, key_bias=bias, causal=causal)
    after = bounds(q @ a, k @ np.linalg.inv(a).T, left, right, key_bias=bias, causal=causal)
    assert np.abs(before - after).max() <= SLACK


@settings(max_examples=80, deadline=None)
@given(cases())
def test_permutations_permute_the_row_bounds(case):
    rng, q, k, bias, left, right = case
    rows, columns = rng.permutation(len(q)), rng.permutation(len(k))
    before = bounds(q, k, left, right, key_bias=bias)
    after = bounds(q[rows], k[columns], left[rows], right[columns], key_bias=bias[columns])
    assert np.abs(before[rows] - after).max() <= SLACK


@settings(max_examples=80, deadline=None)
@given(cases())
def test_a_bias_on_every_key_changes_nothing(case):
    rng, q, k, bias, left, right = case
    before = bounds(q, k, left, right, key_bias=bias, causal=True)
    after = bounds(q, k, left, right, key_bias=bias + rng.normal() * 10, causal=True)
    assert np.abs(before - after).max() <= SLACK


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(1, 4))
def test_copies_of_a_key_are_a_bias(case, copies):
    """A key c times is the key once with bias log c; its factor row is shared evenly among the copies."""
    rng, q, k, bias, left, right = case
    times = np.ones(len(k), dtype=int)
    times[rng.integers(len(k))] = copies
    before = bounds(q, k, left, right, key_bias=bias + np.log(times))
    copied = np.repeat(np.arange(len(k)), times)
    after = bounds(q, k[copied], left, (right / times[:, None])[copied], key_bias=bias[copied])
    assert np.abs(before - after).max() <= SLACK


@pytest.mark.parametrize("method", ["exact", "taylor", "minimax", "chebyshev", "harmonic", "svd"])
def test_certified_ranks_do_not_depend_on_the_writing(method):
    """The same head centred, in another gauge, permuted: the same rank, and bounds within rounding."""
    rng = np.random.default_rng(3)
    angle = rng.uniform(0, 2 * math.pi, size=(2, 400))
    q, k = np.stack([np.cos(angle), np.sin(angle)], axis=2)
    a = np.array([[2.0, 1.0], [0.0, 0.5]])
    order = rng.permutation(400)
    ranks = {
        certify(x, y, eps=0.1, scale=2.0, method=method).rank
        for x, y in (
            (q, k),
            (q, k + np.array([3.0, -1.0])),
            (q @ a, k @ np.linalg.inv(a).T),
            (q[order], k[order[::-1]]),
        )
    }
    assert len(ranks) == 1


def test_duplicates_change_neither_rank_nor_dimension():
    rng = np.random.default_rng(4)
    q, k = rng.normal(size=(30, 3)), rng.normal(size=(20, 3))
    twice = np.repeat(k, 2, axis=0)
    assert certify(q, twice, eps=0.05).rank == certify(q, k, eps=0.05).rank
    alone, doubled = (geometry_report(q, x, tolerances=[0.0, 0.3]) for x in (k, twice))
    assert [row.dimension for row in alone.dimensions] == [row.dimension for row in doubled.dimensions]
    assert doubled.distinct_keys == 20


@pytest.mark.parametrize(
    "method", ["taylor", "minimax", "chebyshev", "harmonic", "svd", "cells", "recompress"]
)
def test_smaller_eps_never_gives_a_smaller_rank(method):
    rng = np.random.default_rng(5)
    points = rng.normal(size=(2, 600, 2))
    q, k = points / np.linalg.norm(points, axis=2, keepdims=True)
    ranks = [certify(q, k, eps=eps, scale=1.5, method=method).rank for eps in (0.5, 0.2, 0.1, 0.03, 0.01)]
    assert ranks == sorted(ranks)


def test_upcasting_float32_changes_no_digit():
    rng = np.random.default_rng(6)
    q, k = rng.normal(size=(9, 4)).astype(np.float32), rng.normal(size=(7, 4)).astype(np.float32)
    left, right = np.full((9, 1), 1 / 7), np.ones((7, 1))
    single = check_rows(read_inputs(q, k), left, right)
    double = check_rows(read_inputs(q.astype(float), np.asfortranarray(k.astype(float))), left, right)
    assert np.array_equal(single.row_bounds, double.row_bounds) and single.digests == double.digests
