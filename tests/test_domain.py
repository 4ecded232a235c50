"""A domain certificate promises something about heads nobody has seen: here many are drawn, boundaries included."""

import math
from pathlib import Path

import numpy as np
import pytest
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ball_errors, dense_attention

import rankcert
from rankcert import CannotCertify, InvalidInput, MalformedCertificate, certify_domain
from rankcert.checker.domain import DomainClaim, check_domain, read_domain, read_domain_claim


def tokens(rng, count, dim, radius, kind):
    """Points of the ball: inside, on the sphere, or at the two ends of a diameter."""
    x = rng.normal(size=(count, dim))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    if kind == "inside":
        x *= rng.random((count, 1)) ** (1 / dim)
    if kind == "ends":
        x[:] = x[0] * np.where(rng.random((count, 1)) < 0.5, 1.0, -1.0)
    return x * radius


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dim=st.integers(1, 4),
    width=st.sampled_from([0.05, 0.7, 2.0, 3.5]),
    eps=st.sampled_from([0.5, 0.1, 0.01]),
    kinds=st.tuples(*[st.sampled_from(["inside", "boundary", "ends"])] * 2),
    bias=st.sampled_from(["none", "normal", "huge", "masked"]),
    centred=st.booleans(),
)
def test_no_head_of_the_domain_is_worse_than_the_bound(seed, dim, width, eps, kinds, bias, centred):
    rng = np.random.default_rng(seed)
    query_radius, scale = 10.0 ** rng.uniform(-2, 2), float(rng.choice([-1, 1]) * 10.0 ** rng.uniform(-2, 2))
    key_radius = width / abs(scale) / query_radius
    certificate = certify_domain(dim, query_radius, key_radius, eps=eps, scale=scale)
    assert certificate.bound <= eps
    q = tokens(rng, 4, dim, query_radius, kinds[0])
    centre = rng.normal(size=dim) * key_radius if centred else np.zeros(dim)
    k = tokens(rng, 12, dim, key_radius * (1 - 1e-12 * centred), kinds[1]) + centre
    key_bias = {
        "none": None,
        "normal": rng.normal(size=12),
        "huge": 400 * rng.normal(size=12),
        "masked": np.where(np.arange(12) % 3 == 1, -np.inf, 0.0),
    }[bias]
    left, right = certificate.factors(q, k, key_bias=key_bias, centre=centre if centred else None)
    for _, high in ball_errors(q, k, left, right, scale=scale, key_bias=key_bias):
        assert high <= arb(certificate.bound)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.floats(0.05, 3.5), st.sampled_from([0.3, 0.05]))
def test_bound_is_not_far_above_the_worst_head(seed, dim, width, eps):
    """Two keys where p errs most in either direction, biased to equal mass, come within five percent (tightness)."""
    certificate = certify_domain(dim, 1.0, width, eps=eps, scale=1.0, max_keys=100)
    x = np.linspace(-width, width, 4001)
    error = np.polyval(certificate.coefficients[::-1], x) * np.exp(-x) - 1
    pair = np.zeros((2, dim))
    pair[:, 0] = x[[np.argmax(error), np.argmin(error)]]
    q = np.eye(1, dim)
    left, right = certificate.factors(q, pair, key_bias=-pair[:, 0])
    worst = np.abs(dense_attention(q, pair, scale=1.0, key_bias=-pair[:, 0]) - left @ right.T).sum()
    assert worst <= certificate.bound <= 1.05 * worst + 1e-9


def test_exact_normaliser():
    certificate = certify_domain(2, 1.0, 2.0, eps=0.1, scale=1.0, normaliser="exact")
    rng = np.random.default_rng(0)
    q, k = tokens(rng, 30, 2, 1.0, "boundary"), tokens(rng, 40, 2, 2.0, "boundary")
    z = np.exp(q @ k.T).sum(axis=1)
    left, right = certificate.query_features(q) / z[:, None], certificate.key_features(k)
    assert np.abs(dense_attention(q, k, scale=1.0) - left @ right.T).sum(axis=1).max() <= certificate.bound
    with pytest.raises(InvalidInput, match="exact normaliser"):
        certificate.stream()


def test_streaming_apply_and_factors_agree():
    rng = np.random.default_rng(1)
    certificate = certify_domain(3, 1.0, 2.0, eps=0.05, scale=1.0)
    q, k = tokens(rng, 50, 3, 1.0, "inside"), tokens(rng, 70, 3, 2.0, "inside")
    values, bias = rng.normal(size=(70, 5)), np.sort(30 * rng.normal(size=70))
    bias[:3] = -np.inf
    left, right = certificate.factors(q, k, key_bias=bias)
    stream = certificate.stream()
    for j in range(70):
        stream.add(k[j : j + 1], values[j : j + 1], key_bias=bias[j : j + 1])
    expected = left @ (right.T @ values)
    assert np.abs(stream.query(q) - expected).max() < 1e-11
    assert np.abs(certificate.apply(q, k, values, key_bias=bias) - expected).max() < 1e-11
    exact = dense_attention(q, k, scale=1.0, key_bias=bias) @ values
    assert (
        np.linalg.norm(expected - exact, axis=1).max()
        <= certificate.bound * np.linalg.norm(values, axis=1).max()
    )


def test_tokens_outside_are_refused_by_index_and_radius():
    certificate = certify_domain(2, 1.0, 2.0, eps=0.1, scale=1.0)
    inside = np.array([[1.0, 0.0], [math.sqrt(0.5), math.sqrt(0.5)]])
    certificate.query_features(inside)
    with pytest.raises(InvalidInput, match=r"q\[1\] has norm 1\.00.*certified radius 1"):
        certificate.query_features(np.array([[0.0, 0.5], [1.001, 0.0]]))
    with pytest.raises(InvalidInput, match=r"k\[0\] has norm nan"):
        certificate.key_features(np.array([[np.nan, 0.0]]))
    with pytest.raises(InvalidInput, match=r"k\[0\] has norm"):
        certificate.key_features(np.array([[0.5, 0.0]]), centre=np.array([3.0, 0.0]))
    stream = certificate.stream()
    with pytest.raises(InvalidInput, match="no key"):
        stream.query(inside)
    with pytest.raises(InvalidInput, match="outside"):
        stream.add(np.array([[0.0, 0.0], [5.0, 0.0]]), np.ones((2, 1)))
    assert stream.keys == 0  # nothing was added


def test_streams_refuse_more_keys_than_the_bound_counts():
    certificate = certify_domain(1, 1.0, 1.0, eps=0.1, scale=1.0, max_keys=10)
    stream = certificate.stream()
    stream.add(np.zeros((8, 1)), np.ones((8, 1)))
    with pytest.raises(InvalidInput, match="11 keys exceed max_keys = 10"):
        stream.add(np.zeros((3, 1)), np.ones((3, 1)))
    with pytest.raises(InvalidInput, match="count four"):
        stream.add(np.zeros((1, 1)), np.ones((1, 1)), key_bias=[5.0])
    stream.add(np.zeros((2, 1)), np.ones((2, 1)))
    assert stream.keys == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim must be an integer from 1"),
        ({"dim": 2.5}, "dim must be an integer"),
        ({"query_radius": 0.0}, r"query_radius must be positive, got 0\.0"),
        ({"key_radius": -1.0}, r"key_radius must be positive, got -1\.0"),
        ({"key_radius": math.nan}, "key_radius must be finite"),
        ({"scale": math.inf}, "scale must be finite"),
        ({"max_keys": 2**31}, "max_keys must be an integer from 1 to 1073741824"),
        ({"normaliser": "none"}, "normaliser must be one of own, exact"),
        ({"eps": 0.0}, "eps must be a positive finite number"),
    ],
)
def test_bad_numbers_are_named(change, message):
    arguments = {"dim": 2, "query_radius": 1.0, "key_radius": 1.0, "eps": 0.1, "scale": 1.0} | change
    with pytest.raises(InvalidInput, match=message):
        certify_domain(**arguments)


def test_too_much_is_refused_with_the_number_and_the_limit():
    with pytest.raises(CannotCertify, match="400"):
        certify_domain(2, 20.0, 20.0, eps=0.1, scale=1.0)
    with pytest.raises(CannotCertify, match=r"features, more than the 16777216 allowed"):
        certify_domain(64, 1.0, 6.0, eps=0.01, scale=1.0)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 4.0), st.floats(0.01, 0.5), st.floats(1.0, 10.0))
def test_smaller_eps_never_gives_smaller_rank(width, eps, factor):
    assert (
        certify_domain(2, 1.0, width, eps=eps / factor, scale=1.0).rank
        >= certify_domain(2, 1.0, width, eps=eps, scale=1.0).rank
    )


def test_checker_judges_any_coefficients():
    domain = read_domain(2, 1.0, 1.0, 1.0)
    taylor = np.array([1.0, 1.0, 0.5, 1 / 6])
    proved = check_domain(domain, taylor, 0.2)
    assert proved.status == "PROVED" and 0.05 < proved.bound < 0.2
    assert check_domain(domain, taylor, proved.bound).status == "PROVED"
    assert check_domain(domain, taylor, math.nextafter(proved.bound, 0)).status == "UNDECIDED"
    assert check_domain(domain, -taylor).bound == math.inf
    assert check_domain(domain, np.full(4, 1e200)).bound == math.inf
    assert check_domain(domain, np.array([np.nan])).bound == math.inf
    with pytest.raises(InvalidInput, match="at least one"):
        check_domain(domain, np.array([]))


DOMAIN = {"dim": 2, "query_radius": 1.5, "key_radius": 0.5, "scale": 2.0, "eps": 0.1}


def test_saved_loaded_and_proved_again(tmp_path):
    certificate = certify_domain(**DOMAIN)
    path = tmp_path / "domain.safetensors"
    certificate.save(path)
    assert path.read_bytes() == certificate.to_bytes()
    loaded = rankcert.load_domain(path)
    assert loaded.bound is None and loaded.rank == certificate.rank
    assert loaded.to_bytes() == certificate.to_bytes()
    for source in (path, certificate.to_bytes(), loaded, certificate):
        verdict = rankcert.verify_domain(source, **DOMAIN)
        assert (verdict.status, verdict.bound) == ("PROVED", certificate.bound)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dim", 3),
        ("query_radius", 1.4),
        ("key_radius", 0.6),
        ("scale", 1.0),
        ("eps", 0.2),
        ("max_keys", 7),
        ("normaliser", "exact"),
    ],
)
def test_a_certificate_for_another_domain_is_not_checked(name, value):
    data = certify_domain(**DOMAIN).to_bytes()
    verdict = rankcert.verify_domain(data, **(DOMAIN | {name: value}))
    assert verdict.status == "UNDECIDED" and verdict.reason.startswith(f"other domain: {name}: ")
    other = certify_domain(**(DOMAIN | {name: value})).to_bytes()
    assert not rankcert.verify_domain(other, **DOMAIN)


def test_wrong_coefficients_are_not_proved():
    certificate = certify_domain(**DOMAIN)
    worse = certificate.coefficients.copy()
    worse[1] *= 1.2
    verdict = rankcert.verify_domain(DomainClaim(certificate.domain, certificate.eps, worse), **DOMAIN)
    assert verdict.status == "UNDECIDED" and verdict.bound > 0.1


def test_every_damaged_byte_is_refused_or_judged_truly():
    certificate = certify_domain(**DOMAIN)
    data = certificate.to_bytes()
    for i in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[i] ^= 1 << bit
            try:
                claim = read_domain_claim(bytes(broken))
            except MalformedCertificate:
                continue
            verdict = rankcert.verify_domain(claim, **DOMAIN)
            if verdict.status == "PROVED":  # then only the coefficients changed, by little
                change = np.abs(
                    claim.coefficients - certificate.coefficients
                ) @ certificate.domain.half_width ** np.arange(certificate.degree + 1)
                assert verdict.bound <= 0.1 and change < 1.0
    for end in range(len(data)):
        with pytest.raises(MalformedCertificate):
            read_domain_claim(data[:end])
    with pytest.raises(MalformedCertificate, match="file-too-large"):
        read_domain_claim(data + bytes(2**17))
    with pytest.raises(MalformedCertificate, match=r"^format: "):
        rankcert.load_domain(Path(__file__).parent / "golden" / "version-1.safetensors")
