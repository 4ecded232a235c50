"""Twelve inputs that broke other tools, rebuilt from public reports, each with the right answer stated.

The right answer is either a certificate that is proved, proved again from its bytes, and true by plain NumPy, or
exactly one InvalidInput that says what was passed and what was expected. Never a NaN, never a silent repair.
"""

import re

import numpy as np
import pytest
from oracles import allowed, dense_attention

import rankcert


def certified(q, k, eps, effort="balanced", **options) -> rankcert.Certificate:
    """A certificate within eps, after everything a caller could do to doubt it."""
    certificate = rankcert.certify(q, k, eps=eps, effort=effort, **options)
    again = rankcert.verify(certificate.to_bytes(), q, k, eps=eps, gemm="portable", **options)
    assert again.status == "PROVED" and again.bound <= eps and certificate.bound <= eps
    assert again.rank == certificate.rank <= min(len(q), len(k))
    counted = allowed(len(q), len(k), options.get("causal", False), options.get("offset", 0))
    wrong = np.abs(dense_attention(q, k, **options) - certificate.left @ certificate.right.T)
    assert wrong.sum(axis=1, where=counted).max(initial=0.0) <= again.bound + 1e-9
    return certificate


def refusal(q, k, **options) -> str:
    """What the one InvalidInput says."""
    with pytest.raises(rankcert.InvalidInput) as caught:
        rankcert.certify(q, k, eps=0.1, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def random_features(q, k, scale, count, rng) -> tuple[np.ndarray, np.ndarray]:
    """Attention by positive random features, rows normalised: factors of inner width `count`."""
    directions = rng.normal(size=(q.shape[1], count))
    left, right = (
        np.exp(x * scale**0.5 @ directions - scale * (x**2).sum(axis=1, keepdims=True) / 2) for x in (q, k)
    )
    return left / (left @ right.sum(axis=0))[:, None], right


@pytest.mark.parametrize("length", [2, 4, 8, 10])
def test_google_research_issue_503_short_sequences(length):
    """Entrywise relative error explodes at some lengths; the row's l1 error stays a meaningful number."""
    rng = np.random.default_rng(length)
    q, k = 2.5 * rng.normal(size=(2, length, 16))
    p = dense_attention(q, k, scale=0.25)
    assert p.min() < (1e-2 if length == 2 else 1e-4)  # tiny entries, the reason for the report
    left, right = random_features(q, k, 0.25, 64, rng)
    audited = rankcert.audit(q, k, left, right, scale=0.25)
    truth = np.abs(p - left @ right.T).sum(axis=1)
    np.testing.assert_allclose(audited.row_bounds, truth, rtol=1e-9, atol=1e-10)
    assert audited.bound <= 2 + 1e-9  # rows of both are probabilities
    certified(q, k, 0.1, scale=0.25)


def test_performer_pytorch_issue_69_fewer_tokens_than_dimensions():
    """24 tokens of width 128: every polynomial has more monomials than tokens, so the answer is at most 24."""
    rng = np.random.default_rng(69)
    q, k = rng.normal(size=(2, 24, 128))
    certificate = certified(q, k, 0.05, effort="max")
    assert certificate.rank <= 24
    for candidate in certificate.candidates:
        if candidate.method in ("taylor", "minimax"):
            assert candidate.status == "skipped" and candidate.rank > 24
    assert certified(q, k, 1e-10).rank == 24


def test_xformers_issue_360_zero_rows_and_padding_mask():
    """The last three tokens are zero and masked as keys: their queries see the others uniformly, nothing is NaN."""
    rng = np.random.default_rng(360)
    q, k = rng.normal(size=(2, 259, 16))
    q[-3:] = k[-3:] = 0.0
    key_bias = np.zeros(259)
    key_bias[-3:] = -np.inf
    certificate = certified(q, k, 1e-3, key_bias=key_bias)
    assert not certificate.right[-3:].any()
    values = rng.normal(size=(259, 4))
    values[-3:] = np.nan
    out = certificate.apply(values)
    np.testing.assert_allclose(out[-3:], np.tile(values[:-3].mean(axis=0), (3, 1)), atol=1e-2)
    assert np.isfinite(out).all()


def test_pytorch_issue_103749_row_with_every_key_masked():
    """A row that keeps no key has no softmax: one error that names the row, no NaN and no invented row."""
    q, k = np.ones((5, 4)), np.ones((6, 4))
    message = refusal(q, k, key_bias=np.full(6, -np.inf))
    assert "row 0 keeps no key" in message and "every key is masked" in message
    message = refusal(q, k, key_bias=np.r_[-np.inf, np.zeros(5)], causal=True)
    assert "row 0 keeps no key" in message and "the first 1 keys only" in message
    message = refusal(q, k, key_bias=np.zeros(6, dtype=bool))  # a boolean mask is no bias
    assert "key_bias must be" in message and "got dtype bool" in message


def test_pytorch_issue_101967_nan_in_a_masked_key():
    """What a mask hides may hold anything: factors, bounds and digests are those of a clean key."""
    rng = np.random.default_rng(101967)
    q, k = rng.normal(size=(40, 8)), rng.normal(size=(50, 8))
    key_bias = np.where(np.arange(50) == 17, -np.inf, rng.normal(size=50))
    files = set()
    for garbage in (0.0, np.nan, np.inf, -1e308):
        k[17] = garbage
        certificate = certified(q, np.where(np.arange(50)[:, None] == 17, 0.0, k), 0.01, key_bias=key_bias)
        given = rankcert.certify(q, k, eps=0.01, key_bias=key_bias)
        assert given.bound == certificate.bound and np.isfinite(given.left).all()
        files |= {certificate.to_bytes(), given.to_bytes()}
    assert len(files) == 1


def test_vllm_issue_56578_huge_logits():
    """Logits from -10000 to 10000: rows are one-hot or near ties, and the bound is finite, true and small."""
    q = np.array([[4400.0], [5000.0], [10000.0], [-10000.0], [1.0]])
    k = np.array([[1.0], [1.0 - 2.0**-12], [0.0], [-1.0], [0.5]])
    certificate = certified(q, k, 1e-6, scale=1.0)
    p = certificate.left @ certificate.right.T
    tie = 1 / (1 + np.exp(-10000 / 4096))
    np.testing.assert_allclose(p[2], [tie, 1 - tie, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(p[3], [0, 0, 0, 1, 0], atol=1e-6)
    key_bias = np.array([-10000.0, 0.0, 10000.0, 4400.0, -5000.0])
    assert certified(q, k, 1e-6, scale=1.0, key_bias=key_bias).rank <= 5


def test_kvpress_issue_250_float16_overflow():
    """Components beyond 65504 became infinite on the way to float16: refused, with the array and the row."""
    rng = np.random.default_rng(250)
    q, k = rng.normal(size=(2, 12, 8))
    k[7, 3] = 70000.0
    with np.errstate(over="ignore"):
        narrow = k.astype(np.float16)
    message = refusal(q, narrow)
    assert "k must be finite" in message and "key 7 is not finite" in message
    q[4, :2] = np.inf, -np.inf  # a dot product of the two would be NaN
    message = refusal(q, k)
    assert "q must be finite" in message and "row 4 is not finite" in message
    certified(q[:4], k.astype(np.float32), 0.1)  # the same number in a type that holds it is a fine key


def test_paddle_pull_41933_float16_of_width_192():
    """<q, k> beyond 65504 before it is scaled: float16 values are taken exactly and multiplied as float64."""
    rng = np.random.default_rng(41933)
    q, k = (rng.normal(size=(2, 20, 192)) + 19.0).astype(np.float16)
    assert (q.astype(float) @ k.astype(float).T).min() > 65504
    certificate = certified(q, k, 1e-4)
    assert certificate.scale == 1 / np.sqrt(192)
    upcast = [x.astype(np.float64) for x in (q, k)]
    assert rankcert.verify(certificate, *upcast, eps=1e-4).status == "PROVED"  # exact casts are the same head


def test_flash_attention_issues_443_1537_shapes():
    """Many more queries than keys, no queries, no keys, and rows that a causal offset leaves without a key."""
    rng = np.random.default_rng(443)
    q, k = rng.normal(size=(256, 8)), rng.normal(size=(3, 8))
    assert certified(q, k, 1e-9, causal=True).rank <= 3
    assert certified(q, k, 1e-9, causal=True, offset=255).rank <= 3  # every row sees every key

    for options in ({}, {"causal": True, "offset": 2}):
        empty = certified(q[:0], k, 1e-9, **options)
        assert empty.rank == 0 and empty.bound == 0.0 and empty.row_bounds.shape == (0,)
        assert empty.apply(np.ones((3, 5))).shape == (0, 5)
    message = refusal(q, k[:0])
    assert "k has no rows" in message and "(0, 8)" in message and "at least one key" in message

    message = refusal(q, k, causal=True, offset=3 - 256)  # aligned to the last key, as some libraries do
    assert "row 0 keeps no key" in message and "the first 0 keys only" in message
    assert certified(q[253:], k, 1e-9, causal=True).rank <= 3


@pytest.mark.parametrize("shape", [(33728, 33), (33, 33728)])
def test_xformers_issue_719_all_zero_long_and_wide(shape):
    """More than 32767 rows (then columns) of width 512, all zero: the uniform matrix, rank 1, at any eps."""
    n, m = shape
    q, k = np.zeros((n, 512), dtype=np.float32), np.zeros((m, 512), dtype=np.float32)
    certificate = rankcert.certify(q, k, eps=1e-10)
    assert certificate.rank == 1 and rankcert.verify(certificate.to_bytes(), q, k).status == "PROVED"
    np.testing.assert_allclose(certificate.left[[0, -1]] @ certificate.right[[0, -1]].T, 1 / m, rtol=1e-10)


def test_xformers_issue_719_all_zero_both_long():
    """The input as reported, 33728 x 33728 of width 512: more than 2^30 pairs, which no 31-bit index can number."""
    n = 33728
    zeros = np.zeros((n, 512), dtype=np.float32)
    certificate = rankcert.certify(zeros, zeros, eps=1e-10)
    assert (certificate.rank, certificate.verdict.status, certificate.verdict.shape) == (1, "PROVED", (n, n, 512))
    np.testing.assert_allclose(certificate.left[[0, -1]] @ certificate.right[[0, -1]].T, 1 / n, rtol=1e-10)


def test_scikit_learn_issue_1860_duplicate_points():
    """500 queries and 400 keys made of a handful of points: rank of the handful, exact up to rounding."""
    rng = np.random.default_rng(1860)
    few_queries, few_keys = rng.normal(size=(7, 6)), rng.normal(size=(5, 6))
    of_query, of_key = rng.integers(7, size=500), rng.integers(5, size=400)
    for q, k, most in (
        (few_queries[of_query], few_keys[of_key], 5),
        (few_queries[of_query], rng.normal(size=(400, 6)), 7),
        (np.zeros((500, 6)), few_keys[of_key], 1),
    ):
        assert certified(q, k, 1e-9).rank <= most
        assert rankcert.certify(q, k, eps=1e-9, method="exact").rank == most


def test_scikit_learn_issue_25799_tiny_bandwidth():
    """A Gaussian kernel of bandwidth 1e-5 on 1000 points is the identity: the rank is 1000, and says so."""
    points = np.random.default_rng(25799).random((1000, 2))
    h = 1e-5
    bias = -(points**2).sum(axis=1) / (2 * h * h)
    certificate = certified(points, points, 1e-3, scale=1 / (h * h), key_bias=bias)
    assert certificate.rank == 1000
    np.testing.assert_allclose(certificate.left @ certificate.right.T, np.eye(1000), atol=1e-3)
    # what float64 cannot prove of such logits is refused, with the bound that was reached
    with pytest.raises(rankcert.CannotCertify) as caught:
        rankcert.certify(points, points, eps=1e-7, scale=1 / (h * h), key_bias=bias)
    assert 1e-7 < caught.value.bound < 1e-3 and re.search(r"eps = 1e-07", str(caught.value))
