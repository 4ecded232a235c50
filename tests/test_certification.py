"""The policy: every candidate is reported, the smallest proved rank is kept, and no rank is too good to be true."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_attention

import rankcert
from rankcert import METHODS, CannotCertify, InvalidInput, certify, verify
from rankcert.heads import EXAMPLES


def rank_lower_bound(p: np.ndarray, eps: float) -> int:
    """Every B within eps of P has at least this rank: |P - B| <= eps in max-row-l1 gives |P - B|_2 <= eps sqrt(n)."""
    return int((np.linalg.svd(p, compute_uv=False) > eps * math.sqrt(p.shape[0]) * (1 + 1e-9)).sum())


def well_separated(count, distinct, jitter, seed):
    """q = k with `distinct` far-apart points: P is a permutation-like matrix of numerical rank `distinct`."""
    rng = np.random.default_rng(seed)
    angle = 2 * np.pi * np.arange(distinct) / distinct
    points = np.column_stack([np.cos(angle), np.sin(angle)])[np.arange(count) % distinct]
    return points + jitter * rng.normal(size=points.shape), 40.0 * distinct**2


@pytest.mark.parametrize(
    ("count", "distinct", "jitter"), [(12, 12, 0.0), (30, 10, 0.0), (30, 10, 1e-5), (24, 1, 0.0)]
)
@pytest.mark.parametrize("eps", [0.05, 0.4])
def test_never_below_the_known_rank(count, distinct, jitter, eps):
    points, scale = well_separated(count, distinct, jitter, seed=1)
    certificate = certify(points, points, eps=eps, scale=scale)
    # the blocks are uniform on equal points, so P has exactly `distinct` singular values 1 and the rest near 0
    assert certificate.rank >= distinct
    if jitter == 0.0:
        assert certificate.rank == distinct


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_permutation_and_identity_heads_have_full_rank(size):
    order = np.random.default_rng(size).permutation(size)
    eye = np.eye(size)
    for q in (eye, eye[order]):
        certificate = certify(q, eye, eps=0.9, scale=100.0)
        assert (
            certificate.rank == size
        )  # each row is a unit vector up to e^-100: below rank n some row is off by 1


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 4),
    st.sampled_from([0.9, 0.3, 0.05, 1e-6]),
    st.booleans(),
)
def test_rank_stands_between_the_spectral_bound_and_the_trivial_one(seed, n, m, d, eps, causal):
    rng = np.random.default_rng(seed)
    q, k, bias = 2 * rng.normal(size=(n, d)), rng.normal(size=(m, d)), rng.normal(size=m)
    certificate = certify(q, k, eps=eps, key_bias=bias, causal=causal)
    assert 1 <= certificate.rank <= min(n, m)
    assert certificate.bound <= eps
    if not causal:  # entries above a causal mask are free, so the spectrum of P says nothing there
        assert certificate.rank >= rank_lower_bound(dense_attention(q, k, key_bias=bias), eps)
    assert verify(certificate, q, k, key_bias=bias, causal=causal).status == "PROVED"


@pytest.mark.parametrize("name", EXAMPLES)
def test_on_the_shipped_heads(name):
    head = rankcert.example_head(name)
    p = dense_attention(head.q, head.k, **head.options())
    allowed = p > 0 if head.causal else np.ones_like(p, dtype=bool)
    u, s, vt = np.linalg.svd(p)
    errors = [
        np.where(allowed, abs(p - (u[:, :r] * s[:r]) @ vt[:r]), 0.0).sum(axis=1).max() for r in range(257)
    ]
    for eps in (0.5, 0.1):
        expected = next(r for r, error in enumerate(errors) if error <= eps)
        svd = certify(head.q, head.k, eps=eps, method="svd", **head.options())
        assert svd.rank == expected
        assert svd.bound == pytest.approx(errors[expected], rel=1e-6)
        assert certify(head.q, head.k, eps=eps, **head.options()).rank <= expected


def test_every_method_is_reported_and_the_smallest_rank_kept():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(300, 2)), rng.normal(size=(300, 2))
    certificate = certify(q, k, eps=0.1)
    assert {c.method for c in certificate.candidates} >= set(METHODS)
    proved = [c for c in certificate.candidates if c.status == "proved"]
    assert certificate.rank == min(c.rank for c in proved)
    for c in certificate.candidates:
        assert c.status in ("proved", "unproved", "skipped")
        assert (c.bound is None) == (c.status == "skipped")
        assert c.note or c.status == "proved"
        assert c.seconds >= 0


def test_a_polynomial_rank_beyond_min_n_m_is_counted_and_never_allocated():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(40, 16)) * 3, rng.normal(size=(50, 16))
    certificate = certify(q, k, eps=0.1, effort="max")
    taylor = next(c for c in certificate.candidates if c.method == "taylor")
    assert taylor.status == "skipped" and taylor.rank > 10**9 and "min(n, m) = 40" in taylor.note
    with pytest.raises(CannotCertify, match=r"min\(n, m\) = 40") as caught:
        certify(q, k, eps=0.1, method="taylor")
    assert caught.value.rank == taylor.rank and caught.value.bound is None


@pytest.mark.parametrize("eps", [1.0, 1.5, 1e6])
def test_from_eps_one_on_rank_zero_is_proved_by_rule(eps):
    q = np.random.default_rng(0).normal(size=(5, 2))
    certificate = certify(q, q, eps=eps)
    assert (certificate.rank, certificate.bound, certificate.method) == (0, 1.0, "zero")
    assert verify(certificate, q, q).status == "PROVED"


def test_below_rounding_nothing_is_claimed():
    q = np.random.default_rng(0).normal(size=(5, 2))
    with pytest.raises(CannotCertify) as caught:
        certify(q, q, eps=1e-17)
    assert caught.value.candidates
    huge = q * 1e12  # logits of 1e24: their rounding alone exceeds any eps below 1
    with pytest.raises(CannotCertify):
        certify(huge, huge, eps=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": 0}, "eps must be a positive finite number, got 0"),
        ({"eps": -0.1}, "eps must be"),
        ({"eps": math.nan}, "eps must be"),
        ({"eps": "small"}, "eps must be"),
        ({"method": "magic"}, "method must be 'auto' or one of"),
        ({"memory": 0}, "memory must be a positive number of bytes"),
        ({"threads": 0}, "threads must be a positive integer"),
        ({"scale": math.inf}, "scale must be a finite number"),
        ({"key_bias": np.zeros(4)}, r"shape \(5,\), got \(4,\)"),
        ({"key_bias": np.array([0, 0, np.inf, 0, 0])}, r"key_bias\[2\] is inf"),
        ({"causal": 1}, "causal must be True or False"),
        ({"offset": 2}, "only with causal=True"),
    ],
)
def test_bad_options_are_one_clear_error(arguments, message):
    q = np.ones((5, 2))
    with pytest.raises(InvalidInput, match=message):
        certify(q, q, **({"eps": 0.1} | arguments))


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (np.ones((2, 3, 4)), np.ones((2, 3, 4)), r"one head.*rankcert heads"),
        (np.ones(3), np.ones((3, 1)), "q must be 2-D"),
        (np.ones((3, 2)), np.ones((3, 4)), "same width"),
        (np.ones((3, 0)), np.ones((3, 0)), "head width"),
        (np.ones((3, 2)), np.ones((0, 2)), "k has no rows"),
        (np.ones((3, 2), dtype=complex), np.ones((3, 2)), "dtype complex128"),
        (np.ones((3, 2), dtype=bool), np.ones((3, 2)), "dtype bool"),
        ([["a", "b"]], np.ones((3, 2)), "q must be integer"),
        (np.array([[1.0, np.nan]]), np.ones((3, 2)), "row 0 is not finite"),
        (np.ones((1, 2)), np.array([[1.0, 1.0], [np.inf, 1.0]]), "kept key 1 is not finite"),
        (np.full((1, 2), 2**53 + 1), np.ones((3, 2)), "beyond 2\\*\\*53"),
        (np.ma.masked_array(np.ones((2, 2)), mask=True), np.ones((3, 2)), "masked array"),
    ],
)
def test_bad_arrays_are_one_clear_error(q, k, message):
    with pytest.raises(InvalidInput, match=message):
        certify(q, k, eps=0.1)


def test_progress_names_the_stages():
    stages = []
    q = np.random.default_rng(0).normal(size=(30, 2))
    certify(q, q, eps=0.1, progress=lambda stage: stages.append(stage))
    assert "planning splitting" in stages and any(stage.startswith("checking ") for stage in stages)
