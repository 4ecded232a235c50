"""The search: its two projections, its descent, its causal fit, and what certify makes of it."""

import numpy as np
import pytest
from generated import Head, build, heads, is_proved
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rankcert import best_eps, certify, rank_curve
from rankcert.constructions import METHODS, splitting
from rankcert.constructions.prefixes import fit_prefixes
from rankcert.constructions.svd import TruncatedSVD
from rankcert.errors import CannotCertify, InvalidInput
from rankcert.heads import EXAMPLES, example_head
from rankcert.kernels import prefix, reference, reflect

tolerances = st.sampled_from([0.7, 0.3, 0.1, 0.01, 1e-4])
seeds = st.integers(0, 2**32 - 1)


def real_head(name: str, n: int = 256) -> Head:
    example = example_head(name)
    return Head(example.q[:n].astype(float), example.k[:n].astype(float), example.options())


def permutation(n: int, sharpness: float) -> Head:
    """Row i looks at key n - 1 - i and at nothing else."""
    return Head(sharpness * np.eye(n), np.eye(n)[::-1].copy(), {"scale": 1.0})


# the kernels


def draw_rows(rng, n, m, dtype=float):
    target, low, state = (rng.normal(size=(n, m)).astype(dtype) for _ in range(3))
    weight = rng.uniform(0.5, 2.0, m).astype(dtype)
    reach = np.sort(rng.integers(1, m + 1, n))
    radius = rng.uniform(0.05, 1.5 * m, n).astype(dtype)
    return target, low, state, weight, reach, radius


@given(st.integers(1, 6), st.integers(1, 40), st.sampled_from([np.float32, np.float64]), seeds)
def test_reflection_agrees_with_its_plain_twin(n, m, dtype, seed):
    rng = np.random.default_rng(seed)
    target, low, state, weight, reach, radius = draw_rows(rng, n, m, dtype)
    results = []
    for module in (reflect, reference):
        moved, threshold, errors = state.copy(), np.full(n, rng.uniform(0, 3), dtype), np.zeros(n, dtype)
        rest = np.empty(m, dtype)
        module.reflect_rows(target, low, moved, weight, reach, radius, dtype(1.5), threshold, errors, rest)
        results.append((moved, threshold, errors))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
    beyond = np.arange(m) >= reach[:, None]
    np.testing.assert_array_equal(results[0][0][beyond], state[beyond])


@given(st.integers(1, 12), seeds)
def test_reflection_projects_onto_the_ball(m, seed):
    """With beta = 1 and low = state, the new state is the point of the ball nearest to the old one."""
    rng = np.random.default_rng(seed)
    target, low, _, weight, _, _ = draw_rows(rng, 1, m)
    radius = np.array([rng.uniform(0.1, 1.0)])
    state, threshold, errors = low.copy(), np.zeros(1), np.zeros(1)
    reflect.reflect_rows(
        target, low, state, weight, np.array([m]), radius, 1.0, threshold, errors, np.empty(m)
    )
    assert errors[0] == pytest.approx((weight * np.abs(target - low)).sum())
    gap = state - target
    assert (weight * np.abs(gap)).sum() <= radius[0] * (1 + 1e-3) or np.array_equal(state, low)
    # no point of the ball is nearer: the variational inequality at its corners target +- radius e_j / weight_j
    away = low - state
    for j in range(m):
        for sign in (-1, 1):
            corner = target.copy()
            corner[0, j] += sign * radius[0] / weight[j]
            assert ((corner - state) * away).sum() <= 2e-3 * (1 + np.abs(away).sum()) * radius[0]


@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 7), st.integers(1, 9), seeds)
def test_prefix_fit_agrees_with_its_plain_twin(n, m, r, height, seed):
    rng = np.random.default_rng(seed)
    basis, rhs, previous = (rng.normal(size=(rows, r)) for rows in (m, n, n))
    counts = np.sort(rng.integers(0, m + 1, n))
    results = []
    for module in (prefix, reference):
        gram, out = basis[: counts[0]].T @ basis[: counts[0]], np.empty((n, r))
        module.solve_prefixes(basis, counts, rhs, previous, 0.01, gram, out, height)
        results.append((out, np.tril(gram)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), seeds)
def test_prefix_fit_is_the_argmin(n, m, r, seed):
    rng = np.random.default_rng(seed)
    basis, previous, data = rng.normal(size=(m, r)), rng.normal(size=(n, r)), rng.normal(size=(n, m))
    counts = np.sort(rng.integers(0, m + 1, n))
    seen = np.arange(m) < counts[:, None]
    out = fit_prefixes(basis, counts, np.where(seen, data, 0.0) @ basis, previous, 0.5)
    for i in range(n):
        rows = np.vstack([basis[seen[i]], np.sqrt(0.5) * np.eye(r)])
        wanted = np.concatenate([data[i, seen[i]], np.sqrt(0.5) * previous[i]])
        np.testing.assert_allclose(out[i], np.linalg.lstsq(rows, wanted, rcond=None)[0], atol=1e-9)


# the descent


@settings(max_examples=60)
@given(heads(rows=14, columns=14, size=4.0), tolerances)
def test_factors_are_within_eps_and_never_thicker_than_the_svd(head, eps):
    problem, _, factors = build(METHODS["splitting"], head, eps)
    assert head.error(factors.left, factors.right) <= eps
    assert factors.error_est == pytest.approx(head.error(factors.left, factors.right), abs=1e-11)
    assert is_proved(problem, factors, eps)
    assert factors.rank <= build(TruncatedSVD(), head, eps)[2].rank


@pytest.mark.parametrize(("name", "eps", "share"), [
    ("diffuse", 0.1, 0.70), ("diffuse", 0.5, 0.40), ("peaked", 0.1, 0.9), ("peaked", 0.5, 0.75),
    ("causal", 0.1, 0.35), ("causal", 0.5, 0.35),
])  # fmt: skip
def test_real_heads_need_far_less_than_the_svd(name, eps, share):
    head = real_head(name)
    problem, _, factors = build(METHODS["splitting"], head, eps)
    assert factors.rank <= share * factors.details["start_rank"]
    assert is_proved(problem, factors, eps)


@pytest.mark.parametrize("name", ["diffuse", "causal"])
def test_more_effort_is_no_worse(name):
    head = real_head(name, 128)
    ranks = [build(METHODS["splitting"].set(effort=effort), head, 0.3)[2].rank for effort in ("fast", "high")]
    assert ranks[1] <= ranks[0]


@pytest.mark.parametrize("eps", [0.5, 0.1])
def test_permutations_are_recognised_at_once(eps):
    _, _, factors = build(METHODS["splitting"], permutation(40, 60.0), eps)
    assert factors.rank == 40 and factors.details["steps"] == 0


@given(st.integers(2, 12), st.sampled_from([0.5, 0.1]), seeds)
def test_peaks_are_a_lower_bound(n, eps, seed):
    """The largest row error of the best rank-(N - 1) factors anybody finds stays above eps."""
    rng = np.random.default_rng(seed)
    head = Head(6.0 * np.eye(n) + 0.3 * rng.normal(size=(n, n)), np.eye(n), {"scale": 1.0})
    dense = splitting.decompose(head.problem())
    peaks = splitting._count_peaks(dense, eps)
    assume(peaks >= 2)
    found = best_eps(head.q, head.k, rank=int(peaks) - 1, scale=1.0, effort="high")
    assert found.bound > eps


def test_heads_of_rank_one_are_recognised_at_once():
    rng = np.random.default_rng(0)
    certificate = certify(np.zeros((30, 3)), rng.normal(size=(40, 3)), eps=1e-9)
    assert certificate.rank == 1
    near = certify(1e-4 * rng.normal(size=(30, 3)), rng.normal(size=(40, 3)), eps=0.1)
    assert near.rank == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_same_seed_gives_the_same_bytes_whatever_the_threads(name, monkeypatch):
    from rankcert.constructions import states

    monkeypatch.setattr(states, "SMALL", 0)  # tiles and threads, as for large heads
    monkeypatch.setattr(states, "TILE_ROWS", 50)
    head = real_head(name, 128)
    made = [
        certify(head.q, head.k, eps=0.2, threads=threads, seed=3, **head.options) for threads in (1, 1, 2)
    ]
    assert len({certificate.to_bytes() for certificate in made}) == 1


def test_tiles_change_little(monkeypatch):
    from rankcert.constructions import states

    head = real_head("diffuse")
    whole = build(METHODS["splitting"], head, 0.3)[2].rank
    monkeypatch.setattr(states, "SMALL", 0)
    monkeypatch.setattr(states, "TILE_ROWS", 37)
    assert abs(build(METHODS["splitting"], head, 0.3)[2].rank - whole) <= 2


def test_small_tolerances_use_double_precision():
    head = real_head("diffuse", 64)
    problem, _, factors = build(METHODS["splitting"], head, 1e-7)
    assert is_proved(problem, factors, 1e-7)
    assert factors.rank <= factors.details["start_rank"]


def test_factors_are_well_conditioned():
    head = real_head("diffuse")
    factors = build(METHODS["splitting"], head, 0.1)[2]
    np.testing.assert_allclose(factors.right.T @ factors.right, np.eye(factors.rank), atol=1e-12)


def test_refusals():
    head = real_head("diffuse", 64)
    assert METHODS["splitting"].plan(head.problem(), 0.1, memory=1000).refusal.startswith("needs")
    assert "below the rounding" in METHODS["splitting"].plan(head.problem(), 1e-14, memory=2**30).refusal
    long = Head(np.zeros((1025, 1)), np.zeros((1030, 1)), {}).problem()
    assert "that of subspace" in METHODS["splitting"].set(effort="fast").plan(long, 0.1, memory=2**40).refusal
    assert METHODS["splitting"].plan(long, 0.1, memory=2**40).refusal is None
    with pytest.raises(InvalidInput, match="effort must be one of fast, balanced, high, max, got 'slow'"):
        certify(head.q, head.k, eps=0.1, effort="slow")
    with pytest.raises(InvalidInput, match="seed must be a nonnegative integer, got -1"):
        certify(head.q, head.k, eps=0.1, seed=-1)


# interruption


class Interrupting:
    """Progress that raises KeyboardInterrupt at its `after`-th call within a stage."""

    def __init__(self, stage: str, after: int):
        self.wanted, self.after = stage, after

    def stage(self, name):
        return self.count if name == self.wanted else None

    def count(self, done, total):
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [1, 4])
def test_interrupt_returns_the_best_certificate_so_far(after):
    head = real_head("diffuse")
    interrupted = certify(
        head.q, head.k, eps=0.1, progress=Interrupting("splitting", after).stage, **head.options
    )
    whole = certify(head.q, head.k, eps=0.1, **head.options)
    assert whole.rank < interrupted.rank < interrupted.details["start_rank"]
    assert interrupted.bound <= 0.1 and interrupted.method == "splitting"


def test_interrupt_with_nothing_proved_passes_on():
    head = real_head("diffuse", 64)
    with pytest.raises(KeyboardInterrupt):
        certify(head.q, head.k, eps=0.1, progress=Interrupting("checking splitting", 1).stage, **head.options)


# a rank, a curve


@settings(max_examples=40)
@given(heads(rows=12, columns=12, size=3.0), st.integers(0, 14))
def test_best_eps_is_proved_and_no_worse_than_the_svd(head, rank):
    certificate = best_eps(head.q, head.k, rank=rank, effort="fast", **head.options)
    assert certificate.rank <= rank and certificate.bound <= certificate.eps
    assert certificate.eps == pytest.approx(certificate.bound, rel=2e-9)
    assert (
        head.error(certificate.left, certificate.right) <= certificate.bound + 1e-14
    )  # rounding of the oracle
    u, values, vt = np.linalg.svd(np.where(head.counted, head.attention, 0.0), full_matrices=False)
    svd = head.error(u[:, :rank] * values[:rank], vt[:rank].T)
    assert certificate.bound <= min(svd, 1.0) * (1 + 1e-9) + 1e-10  # of the check's rounding


@pytest.mark.parametrize(
    ("name", "rank", "most"), [("diffuse", 63, 0.092), ("diffuse", 8, 0.48), ("causal", 8, 0.12)]
)
def test_best_eps_on_real_heads(name, rank, most):
    head = real_head(name)
    certificate = best_eps(head.q, head.k, rank=rank, **head.options)
    assert certificate.rank == rank and certificate.bound <= most


def test_best_eps_refuses():
    head = real_head("diffuse", 16)
    for rank in (-1, 1.5, True):
        with pytest.raises(InvalidInput, match="rank must be a nonnegative integer"):
            best_eps(head.q, head.k, rank=rank)
    with pytest.raises(CannotCertify, match="no search at a fixed rank: needs"):
        best_eps(head.q, head.k, rank=3, memory=100)
    with pytest.raises(CannotCertify, match="min\\(n, m\\) may be 4096 at most"):
        best_eps(np.zeros((4097, 1)), np.zeros((4097, 1)), rank=3)


def test_large_heads_start_from_a_streamed_subspace(monkeypatch):
    monkeypatch.setattr(splitting, "LARGEST_DENSE", 100)
    for name in ("diffuse", "causal"):
        head = real_head(name)
        problem, _, factors = build(METHODS["splitting"], head, 0.3)
        assert is_proved(problem, factors, 0.3) and factors.rank < 0.7 * factors.details["start_rank"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_curve_is_monotone_and_serves_every_tolerance(name):
    head = real_head(name, 100)
    eps = [0.6, 0.5, 0.45, 0.2, 0.19, 0.05]
    curve = rank_curve(head.q, head.k, eps=eps, effort="fast", **head.options)
    assert len(curve) == len(eps)
    ranks = [certificate.rank for certificate in curve]
    assert ranks == sorted(ranks)
    for value, certificate in zip(eps, curve, strict=True):
        assert certificate.bound <= certificate.eps <= value


@settings(max_examples=30)
@given(heads(rows=10, columns=10, size=3.0), tolerances)
def test_auto_never_exceeds_the_svd(head, eps):
    auto = certify(head.q, head.k, eps=eps, effort="fast", **head.options)
    try:
        svd = certify(head.q, head.k, eps=eps, method="svd", **head.options)
    except CannotCertify:
        return
    assert auto.rank <= svd.rank
