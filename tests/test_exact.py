"""The exact construction: the rank that always works, and factors that are P up to rounding."""

import numpy as np
import pytest
from generated import Head, build, heads, is_proved
from hypothesis import given

from rankcert.constructions import METHODS
from rankcert.constructions.exact import Exact

EPS = 1e-9


def distinct(rows) -> int:
    return len({tuple(row) for row in rows + 0.0})


@given(heads(rows=12, columns=12, size=3.0))
def test_factors_are_the_attention_matrix(head):
    problem, _, factors = build(Exact(), head, EPS)
    assert head.error(factors.left, factors.right) <= 1e-12
    assert is_proved(problem, factors, EPS)


@given(heads(rows=12, columns=12, size=3.0))
def test_rank_is_the_number_of_distinct_rows(head):
    kept_keys = head.kept.any(axis=0)
    expected = min(distinct(head.q), distinct(head.k[kept_keys]))
    rank = Exact().plan(head.problem(), EPS, memory=2**20).rank
    if head.options.get("causal"):
        assert expected <= rank <= min(len(head.q), kept_keys.sum())
    else:
        assert rank == expected


@given(heads(rows=12, columns=12, size=3.0))
def test_intermediate_sums_stay_small(head):
    """sum_l |u_il| sum_j |v_jl| multiplies the rounding of the product: it may not explode."""
    _, _, factors = build(Exact(), head, EPS)
    tau = np.abs(factors.left) @ np.abs(factors.right).sum(axis=0)
    limit = len(head.k) * np.e**2 if head.options.get("causal") else 1.0
    assert tau.max() <= limit * (1 + 1e-12)


def repeated(rng, kinds: int, count: int) -> np.ndarray:
    return rng.normal(size=(kinds, 3))[rng.integers(kinds, size=count)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kinds, side", [((7, 4), "keys"), ((4, 7), "queries")])
def test_repeated_rows_are_merged_also_under_a_mask(kinds, side, causal):
    rng = np.random.default_rng(0)
    head = Head(
        repeated(rng, kinds[0], 40), repeated(rng, kinds[1], 50), {"causal": causal, "offset": 20 * causal}
    )
    _, plan, factors = build(Exact(), head, EPS)
    assert (factors.rank, plan.details["distinct"]) == (4, side)
    assert head.error(factors.left, factors.right) <= 1e-12


def test_merging_stops_where_it_would_drown_the_rows():
    """Equal keys, biases growing by 30 along the sequence: one group would need factors up to e^870."""
    rng = np.random.default_rng(0)
    bias = 30.0 * np.arange(30)
    head = Head(rng.normal(size=(30, 3)), np.ones((30, 3)), {"causal": True, "key_bias": bias})
    problem, plan, factors = build(Exact(), head, EPS)
    assert plan.rank == 30 and is_proved(problem, factors, EPS)
    everywhere = Head(head.q, head.k, {"key_bias": bias})
    assert build(Exact(), everywhere, EPS)[1].rank == 1


@pytest.mark.parametrize("side", ["keys", "queries"])
def test_what_no_row_sees_stays_out_of_the_factors(side):
    """Logits of 3000 between early queries and late keys, above the mask: neither overflow nor an entry."""
    early, late = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    hot = 3000.0 * early
    if side == "keys":
        head = Head(np.vstack([early * [[1], [2], [3]], late]), np.vstack([late] * 3 + [hot] * 2), {})
    else:
        head = Head(np.vstack([early] * 3 + [late]), np.vstack([late * [[1], [2], [3]], hot, 2 * hot]), {})
    head.options = {"causal": True, "scale": 1.0}
    _, plan, factors = build(Exact(), head, EPS)
    assert plan.details["distinct"] == side and plan.rank == 2
    assert head.error(factors.left, factors.right) <= 1e-12
    seen = np.abs(factors.left) @ np.abs(factors.right).T
    assert not seen[:3, 3:].any()


def test_a_permutation_and_a_jittered_copy():
    rng = np.random.default_rng(0)
    q = rng.normal(size=(30, 4))
    shuffled = Head(q, q[rng.permutation(30)], {})
    assert build(Exact(), shuffled, EPS)[1].rank == 30
    doubled = Head(np.vstack([q, q]), np.vstack([q] * 3), {})
    assert build(Exact(), doubled, EPS)[1].rank == 30
    jittered = Head(np.vstack([q, q * (1 + 1e-15)]), np.vstack([q] * 3), {})
    assert build(Exact(), jittered, EPS)[1].rank == 30  # by the keys, which are still equal


def test_masked_keys_get_zero_rows_whatever_they_hold():
    k = np.vstack([np.ones((2, 3)), np.full((1, 3), np.nan)])
    head = Head(np.eye(3), k, {"key_bias": np.array([0.0, 1.0, -np.inf])})
    problem, _, factors = build(Exact(), head, EPS)
    assert factors.rank == 1 and not factors.right[2].any() and is_proved(problem, factors, EPS)


def test_no_queries_and_a_single_key():
    assert build(Exact(), Head(np.empty((0, 2)), np.ones((3, 2)), {}), EPS)[1].rank == 0
    assert build(Exact(), Head(np.eye(2), np.ones((1, 2)), {}), EPS)[1].rank == 1


def test_memory_is_refused_with_the_amount():
    rng = np.random.default_rng(0)
    plan = Exact().plan(
        Head(rng.normal(size=(1024, 2)), rng.normal(size=(1024, 2)), {}).problem(), EPS, memory=2**20
    )
    assert plan.rank == 1024
    assert plan.refusal == "needs 16.0 MiB of dense arrays, more than the 1.0 MiB allowed"


def test_method_is_registered():
    assert isinstance(METHODS["exact"], Exact)
