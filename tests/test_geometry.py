"""Visible dimensions, row ranges and dimensions by tolerance, against a plain NumPy reading of the definitions."""

import numpy as np
import pytest
from generated import Head, heads
from hypothesis import assume, given
from hypothesis import strategies as st

from rankcert import geometry
from rankcert.checker import logit_residual
from rankcert.errors import CannotCertify, InvalidInput
from rankcert.geometry import dimension_report, half_ranges, interaction_dimension, visible
from rankcert.heads import EXAMPLES, example_head

tolerances = st.lists(st.sampled_from([0.01, 0.05, 0.3, 0.8, 1.5]), min_size=1, max_size=3)


def spread(values: np.ndarray) -> np.ndarray:
    return np.nanmax(values, axis=1) - np.nanmin(values, axis=1)


def planted(rng, n: int, m: int, d: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """q (n, d), k (m, d) whose centred logits have exactly that rank, the keys far from the origin."""
    directions = np.linalg.qr(rng.normal(size=(d, d)))[0][:rank]
    hidden = rng.normal(size=(n, d)) @ (np.eye(d) - directions.T @ directions)
    return rng.normal(size=(n, rank)) @ directions + hidden, rng.normal(
        size=(m, rank)
    ) @ directions + rng.normal(size=d)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "n, m, d, rank", [(30, 40, 8, 3), (40, 30, 5, 5), (300, 20, 6, 1), (4, 50, 9, 4), (7, 7, 3, 0)]
)
def test_planted_rank_is_found(n, m, d, rank, causal):
    q, k = planted(np.random.default_rng(0), n, m, d, rank)
    options = {"causal": causal, "offset": m // 2 * causal}
    seen = visible(Head(q, k, options).problem())
    assert seen.dimension == rank == interaction_dimension(q, k, **options)
    assert seen.query.shape == (n, rank) and seen.key.shape == (m, rank)
    assert seen.bound <= 1e-12


@given(heads(width=4, size=3.0))
def test_coordinates_reproduce_centred_logits(head):
    problem = head.problem()
    seen = visible(problem)
    difference = head.logits - seen.query @ seen.key.T
    assert spread(difference).max() <= 1e-12 * (1 + np.nanmax(np.abs(head.logits)))
    assert not seen.key[~problem.inputs.kept_keys].any()
    assert seen.bound == logit_residual(problem.inputs, seen.query, seen.key).bound
    centred = head.logits - problem.inputs.scale * (head.q @ seen.centre)[:, None]
    np.testing.assert_allclose(
        seen.query @ seen.key.T, np.where(head.kept, centred, seen.query @ seen.key.T), atol=1e-11
    )


@given(heads(width=4, size=3.0))
def test_longest_rows_are_balanced(head):
    seen = visible(head.problem())
    longest = [np.sqrt((rows**2).sum(axis=1).max()) for rows in (seen.query, seen.key)]
    assert longest[0] == pytest.approx(longest[1], rel=1e-6, abs=1e-9)


@given(heads(width=4))
def test_half_ranges_are_those_of_the_kept_logits(head):
    problem = head.problem()
    seen = visible(problem)
    centred = np.where(head.kept, seen.query @ seen.key.T, np.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "BLOCK_ENTRIES", 2 * problem.m)  # several blocks of two rows
        shift, half = half_ranges(problem, seen)
    np.testing.assert_allclose(
        shift, (np.nanmax(centred, axis=1) + np.nanmin(centred, axis=1)) / 2, atol=1e-13
    )
    np.testing.assert_allclose(half, spread(centred) / 2, atol=1e-13)


def test_dimension_is_not_fooled_by_its_sample():
    """One row among 400 has a direction of its own, and is not among those looked at first."""
    rng = np.random.default_rng(0)
    own = np.setdiff1d(np.arange(400), np.linspace(0, 399, geometry.SAMPLE_ROWS).astype(int))[50]
    q = np.column_stack([rng.normal(size=(400, 2)), np.zeros(400)])
    q[own] = [0.0, 0.0, 1.0]
    k = rng.normal(size=(30, 3))
    k = np.linalg.qr(k - k.mean(axis=0))[0]  # orthogonal columns, so that the direction is a singular one
    assert visible(Head(q, k, {}).problem()).dimension == 3


@pytest.mark.parametrize("size, dimension", [(2.0, 1), (40.0, 2)])
def test_what_counts_as_rounding(size, dimension):
    """A second direction that moves a softmax row by size * 2^-52 (d + 3) max_i N_i; up to 4 of these are rounding."""
    k = np.array([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    unit = 2.0**-52 * 5 * np.sqrt(2)
    q = np.array([[1.0, 0.0], [0.0, size * unit]])
    assert interaction_dimension(q, k, scale=1.0) == dimension


def test_rounded_data_has_all_its_dimensions():
    """Rounding to float32 is visible in float64: the rank is that of the data as given."""
    q, k = planted(np.random.default_rng(0), 50, 60, 6, 2)
    assert interaction_dimension(q.astype(np.float32), k.astype(np.float32)) == 6
    assert interaction_dimension(q.astype(np.float32), k.astype(np.float32), tol=1e-5) == 2


def test_heads_without_interaction_have_dimension_zero():
    q = np.random.default_rng(0).normal(size=(5, 3))
    assert interaction_dimension(q, np.zeros((4, 3))) == 0
    assert interaction_dimension(q, np.ones((4, 3))) == 0
    assert interaction_dimension(q, q, scale=0.0) == 0
    assert interaction_dimension(q, q[:1]) == 0
    assert interaction_dimension(q[:0], q) == 0
    assert interaction_dimension(q, q, key_bias=[0.0, *[-np.inf] * 4]) == 0


def test_repeating_rows_changes_nothing_but_under_a_mask():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(6, 4)), rng.normal(size=(7, 4))
    once = visible(Head(q, k, {}).problem())
    often = visible(Head(np.repeat(q, 3, axis=0), np.repeat(k, [1, 1, 1, 1, 1, 1, 9], axis=0), {}).problem())
    np.testing.assert_allclose(often.singular_values, once.singular_values, rtol=1e-12)
    masked = visible(
        Head(np.repeat(q, 3, axis=0), np.repeat(k, 3, axis=0), {"causal": True, "offset": 21}).problem()
    )
    np.testing.assert_allclose(masked.singular_values, 3 * once.singular_values, rtol=1e-12)


def test_moving_all_keys_changes_nothing():
    rng = np.random.default_rng(0)
    q, k = rng.integers(-4, 5, size=(6, 4)), rng.integers(-4, 5, size=(7, 4))
    here, there = (visible(Head(q, keys, {}).problem()) for keys in (k, k + np.array([100, -50, 3, 8])))
    np.testing.assert_allclose(here.singular_values, there.singular_values, rtol=1e-12)


def truncation_errors(head: Head) -> np.ndarray:
    """max_i 2 tanh(osc_i / 4) for every rank, by a dense SVD of the centred logits of the definition."""
    used = np.flatnonzero(head.kept.any(axis=0))
    rows, columns = np.arange(len(head.q)), used
    if not head.options.get("causal"):
        rows = np.unique(head.q, axis=0, return_index=True)[1]
        columns = used[np.unique(head.k[used], axis=0, return_index=True)[1]]
    scale = head.options.get("scale")
    scale = head.q.shape[1] ** -0.5 if scale is None else scale
    centred = scale * head.q[rows] @ (head.k[columns] - head.k[columns].mean(axis=0)).T
    u, values, vt = np.linalg.svd(centred, full_matrices=False)
    errors = []
    for r in range(min(*centred.shape, head.q.shape[1]) + 1):
        rest = np.where(head.kept[np.ix_(rows, columns)], centred - (u[:, :r] * values[:r]) @ vt[:r], np.nan)
        errors.append(2 * np.tanh(spread(rest).max() / 4))
    return np.array(errors)


def check_report(head: Head, errors: np.ndarray, wanted: list[float]) -> None:
    for record, tol in zip(dimension_report(head.problem(), wanted), wanted, strict=True):
        assert record.tol == tol and record.dimension == np.argmax(errors <= tol)
        assert record.bound == pytest.approx(errors[record.dimension], abs=1e-10) and record.bound <= tol


@given(heads(rows=12, columns=12, width=6, size=2.0), tolerances)
def test_dimension_by_tolerance_is_the_first_that_passes(head, wanted):
    errors = truncation_errors(head)
    assume(all(np.abs(errors - tol).min() > 1e-9 for tol in wanted))  # ties are for rounding to decide
    check_report(head, errors, wanted)


@pytest.mark.parametrize("name", EXAMPLES)
def test_dimension_by_tolerance_on_real_heads(name):
    example = example_head(name)
    head = Head(example.q.astype(float), example.k.astype(float), example.options())
    check_report(head, truncation_errors(head), [0.1, 0.5, 1.0])


def test_error_is_not_monotone_and_the_first_dimension_is_found():
    rng = np.random.default_rng(0)
    for _ in range(100):
        head = Head(rng.normal(size=(6, 5)), rng.normal(size=(6, 5)), {})
        errors = truncation_errors(head)
        worse = np.flatnonzero(np.diff(errors) > 1e-3)
        if worse.size:
            check_report(head, errors, [float(errors[worse[0] : worse[0] + 2].mean())])
            return
    pytest.fail("no head with a growing error was generated")


@given(heads(rows=12, columns=12, width=6, size=2.0))
def test_dimension_falls_as_the_tolerance_grows(head):
    wanted = [0.0, 1e-6, 0.01, 0.1, 0.5, 1.0, 1.9, 2.0]
    report = dimension_report(head.problem(), wanted)
    found = [record.dimension for record in report]
    assert found == sorted(found, reverse=True) and found[-1] == 0
    assert all(record.bound <= record.tol for record in report[1:])


def test_a_dimension_whose_proof_misses_is_passed_over(monkeypatch):
    """The estimates decide nothing: with hopeful ones every smaller dimension is refused by its proof."""
    rng = np.random.default_rng(0)
    problem = Head(rng.normal(size=(20, 6)), rng.normal(size=(20, 6)), {}).problem()
    honest = dimension_report(problem, [0.3])
    monkeypatch.setattr(geometry, "_truncation_errors", lambda *args: np.zeros(7))
    assert dimension_report(problem, [0.3]) == honest and honest[0].dimension > 1


def test_from_tolerance_two_on_nothing_is_needed():
    """Even where float64 cannot tell 2 tanh from 2."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(20, 6)), rng.normal(size=(20, 6))
    assert interaction_dimension(q, k, scale=1e4, tol=1.9) > 0
    assert (
        interaction_dimension(q, k, scale=1e4, tol=2.0)
        == interaction_dimension(q, k, scale=1e4, tol=np.inf)
        == 0
    )


def test_progress_counts_rows():
    rng = np.random.default_rng(0)
    problem = Head(rng.normal(size=(20, 6)), rng.normal(size=(20, 6)), {}).problem()
    calls = []
    dimension_report(problem, [0.3, 0.5], lambda done, total: calls.append((done, total)))
    assert calls == [(20, 20)]


@pytest.mark.parametrize("tol", [-0.1, float("nan"), None, "small"])
def test_tolerances_without_meaning_are_refused(tol):
    with pytest.raises(InvalidInput, match="tol must be a number >= 0"):
        interaction_dimension(np.eye(2), np.eye(2), tol=tol)


def test_tolerances_below_rounding_are_refused():
    with pytest.raises(CannotCertify, match="tol=1e-17 is below rounding: all 2 dimensions") as caught:
        interaction_dimension(np.eye(3)[:, :2], np.eye(3)[:, :2], tol=1e-17)
    assert caught.value.rank == 2 and 0.0 < caught.value.bound < 1e-12
