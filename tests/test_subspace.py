"""Heads by tiles: proved, about as thin as the truncated SVD or thinner, repeatable, within memory."""

import numpy as np
import pytest
from generated import Head, build, heads, is_proved
from hypothesis import given, settings
from hypothesis import strategies as st

import rankcert
from rankcert.checker import Engine
from rankcert.constructions import METHODS, descent, subspace, tiles
from rankcert.constructions.descent import Budget, Descent, Factors, balance
from rankcert.constructions.subspace import Subspace, find_subspace
from rankcert.constructions.svd import TruncatedSVD
from rankcert.constructions.tiles import Tiles
from rankcert.heads import EXAMPLES, example_head
from rankcert.kernels import reference, streaming
from rankcert.problem import AttentionProblem

seeds = st.integers(0, 2**32 - 1)


def real(name: str, n: int = 512) -> Head:
    example = example_head(name)
    return Head(example.q[:n].astype(float), example.k[:n].astype(float), example.options())


def cloud(n: int, m: int, d: int, seed: int = 0, **options) -> Head:
    rng = np.random.default_rng(seed)
    return Head(rng.normal(size=(n, d)), rng.normal(size=(m, d)), options)


@settings(max_examples=60)
@given(
    heads(rows=40, columns=40, width=6, size=3.0),
    st.sampled_from([0.7, 0.1, 1e-3, 1e-8]),
    st.sampled_from(["fast", "balanced", "high"]),
    st.sampled_from([1, 7, 256]),
)
def test_whatever_the_head_the_checker_agrees(head, eps, effort, height):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "HEIGHT", height)
        problem, _, factors = build(Subspace(effort=effort), head, eps)
    assert 1 <= factors.rank <= min(problem.n, problem.m)
    assert head.error(factors.left, factors.right) <= eps and is_proved(problem, factors, eps)
    measured = head.error(factors.left, factors.right)
    rounding = 2e-3 * eps if factors.details["precision"] == "single" else 1e-10
    assert factors.error_est == pytest.approx(measured, abs=rounding)
    masked = ~problem.inputs.kept_keys
    assert not factors.right[masked].any()


@settings(max_examples=40)
@given(
    heads(rows=30, columns=30, width=4, size=3.0), st.sampled_from([0.3, 1e-6]), st.sampled_from([1, 4, 256])
)
def test_tiles_are_the_attention_matrix(head, eps, height):
    problem = head.problem()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "HEIGHT", height)
        stream = Tiles(problem, eps)
        parts = stream.sweep(lambda start: [], lambda rows, tile, total: total.append((rows, tile.copy())))
    seen = np.zeros((problem.n, stream.m))
    for rows, tile in parts[0]:
        seen[rows, : tile.shape[1]] = tile
    difference = np.abs(seen - head.attention[:, stream.kept]).sum(axis=1).max()
    assert difference <= eps - stream.target + 1e-12
    assert not seen[~head.kept[:, stream.kept]].any()


def test_large_logits_or_small_tolerances_are_computed_in_double_precision():
    small, large = cloud(20, 20, 4), cloud(20, 20, 4)
    large.q *= 1e4
    assert Tiles(small.problem(), 0.1).dtype == np.float32
    assert Tiles(small.problem(), 1e-5).dtype == Tiles(large.problem(), 0.1).dtype == np.float64


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("eps", [0.5, 0.1])
def test_fast_is_as_thin_as_the_svd_on_real_heads(name, eps):
    head = real(name)
    problem, _, factors = build(Subspace(effort="fast"), head, eps)
    assert factors.rank <= 1.05 * build(TruncatedSVD(), head, eps)[2].rank + 1
    assert is_proved(problem, factors, eps)


@pytest.mark.parametrize(
    "name, eps, share", [("diffuse", 0.1, 0.9), ("diffuse", 0.5, 0.75), ("causal", 0.5, 0.5)]
)
def test_more_effort_is_thinner(name, eps, share):
    head = real(name)
    svd = build(TruncatedSVD(), head, eps)[2].rank
    ranks = [build(Subspace(effort=effort), head, eps)[2].rank for effort in ("fast", "balanced", "high")]
    assert ranks == sorted(ranks, reverse=True) and ranks[-1] <= share * svd


@pytest.mark.parametrize("causal", [False, True])
def test_polish_without_a_state_is_thinner_too(monkeypatch, causal):
    monkeypatch.setattr(subspace, "BYTE", 1e9)  # no room for a state
    problem, _, factors = build(Subspace(effort="high"), cloud(300, 320, 6, causal=causal), 0.5)
    assert factors.details["state"] == "none"
    assert factors.rank < factors.details["start_rank"] and is_proved(problem, factors, 0.5)


@pytest.mark.parametrize("one_byte", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_descent_keeps_what_is_feasible(one_byte, causal):
    head = cloud(150, 130, 3, causal=causal)
    start = find_subspace(head.problem(), 0.3)
    down = Descent(start.tiles, Factors(start.left, start.right), one_byte, Budget(200, 40, 20))
    down.run(0.6)
    assert 1 <= len(down.found) <= 2 and down.passes > 0
    for factors, error in down.found:
        assert factors.rank < start.rank
        measured = head.error(*(x.astype(float) for x in factors))
        assert measured <= 0.3 and error == pytest.approx(measured, abs=1e-5)


@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.parametrize("causal", [False, True])
def test_same_seed_same_factors(effort, causal):
    head = cloud(400, 380, 5, causal=causal)
    first, second, other = (build(Subspace(effort=effort, seed=seed), head, 0.4)[2] for seed in (3, 3, 4))
    assert np.array_equal(first.left, second.left) and np.array_equal(first.right, second.right)
    assert not np.array_equal(first.right[:, 0], other.right[:, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_several_threads(monkeypatch, causal):
    """Sums come in the order of the rows, so the number of threads changes the last digits only."""
    monkeypatch.setattr(tiles, "HEIGHT", 64)
    monkeypatch.setattr(tiles, "SMALL", 0)
    head = cloud(700, 500, 4, causal=causal)
    ranks = []
    for threads in (1, 3, 3):
        problem = AttentionProblem(head.q, head.k, engine=Engine(threads=threads), **head.options)
        method = Subspace(effort="balanced")
        factors = method.build(problem, method.plan(problem, 0.4, memory=2**30), 0.4)
        assert is_proved(problem, factors, 0.4)
        ranks.append(factors)
    assert np.array_equal(ranks[1].left, ranks[2].left)
    assert abs(ranks[0].rank - ranks[1].rank) <= 2 + ranks[0].rank // 10


def test_interrupted_search_returns_what_it_has():
    head = cloud(300, 300, 6)
    calls = []

    def stop(done, total):
        calls.append((done, total))
        if len(calls) == 3:
            raise KeyboardInterrupt

    problem, _, factors = build(Subspace(progress=stop), head, 0.5)
    assert factors.interrupted and len(calls) == 3 and is_proved(problem, factors, 0.5)
    assert not build(Subspace(effort="fast"), head, 0.5)[2].interrupted


def test_interrupt_in_a_sweep_ends_its_threads(monkeypatch):
    monkeypatch.setattr(tiles, "HEIGHT", 10)
    monkeypatch.setattr(tiles, "SMALL", 0)
    head = cloud(500, 50, 3)
    stream = Tiles(AttentionProblem(head.q, head.k, engine=Engine(threads=2)), 0.1)
    visited = []

    def visit(rows, tile, total):
        visited.append(rows.start)
        if rows.start == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.sweep(lambda start: None, visit)
    assert 0 in visited


def test_progress_ends_where_it_says():
    seen = []
    build(Subspace(progress=lambda done, total: seen.append((done, total))), cloud(200, 200, 5), 0.5)
    assert seen and all(0 < done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_refusals():
    problem = cloud(2000, 2000, 8).problem()
    plan = Subspace().plan(problem, 0.1, memory=2**20)
    assert plan.rank is None and plan.refusal.startswith("needs ")
    assert "below the rounding" in Subspace().plan(problem, 1e-15, memory=2**32).refusal


def test_too_little_memory_for_the_rank_is_no_proof():
    head = cloud(600, 600, 24)
    tight = subspace._bytes(600, 600, 70, 1, 8)
    with pytest.raises(rankcert.CannotCertify):
        rankcert.certify(head.q, head.k, eps=0.05, method="subspace", memory=tight, threads=1)


@pytest.mark.parametrize("n, m, d", [(1, 6, 2), (6, 1, 2), (1, 1, 1), (5, 6, 1), (2, 900, 3), (900, 2, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_edge_shapes(n, m, d, causal):
    head = cloud(n, m, d, causal=causal)
    problem, _, factors = build(Subspace(), head, 0.2)
    assert is_proved(problem, factors, 0.2)


def test_memory_mapped_arrays(tmp_path):
    head = cloud(120, 110, 4)
    np.save(tmp_path / "q.npy", head.q.astype(np.float32))
    np.save(tmp_path / "k.npy", head.k.astype(np.float32))
    q, k = (np.load(tmp_path / name, mmap_mode="r") for name in ("q.npy", "k.npy"))
    mapped = rankcert.certify(q, k, eps=0.2, method="subspace")
    held = rankcert.certify(np.array(q), np.array(k), eps=0.2, method="subspace")
    assert mapped.rank == held.rank and np.array_equal(mapped.left, held.left)
    assert rankcert.verify(mapped, q, k)


def draw_tile(seed: int, dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows, columns = rng.integers(1, 6), rng.integers(1, 40)
    tile = rng.dirichlet(np.full(columns, 0.3), size=rows).astype(dtype)
    product = (tile + rng.normal(size=tile.shape) * rng.choice([0.0, 0.01, 0.2])).astype(dtype)
    return tile, product, np.sort(rng.integers(1, columns + 1, size=rows))


@given(seeds, st.sampled_from([np.float32, np.float64]), st.sampled_from([0.05, 0.5]))
def test_pull_is_its_twin(seed, dtype, radius):
    tile, product, counts = draw_tile(seed, dtype)
    results = []
    for module, start in ((streaming, 0.0), (streaming, 0.3), (reference, 0.0)):
        moved = product.copy()
        theta, errors = np.full(counts.size, start, dtype), np.empty(counts.size, dtype)
        module.pull_rows(tile, moved, counts, radius, 1.0, theta, errors)
        results.append((moved, theta, errors))
        reached = [np.abs(tile[i, :c] - moved[i, :c]).sum() for i, c in enumerate(counts)]
        assert max(reached) <= radius * 1.002 + 1e-6
    for one, two, three in zip(*results, strict=True):
        assert one == pytest.approx(three, abs=2e-3 * radius + 1e-5)
        assert two == pytest.approx(three, abs=2e-3 * radius + 1e-5)


@given(seeds, st.sampled_from([np.float32, np.float64]), st.sampled_from([0.05, 0.5]))
def test_split_is_its_twin_and_the_state_is_a_byte(seed, dtype, radius):
    tile, product, counts = draw_tile(seed, dtype)
    rng = np.random.default_rng(seed)
    old = (product + 0.01 * rng.normal(size=product.shape)).astype(dtype)
    dual = rng.integers(-127, 128, size=tile.shape).astype(np.int8)
    results = []
    for module in (streaming, reference):
        state, levels, scale = old.copy(), dual.copy(), np.full(counts.size, 1e-3, dtype)
        theta, errors = np.zeros(counts.size, dtype), np.empty(counts.size, dtype)
        module.split_rows(tile, state, product, levels, scale, counts, radius, 1.8, theta, errors)
        for i, count in enumerate(counts):
            assert state[i, :count] == pytest.approx(
                product[i, :count] + scale[i] * levels[i, :count], abs=1e-5
            )
            assert not state[i, count:].any()
        results.append((state, scale, theta, errors))
    slack = 1.5 * float(results[1][1].max()) + 4e-3 * radius + 1e-5  # a level, and the threshold's tolerance
    for one, two in zip(*results, strict=True):
        assert one == pytest.approx(two, abs=slack)


@given(seeds, st.sampled_from([np.float32, np.float64]))
def test_trace_is_its_twin(seed, dtype):
    tile, _, counts = draw_tile(seed, dtype)
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 5))
    left = rng.normal(size=(counts.size, rank)).astype(dtype)
    right = rng.normal(size=(rank, tile.shape[1])).astype(dtype)
    one, two = np.empty(rank, dtype), np.empty(rank, dtype)
    streaming.trace_ranks(tile.copy(), left, right, counts, one)
    reference.trace_ranks(tile.copy(), left, right, counts, two)
    assert one == pytest.approx(two, rel=1e-4)


@given(seeds)
def test_balance_keeps_the_product(seed):
    rng = np.random.default_rng(seed)
    factors = Factors(rng.normal(size=(9, 4)), rng.normal(size=(7, 4)))
    even = balance(factors)
    assert even.left @ even.right.T == pytest.approx(factors.left @ factors.right.T, abs=1e-12)
    assert even.right.T @ even.right == pytest.approx(np.eye(4), abs=1e-12)
    norms = np.linalg.norm(even.left, axis=0)
    assert (np.diff(norms) <= 1e-12).all()


def test_drops_leave_a_rank():
    for rank in (2, 3, 10, 1000):
        for tried in (1, 15, 30, 100):
            assert 1 <= rank - descent._drop(rank, tried) < rank


def test_method_is_registered():
    assert isinstance(METHODS["subspace"], Subspace)
