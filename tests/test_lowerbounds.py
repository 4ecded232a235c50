"""Searches for lower bounds: what they return is proved by the checker, and never more than what is true."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

from rankcert.checker import Engine, check_bernstein, check_leakage
from rankcert.errors import InvalidInput
from rankcert.lowerbounds import bernstein, blocks, find_bernstein, find_leakage, leakage, sweep_bernstein
from rankcert.lowerbounds.witness import quantise, threshold
from rankcert.problem import AttentionProblem


def head(q, k, **options) -> AttentionProblem:
    return AttentionProblem(q, k, engine=Engine(threads=1), **options)


def normal(n, m, d=4, sharp=2.0, seed=0, **options) -> AttentionProblem:
    random = np.random.default_rng(seed)
    return head(sharp * random.normal(size=(n, d)), random.normal(size=(m, d)), scale=1.0, **options)


def prove(problem, found, eps):
    return check_bernstein(problem.inputs, found.rows, found.groups, found.weights, eps=eps)


@pytest.fixture(autouse=True, scope="module")
def short_searches():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bernstein, "FLOPS", 2e9)
        yield


@given(problems(), st.sampled_from([0.02, 0.1, 0.5, 0.9]))
@settings(max_examples=60, deadline=None)
def test_the_checker_agrees_to_whatever_is_found(drawn, eps):
    """Any head at all: masks, biases, huge and subnormal entries, duplicates, causal with offsets."""
    problem = head(drawn.q, drawn.k, **drawn.options)
    found = find_bernstein(problem, eps, effort="fast")
    if found is not None:
        verdict = prove(problem, found, eps)
        assert verdict.status == "PROVED" and verdict.rank == found.rank >= 1
        assert verdict.eps_below == pytest.approx(found.eps_est, rel=1e-6)
        assert found.rank <= min(problem.query_classes.first.size, problem.key_classes.first.size)
        assert found.weights.dtype in (np.int8, np.int16) and (np.diff(found.rows) > 0).all()
    elif not drawn.options["causal"]:
        # a causal row may put almost nothing on the keys that it shares with others; any other head has rank 1
        raise AssertionError("nothing found")
    leaks = find_leakage(problem, eps)
    if leaks is not None:
        verdict = check_leakage(problem.inputs, leaks.rows, eps=eps)
        assert leaks.rank_est - 1 <= verdict.rank <= leaks.rank_est + 1


@pytest.mark.parametrize("eps", [0.1, 0.5, 0.9])
def test_identity_has_full_rank_at_once(eps):
    problem = head(40.0 * np.eye(40), np.eye(40), scale=1.0)
    found = find_bernstein(problem, eps)
    assert found.rank == prove(problem, found, eps).rank == 40
    assert np.array_equal(found.rows, np.arange(40)) and found.weights.dtype == np.int8


@pytest.mark.parametrize("options", [{"scale": 0.0}, {"scale": 1.0, "key_bias": np.linspace(0, 9, 30)}])
def test_rank_one_is_known_at_once(options):
    random = np.random.default_rng(0)
    problem = head(np.ones((50, 3)), random.normal(size=(30, 3)), **options)
    calls = []
    found = find_bernstein(problem, 0.1, progress=lambda done, total: calls.append(done))
    assert found.rank == prove(problem, found, 0.1).rank == 1 and not calls


def test_few_distinct_queries_or_keys_are_a_ceiling_that_is_reached():
    random = np.random.default_rng(1)
    few = 6.0 * np.eye(5)
    for q, k in ((few[random.integers(0, 5, 60)], few), (few, few[np.r_[0:5, random.integers(0, 5, 60)]])):
        problem = head(q, k, scale=1.0)
        found = find_bernstein(problem, 0.3)
        assert found.rank == prove(problem, found, 0.3).rank == 5


def test_jitter_of_known_size_proves_nothing_beyond_the_rank_without_it():
    """Six classes of queries, logits shaken by at most delta: softmax moves by 2 tanh(delta / 2) < eps in l1."""
    random = np.random.default_rng(2)
    k = random.normal(size=(40, 4))
    q = 6.0 * random.normal(size=(6, 4))[np.arange(48) % 6]
    shift = random.normal(size=q.shape)
    delta = 0.05
    q = q + shift * (delta / np.abs(shift @ k.T).max(axis=1))[:, None]
    calls = []
    problem, eps = head(q, k, scale=1.0), 2 * np.tanh(delta / 2) + 1e-9
    found = find_bernstein(problem, eps, progress=lambda *call: calls.append(call))
    assert found.rank == prove(problem, found, eps).rank == 6
    assert not calls, "it looked for a seventh row though all rows are within eps of the span of six"


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (3, 50), (50, 3), (70, 40)])
def test_shapes(shape):
    problem = normal(*shape)
    found = find_bernstein(problem, 0.2)
    assert 1 <= found.rank <= min(shape) and prove(problem, found, 0.2)
    assert found.rows.shape == (found.rank,) and found.groups.shape == (shape[1],)


def test_no_queries_no_witness():
    problem = head(np.empty((0, 2)), np.ones((3, 2)))
    assert find_bernstein(problem, 0.1) is None and find_leakage(problem, 0.1) is None
    assert list(sweep_bernstein(problem)) == []


def test_masked_keys_have_no_group():
    bias = np.where(np.arange(30) % 3 == 0, -np.inf, 0.0)
    problem = normal(40, 30, key_bias=bias)
    found = find_bernstein(problem, 0.2)
    assert (found.groups[bias == -np.inf] == -1).all() and prove(problem, found, 0.2) and found.rank > 1


@pytest.mark.parametrize("offset", [0, 20])
def test_causal_witnesses_use_shared_keys_only(offset):
    problem = normal(60, 60 + offset, sharp=3.0, causal=True, offset=offset)
    found = find_bernstein(problem, 0.3)
    verdict = prove(problem, found, 0.3)
    assert verdict and verdict.notion == "causal rank" and found.rank > 1
    assert np.flatnonzero(found.groups >= 0).max() <= found.rows.min() + offset


def test_a_block_leaves_out_equal_queries_and_keys_nobody_sees():
    random = np.random.default_rng(3)
    q = random.normal(size=(12, 3))[np.arange(24) % 12]
    bias = np.r_[np.zeros(9), -np.inf]
    block = blocks.open_block(head(q, random.normal(size=(10, 3)), key_bias=bias), 0, 100, 2**30, 0)
    assert np.array_equal(block.rows, np.arange(12)) and block.attention.shape == (12, 9)
    assert block.groups.tolist() == [*range(9), -1]


@pytest.mark.parametrize("causal", [False, True])
def test_long_heads_are_searched_on_rows_and_groups(monkeypatch, causal):
    problem = normal(300, 260, sharp=3.0, causal=causal)
    monkeypatch.setattr(bernstein, "SIDE", dict.fromkeys(bernstein.SIDE, 64))
    found = find_bernstein(problem, 0.3, effort="fast")
    groups, sizes = np.unique(found.groups[found.groups >= 0], return_counts=True)
    assert found.weights.shape[0] == groups.size <= 64 < sizes.sum()
    assert found.rank > 3 and prove(problem, found, 0.3)
    small = find_bernstein(problem, 0.3, effort="fast", memory=8 * blocks.ARRAYS * 20**2)
    assert small.weights.shape[0] <= 20 and prove(problem, small, 0.3)


def test_clusters_sum_the_attention_of_their_keys():
    problem = normal(50, 90)
    block = blocks.open_block(problem, 0, 40, 2**30, 0)
    attention = problem.attention_rows(block.rows)
    for group in range(block.attention.shape[1]):
        total = attention[:, block.groups == group].sum(axis=1)
        np.testing.assert_allclose(block.attention[:, group], total, rtol=1e-12)


def test_the_same_seed_gives_the_same_witness():
    problem = normal(60, 50, sharp=1.0)
    first, again = (find_bernstein(problem, 0.1, seed=3) for _ in range(2))
    assert np.array_equal(first.rows, again.rows) and np.array_equal(first.weights, again.weights)


def test_more_effort_is_not_worse_than_the_beginning():
    problem = normal(80, 80, sharp=1.5)
    fast, high = (find_bernstein(problem, 0.1, effort=effort).rank for effort in ("fast", "high"))
    assert high >= fast > 3


def test_a_rank_known_to_suffice_ends_the_search():
    problem = normal(60, 50, sharp=1.5)
    calls = []
    found = find_bernstein(problem, 0.1, most=2, progress=lambda *call: calls.append(call))
    assert found.rank >= 2 and not calls


def test_ctrl_c_returns_what_there_is():
    def stop(done, total):
        raise KeyboardInterrupt

    problem = normal(60, 50, sharp=1.0)
    found = find_bernstein(problem, 0.1, progress=stop)
    assert found.interrupted and prove(problem, found, 0.1)
    assert not find_bernstein(problem, 0.1).interrupted


def test_a_sweep_falls_in_eps_and_rises_in_rank():
    problem = normal(60, 60, sharp=2.0)
    found = list(sweep_bernstein(problem, [0.8, 0.1, 0.4], effort="fast"))
    assert len(found) == 3
    for eps, witness in zip([0.8, 0.4, 0.1], found, strict=True):
        assert witness.eps_est > eps and prove(problem, witness, eps)
    ranks = [witness.rank for witness in found]
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]


def test_leakage_of_peaked_heads():
    problem = head(12.0 * np.eye(50), np.eye(50), scale=1.0)
    found = find_leakage(problem, 0.1)
    assert found.rank_est == check_leakage(problem.inputs, found.rows, eps=0.1).rank >= 40


def test_what_a_row_adds_is_what_its_loss_costs():
    problem = normal(30, 25, sharp=3.0)
    rows = np.arange(0, 30, 2)
    held, gains = leakage._pass(problem, rows, 25)
    less = [leakage._pass(problem, np.delete(rows, i), 25)[0] for i in range(rows.size)]
    np.testing.assert_allclose(gains, held - np.array(less), atol=1e-12)


def test_the_linear_program_is_the_optimum():
    """Two rows of two keys can be solved in one way only; with more keys even the splitting does no better."""
    seen = np.array([[0.75, 0.25], [0.25, 0.75]])
    np.testing.assert_allclose(bernstein.solve_exactly(seen), np.linalg.inv(seen), atol=1e-7)
    attention = normal(12, 30, sharp=1.0).attention_rows(np.arange(6))
    best = bernstein.solve_exactly(attention)
    np.testing.assert_allclose(attention @ best, np.eye(6), atol=1e-6)
    optimum = threshold(attention, best)
    for share, feasible in ((0.97, True), (1.01, False)):
        walk = bernstein._Walk(attention, share * optimum, np.random.default_rng(0), 1e12)
        walk.put(list(range(6)))
        assert walk.go(2000) is feasible


def test_a_near_miss_is_finished_exactly():
    attention = normal(12, 30, sharp=1.0).attention_rows(np.arange(6))
    eps = 0.998 * threshold(attention, bernstein.solve_exactly(attention))
    walk = bernstein._Walk(attention, eps, np.random.default_rng(0), 1e12)
    walk.put(list(range(6)))
    walk.go(20)
    assert walk.rank == 0
    walk.nearest, walk.missed = walk.worst, walk.snapshot()
    assert walk.nearest < bernstein.EXACT_NEAR
    walk.finish_exactly()
    assert walk.rank == 6 and np.abs(walk.best.weights / walk.size[:, None]).sum(axis=1).max() <= 1 / eps


@pytest.mark.parametrize("eps", [0.0, 1.0, -1.0, np.nan])
def test_eps_outside_is_refused(eps):
    for search in (find_bernstein, find_leakage):
        with pytest.raises(InvalidInput, match="eps must lie"):
            search(normal(3, 3), eps)


def test_effort_unknown_is_refused():
    with pytest.raises(InvalidInput, match="effort must be one of"):
        find_bernstein(normal(3, 3), 0.1, effort="huge")


def test_threshold_is_that_of_the_span():
    random = np.random.default_rng(4)
    seen = random.random((4, 9)) / 9
    weights = random.normal(size=(9, 4))
    value = threshold(seen, weights)
    assert value == pytest.approx(threshold(seen, weights @ random.normal(size=(4, 4))), rel=1e-9)
    solved = weights @ np.linalg.inv(seen @ weights)
    assert value == pytest.approx(1 / np.abs(solved).sum(axis=1).max(), rel=1e-9)
    assert threshold(seen, np.zeros((9, 4))) == 0.0


def test_quantising_takes_bytes_where_they_serve():
    random = np.random.default_rng(5)
    seen = random.random((20, 50)) / 50
    weights = np.linalg.pinv(seen)
    limit = threshold(seen, weights)
    loose, tight = quantise(seen, weights, 0.5 * limit), quantise(seen, weights, 0.9995 * limit)
    assert loose[0].dtype == np.int8 and tight[0].dtype == np.int16
    assert quantise(seen, weights, 1.01 * limit) is None
    for integers, reached in (loose, tight):
        assert reached == threshold(seen, integers)
