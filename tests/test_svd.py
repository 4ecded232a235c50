"""The truncated SVD: its rank is the first that passes, by an independent search over all of them."""

import numpy as np
import pytest
import scipy.linalg
from generated import Head, build, heads, is_proved
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rankcert.constructions import METHODS, svd
from rankcert.constructions.svd import TruncatedSVD
from rankcert.heads import EXAMPLES, example_head

tolerances = st.sampled_from([0.7, 0.3, 0.1, 0.01, 1e-6])


def errors_by_rank(head: Head) -> np.ndarray:
    """The largest row error of every truncation, each from scratch."""
    attention = head.attention
    u, values, vt = scipy.linalg.svd(attention, full_matrices=False)
    truncations = [(u[:, :r] * values[:r]) @ vt[:r] for r in range(len(values) + 1)]
    return np.array([np.abs(attention - b).sum(axis=1, where=head.counted).max() for b in truncations])


def check_smallest(head: Head, errors: np.ndarray, eps: float) -> None:
    problem, _, factors = build(TruncatedSVD(), head, eps)
    assert factors.rank == np.argmax(errors <= eps)
    assert factors.error_est == pytest.approx(errors[factors.rank], abs=1e-12)
    assert head.error(factors.left, factors.right) == pytest.approx(factors.error_est, abs=1e-12)
    assert is_proved(problem, factors, eps)


@given(heads(rows=14, columns=14, size=4.0), tolerances)
def test_rank_is_the_smallest(head, eps):
    errors = errors_by_rank(head)
    assume(np.abs(errors - eps).min() > 1e-9)  # ties are for rounding to decide
    check_smallest(head, errors, eps)


@settings(max_examples=25)
@given(heads(rows=60, columns=60, width=8, size=2.0), tolerances)
def test_rank_is_the_smallest_when_few_rows_are_watched(head, eps):
    errors = errors_by_rank(head)
    assume(np.abs(errors - eps).min() > 1e-9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(svd, "WATCHED", 1)
        patch.setattr(svd, "BLOCK_ENTRIES", 100)
        check_smallest(head, errors, eps)


@pytest.mark.parametrize("name", EXAMPLES)
def test_rank_is_the_smallest_on_real_heads(name):
    example = example_head(name)
    head = Head(example.q[:128].astype(float), example.k[:128].astype(float), example.options())
    errors = errors_by_rank(head)
    for eps in (0.5, 0.1):
        check_smallest(head, errors, eps)


def test_pairs_that_do_not_count_refuse_nothing():
    """Rank 2 passes on the allowed pairs, though the l2 norm of a whole error row is beyond eps."""
    rng = np.random.default_rng(146)
    head = Head(3 * rng.normal(size=(4, 2)), 3 * rng.normal(size=(4, 2)), {"causal": True})
    attention = head.attention
    u, values, vt = np.linalg.svd(attention)
    tail = attention - (u[:, :2] * values[:2]) @ vt[:2]
    assert np.linalg.norm(tail, axis=1).max() > 0.7 > np.abs(tail).sum(axis=1, where=head.counted).max()
    assert build(TruncatedSVD(), head, 0.7)[2].rank == 2


def test_all_rows_are_looked_at_a_few_times_only():
    rng = np.random.default_rng(3)
    head = Head(rng.normal(size=(300, 16)), rng.normal(size=(300, 16)), {})
    factors = build(TruncatedSVD(), head, 0.1)[2]
    assert factors.rank > 50 and factors.details["full_checks"] <= 5


def test_error_is_not_monotone_and_the_first_rank_is_found():
    rng = np.random.default_rng(3)
    head = Head(2 * rng.normal(size=(12, 4)), 2 * rng.normal(size=(12, 4)), {})
    errors = errors_by_rank(head)
    worse = np.flatnonzero(np.diff(errors) > 1e-3)
    assert worse.size
    rank = worse[0]
    eps = (errors[rank] + errors[rank + 1]) / 2  # passed at `rank`, failed just above it
    assert build(TruncatedSVD(), head, eps)[2].rank == np.argmax(errors <= eps) <= rank


def test_tie_with_rounding_does_not_stall_the_search():
    """A target equal to a rank's own error: whichever way rounding goes, the search ends."""
    rng = np.random.default_rng(3)
    head = Head(rng.normal(size=(12, 4)), rng.normal(size=(12, 4)), {})
    for rank, error in enumerate(errors_by_rank(head)[:-1]):
        found = build(TruncatedSVD(), head, error + head.problem().rounding_est)[2].rank
        assert found in (rank, rank + 1) or errors_by_rank(head)[found] <= error


def test_masked_keys_get_zero_rows():
    head = Head(
        np.eye(3), np.vstack([np.eye(3), np.full((1, 3), np.nan)]), {"key_bias": np.array([0, 0, 0, -np.inf])}
    )
    assert not build(TruncatedSVD(), head, 0.1)[2].right[3].any()


def test_a_failing_driver_is_replaced(monkeypatch):
    def fails(*args, **kwargs):
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(np.linalg, "svd", fails)
    rng = np.random.default_rng(3)
    head = Head(rng.normal(size=(12, 4)), rng.normal(size=(13, 4)), {})
    problem, _, factors = build(TruncatedSVD(), head, 0.1)
    assert is_proved(problem, factors, 0.1)


def test_large_problems_are_refused():
    side = np.linspace(0, 1, 4097)[:, None]
    problem = Head(side, side, {}).problem()
    assert (
        "a dense SVD of 4097 x 4097 takes minutes" in TruncatedSVD().plan(problem, 0.1, memory=2**40).refusal
    )
    problem = Head(side[:1000], side, {}).problem()
    plan = TruncatedSVD().plan(problem, 0.1, memory=2**20)
    assert plan.rank is None and plan.refusal.startswith("needs 187.5 MiB")


def test_eps_below_rounding_is_refused():
    plan = TruncatedSVD().plan(Head(np.ones((2, 1)), np.ones((2, 1)), {}).problem(), 1e-15, memory=2**30)
    assert "below the rounding of float64" in plan.refusal


def test_method_is_registered():
    assert isinstance(METHODS["svd"], TruncatedSVD)
