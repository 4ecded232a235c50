"""A domain certificate promises something about heads nobody has seen: here many are drawn, boundaries included."""

import math
from pathlib import Path

import numpy as np
import pytest
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ball_errors, ball_outputs, dense_attention

import rankcert
from rankcert import CannotCertify, InvalidInput, MalformedCertificate, certify_domain
from rankcert.checker.domain import (
    DomainClaim,
    check_domain,
    features_in_range,
    norms_upper,
    read_domain,
    read_domain_claim,
    stream_row_bounds,
)
from rankcert.checker.suprema import relative_error_upper


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


# Answers of a stream, each with its own bound


def largest_errors(out, q, k, values, **options) -> list[arb]:
    """Row by row the l1 distance from exact attention, in balls, rounded up."""
    exact = ball_outputs(q, k, values, **options)
    return [
        sum((abs(arb(float(x)) - y) for x, y in zip(row, other, strict=True)), arb(0)).upper()
        for row, other in zip(out, exact, strict=True)
    ]


def stream_of(certificate, pieces, k, values, bias, centre):
    """The keys in as many pieces as asked for, each a call of its own."""
    stream = certificate.stream(centre=centre, a_posteriori=True)
    for rows in np.array_split(np.arange(len(k)), pieces):
        stream.add(k[rows], values[rows], key_bias=None if bias is None else bias[rows])
    return stream


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dim=st.integers(1, 3),
    width=st.sampled_from([0.05, 2.0, 6.0, 11.0, 14.0]),
    eps=st.sampled_from([0.5, 0.01, 1e-8]),
    kinds=st.tuples(*[st.sampled_from(["inside", "boundary", "ends", "against"])] * 2),
    bias=st.sampled_from(["none", "rising", "huge", "masked"]),
    values=st.sampled_from(["identity", "normal", "tiny"]),
    pieces=st.integers(1, 12),
    centred=st.booleans(),
)
def test_no_answer_is_farther_off_than_its_bound(seed, dim, width, eps, kinds, bias, values, pieces, centred):
    """At W = 11 and 14 with eps = 1e-8 rounding is nearly all of it; identity values show whole rows."""
    rng = np.random.default_rng(seed)
    # powers of two: then W is the same in all examples, and its polynomial made once
    query_radius, scale = 2.0 ** rng.integers(-7, 8), float(rng.choice([-1, 1]) * 2.0 ** rng.integers(-7, 8))
    key_radius = width / abs(scale) / query_radius
    certificate = certify_domain(dim, query_radius, key_radius, eps=eps, scale=scale, a_posteriori=True)
    q = tokens(rng, 4, dim, query_radius, "ends" if kinds[0] == "against" else kinds[0])
    if kinds[1] == "against":  # the one direction of all keys opposes that of the queries
        k = np.tile(-np.sign(scale) * q[0] / query_radius * key_radius * (1 - 1e-12), (12, 1))
        k *= 1 - rng.random((12, 1)) * 0.1
    else:
        k = tokens(rng, 12, dim, key_radius * (1 - 1e-12), kinds[1])
    centre = rng.normal(size=dim) * key_radius if centred else None
    k = k + centre if centred else k
    key_bias = {
        "none": None,
        "rising": np.sort(30 * rng.normal(size=12)),
        "huge": 400 * rng.normal(size=12),
        "masked": np.where(np.arange(12) % 3 == 1, -np.inf, 0.0),
    }[bias]
    v = np.eye(12) if values == "identity" else rng.normal(size=(12, 3)) * (1e-60 if values == "tiny" else 1)
    stream = stream_of(certificate, pieces, k, v, key_bias, centre)
    out, row_bounds = stream.query(q, return_bound=True)
    largest = arb(float(np.abs(v).sum(axis=1).max())) * (1 - arb(2) ** -48)
    for error, bound in zip(
        largest_errors(out, q, k, v, scale=scale, key_bias=key_bias), row_bounds.tolist(), strict=True
    ):
        assert bound == math.inf or error <= arb(bound) * largest
    if not math.isinf(certificate.bound):
        assert (row_bounds < math.inf).all()


def rounding_of(error: float, certificate) -> float:
    """What a row bound adds to the polynomial's own error, from the formula for weights within rho."""
    rho = relative_error_upper(certificate.coefficients, certificate.domain.half_width)
    return error - 2 * rho / (1 + math.sqrt(1 - rho * rho))


@pytest.mark.parametrize("width", [8.0, 12.0, 14.0])
def test_row_bounds_where_rounding_is_everything_are_within_its_worst_case(width):
    """Keys against the query: above what happens, and no more above it than worst-case rounding always is."""
    certificate = certify_domain(1, 1.0, width, eps=1e-8, scale=1.0, a_posteriori=True)
    q, k = np.ones((1, 1)), np.full((40, 1), -width) * (1 - np.linspace(0, 0.1, 40)[:, None])
    worst = 0.0
    for seed in range(20):
        v = np.random.default_rng(seed).choice([-1.0, 1.0], size=(40, 1))
        out, row_bounds = stream_of(certificate, 3, k, v, None, None).query(q, return_bound=True)
        worst = max(worst, float(largest_errors(out, q, k, v, scale=1.0)[0]))
    roundings = 10 * certificate.degree + 2 + 16 + certificate.rank
    most = 2 * roundings * 2.0**-52 * math.exp(2 * width)
    assert worst < row_bounds[0]
    assert rounding_of(row_bounds[0], certificate) < 1.5 * most  # K_t is what it says
    assert rounding_of(row_bounds[0], certificate) < 1e4 * worst


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 6.0), st.sampled_from([0.3, 0.05]), st.booleans())
def test_row_bounds_are_tight_where_rounding_is_nothing(seed, width, eps, a_posteriori):
    """The two keys of the worst head, each with a value of its own: within five percent of the answer's error."""
    certificate = certify_domain(1, 1.0, width, eps=eps, scale=1.0, a_posteriori=a_posteriori, max_keys=100)
    x = np.linspace(-width, width, 4001)
    error = np.polyval(certificate.coefficients[::-1], x) * np.exp(-x) - 1
    pair = x[[np.argmax(error), np.argmin(error)]][:, None]
    stream = stream_of(certificate, 1, pair, np.eye(2), -pair[:, 0], None)
    out, row_bounds = stream.query(np.ones((1, 1)), return_bound=True)
    worst = float(largest_errors(out, np.ones((1, 1)), pair, np.eye(2), scale=1.0, key_bias=-pair[:, 0])[0])
    assert worst <= row_bounds[0] <= 1.05 * worst + 1e-9


@pytest.mark.parametrize("width", [7.0, 12.0, 24.0])
def test_actual_keys_are_proved_where_the_whole_domain_is_not(width):
    """2^20 keys: beyond what the domain allows for, and at W = 12 and 24 beyond any number of keys."""
    with pytest.raises(CannotCertify, match="too large for eps"):
        certify_domain(2, 1.0, width, eps=0.1, scale=1.0)
    certificate = certify_domain(2, 1.0, width, eps=0.1, scale=1.0, a_posteriori=True)
    assert certificate.bound > 0.1 and not certificate.verdict
    rng = np.random.default_rng(0)
    q = tokens(rng, 5, 2, 1.0, "boundary")
    k, values = tokens(rng, 2**20, 2, width, "inside"), rng.normal(size=(2**20, 2))
    out, row_bounds = certificate.apply(q, k, values, return_bound=True)
    assert row_bounds.shape == (5,) and row_bounds.max() <= 0.1
    exact = dense_attention(q, k, scale=1.0) @ values
    errors = np.linalg.norm(out - exact, axis=1) / np.linalg.norm(values, axis=1).max()
    assert (errors <= row_bounds).all()


def test_where_the_domain_proves_more_its_bound_is_taken():
    certificate = certify_domain(1, 1.0, 9.0, eps=0.1, scale=1.0, max_keys=10)
    k = np.full((9, 1), -9.0)
    stream = stream_of(certificate, 1, k, np.eye(9), None, None)
    _, row_bounds = stream.query(np.ones((1, 1)), return_bound=True)
    sums = certificate.verdict.breakdown["normaliser sums"]
    assert certificate.bound <= row_bounds[0] <= 1.000001 * (certificate.bound + sums)
    alone = stream_row_bounds(
        certificate.domain,
        certificate.coefficients,
        norms_upper(np.ones(1), 1),
        stream._moments,
        np.array([stream._sums[0, -1]]),
        depth=9,
        counted=11,  # too many for the domain's bound
    )
    assert alone.shape == (1,) and alone[0] != row_bounds[0]


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_row_bounds_are_the_formula_and_no_smaller(seed, signs):
    """Theorem 7 once more, in balls from the floats given; coefficients of either sign."""
    rng = np.random.default_rng(seed)
    coefficients = np.array([1.0, 1.0, -0.4 if signs else 0.4, 2.0 * rng.normal()])
    domain = read_domain(2, 8.0, 0.0125, 1.0, 100)
    norms, depth = 8 * rng.random(5), int(rng.integers(1, 2**28))
    moments = 10.0 ** rng.uniform(3, 9) * rng.random(4)
    normalisers = moments[0] * 10.0 ** rng.uniform(-9, 0, size=5)
    row_bounds = stream_row_bounds(
        domain, coefficients, norms, moments, normalisers, depth=depth, counted=101
    )
    rho, kappa, eps_m = (
        arb(relative_error_upper(coefficients, domain.half_width)),
        arb(2) ** -42,
        arb(2) ** -52,
    )
    delta = rho + kappa + rho * kappa
    own = 2 * delta / (1 + (1 - delta * delta).sqrt())
    for norm, normaliser, found in zip(
        norms.tolist(), normalisers.tolist(), row_bounds.tolist(), strict=True
    ):
        error = sum(
            (10 * t + 2 + depth + 10) * abs(arb(a)) * (arb(norm) / arb(domain.balance)) ** t * arb(moment)
            for t, (a, moment) in enumerate(zip(coefficients.tolist(), moments.tolist(), strict=True))
        )
        error = eps_m * (1 + (depth + 4 * 3 + 16) * eps_m) * error + arb("1e-60")
        formula = own + 2 * error / arb(normaliser) + 2 * eps_m
        assert formula <= arb(found) <= formula * (1 + arb(2) ** -40)


@pytest.mark.parametrize("order", [1, -1])
def test_a_stream_keeps_its_moments_and_counts_its_roundings(order):
    certificate = certify_domain(2, 1.0, 2.0, eps=0.1, scale=1.0)
    rng = np.random.default_rng(0)
    k, bias = tokens(rng, 10, 2, 2.0, "inside"), order * np.arange(10.0)
    stream = stream_of(certificate, 10, k, np.ones((10, 1)), bias, None)
    norms = np.linalg.norm(k, axis=1) * certificate.domain.balance
    moments = np.exp(bias - bias.max()) @ norms[:, None] ** np.arange(certificate.degree + 1)
    assert stream._moments == pytest.approx(moments, rel=1e-13)
    assert stream._depth == 1 + 10 + (9 * 4 if order > 0 else 0)
    stream = stream_of(certificate, 2, k, np.ones((10, 1)), None, None)
    assert stream._depth == 1 + 5 + 1


def test_streams_beyond_max_keys_answer_with_bounds_only():
    certificate = certify_domain(1, 1.0, 1.0, eps=0.1, scale=1.0, max_keys=10)
    stream = certificate.stream(a_posteriori=True)
    k, values = np.linspace(-1, 1, 10)[:, None], np.ones((10, 1))
    stream.add(k, values)
    assert stream.query(k).shape == (10, 1)
    stream.add(k, values)
    with pytest.raises(InvalidInput, match=r"20 keys exceed max_keys = 10 .* return_bound=True"):
        stream.query(k)
    out, row_bounds = stream.query(k, return_bound=True)
    assert np.allclose(out, 1.0) and (row_bounds <= 0.1).all()
    with pytest.raises(InvalidInput, match="normaliser"):
        certify_domain(1, 1.0, 1.0, eps=0.1, scale=1.0, normaliser="exact", a_posteriori=True)


def test_what_is_not_finite_has_no_bound():
    certificate = certify_domain(1, 1.0, 1.0, eps=0.1, scale=1.0)
    q, k = np.array([[1.0], [0.5]]), np.array([[1.0], [-1.0], [0.5]])
    for wild in (np.nan, np.inf, 1e308):
        with np.errstate(all="ignore"):
            out, row_bounds = certificate.apply(q, k, np.full((3, 1), wild), return_bound=True)
        assert (np.isfinite(out).all(axis=1) | (row_bounds == math.inf)).all() and out.shape == (2, 1)
    empty, none = certificate.apply(q[:0], k, np.ones((3, 1)), return_bound=True)
    assert empty.shape == (0, 1) and none.shape == (0,)


def test_hostile_scalars_prove_nothing():
    certificate = certify_domain(1, 1.0, 1.0, eps=0.1, scale=1.0)
    fine = {
        "domain": certificate.domain,
        "coefficients": certificate.coefficients,
        "query_norms": np.ones(3),
        "moments": np.ones(certificate.degree + 1),
        "normalisers": np.array([1.0, 2.0, 0.5]),
        "depth": 5,
        "counted": 2**31,
    }
    assert (stream_row_bounds(**fine) < 0.1).all()
    exact = read_domain(1, 1.0, 1.0, 1.0, normaliser="exact")
    for name, value in (
        ("normalisers", np.array([0.0, -1.0, np.nan])),
        ("normalisers", np.array([5e-324, np.inf * 0, -np.inf])),
        ("query_norms", np.full(3, np.nan)),
        ("moments", np.full(certificate.degree + 1, np.inf)),
        ("coefficients", -certificate.coefficients),
        ("coefficients", np.full(certificate.degree + 1, 1e300)),
        ("coefficients", np.array([np.nan, 1.0, 1.0])),
        ("depth", 2**31),
        ("domain", exact),
        ("domain", read_domain(1, 5e-324, 2.0**100, 2.0**-100)),
    ):
        with np.errstate(all="ignore"):
            assert (stream_row_bounds(**(fine | {name: value})) == math.inf).all(), name


def test_balls_as_unlike_as_can_be():
    """x^13 would overflow and y^13 vanish, whose product is an ordinary number: powers of two make them alike."""
    q, k, values = np.array([[1.0], [-0.3]]), np.array([[4.0], [-4.0], [1.0]]), np.eye(3)
    for a in (0, 90, -90):
        certificate = certify_domain(1, 2.0**a, 4 * 2.0**-a, eps=1e-6, scale=1.0, max_keys=100)
        assert certificate.degree == 13
        out, row_bounds = certificate.apply(q * 2.0**a, k * 2.0**-a, values, return_bound=True)
        errors = np.abs(out - dense_attention(q, k, scale=1.0)).sum(axis=1)
        assert (errors <= row_bounds).all() and (row_bounds <= 1e-6).all()


def test_features_that_leave_the_range_of_float64_are_refused():
    assert features_in_range(read_domain(2, 1.0, 1.0, 1.0), 590)
    assert not features_in_range(read_domain(2, 1.0, 1.0, 1.0), 610)  # sqrt(2)^610 > 2^300
    vanishing = read_domain(1, 5e-324, 2.0**100, 2.0**-100)  # scaled queries that no power of two saves
    assert not features_in_range(vanishing, 0)
    assert check_domain(vanishing, np.ones(1)).bound == math.inf
    with pytest.raises(
        CannotCertify, match=r"degree 0 leave the range of float64 for query_radius = 4\.94e-324"
    ):
        certify_domain(1, 5e-324, 2.0**100, eps=0.1, scale=2.0**-100)


def test_each_token_is_measured_once(monkeypatch):
    certificate = certify_domain(2, 1.0, 2.0, eps=0.1, scale=1.0)
    measured = []
    tokens_of = type(certificate)._tokens
    monkeypatch.setattr(
        type(certificate),
        "_tokens",
        lambda self, name, x, *rest: measured.append((name, len(x))) or tokens_of(self, name, x, *rest),
    )
    certificate.apply(np.zeros((7, 2)), np.zeros((9, 2)), np.ones((9, 1)), return_bound=True)
    assert measured == [("k", 9), ("q", 7)]


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
