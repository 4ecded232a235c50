"""Cells: partitions, counts, and the row error of C3."""

import math

import numpy as np
import pytest
from generated import Head, build, heads, is_proved
from hypothesis import given, settings
from hypothesis import strategies as st

from rankcert.approximants import minimax
from rankcert.constructions import METHODS
from rankcert.constructions.cells import Cells, coarse, widest

CLUSTERS = np.array([[6.0, 0.0], [0.0, 6.0], [-6.0, -6.0]])


def clustered(rng, n=90, m=120, spread=0.02) -> Head:
    return Head(
        rng.normal(size=(n, 2)),
        CLUSTERS[rng.integers(3, size=m)] + spread * rng.normal(size=(m, 2)),
        {"scale": 1.0},
    )


@settings(max_examples=60)
@given(heads(rows=20, columns=20, size=2.5), st.sampled_from([0.7, 0.1, 1e-3]))
def test_error_is_within_the_estimate(head, eps):
    problem, plan, factors = build(Cells(), head, eps)
    assert plan.rank <= min(problem.n, problem.m)  # single points are cells
    assert factors.error_est <= eps
    assert head.error(factors.left, factors.right) <= factors.error_est * (1 + 1e-9) + 1e-11
    assert is_proved(problem, factors, eps)


@pytest.mark.parametrize("causal", [False, True])
def test_cells_partition_the_points(causal):
    rng = np.random.default_rng(0)
    head = clustered(rng)
    head.options["causal"] = causal
    problem, plan, factors = build(Cells(), head, 0.1)
    cells = plan.state.cells
    assert [cell.start for cell in cells] == [0, *[cell.stop for cell in cells[:-1]]]
    assert sorted(plan.state.tree.side.index) == list(range(cells[-1].stop))
    counted = [
        math.comb(cell.dimension + cell.degree, cell.degree) if cell.degree >= 0 else 0 for cell in cells
    ]
    assert plan.rank == factors.rank == sum(counted)
    assert plan.details["cells"] == sum(cell.degree >= 0 for cell in cells)
    assert is_proved(problem, factors, 0.1)


def test_clusters_of_keys_cost_little():
    head = clustered(np.random.default_rng(1))
    problem, plan, factors = build(Cells(), head, 0.1)
    assert plan.details["split"] == "keys" and plan.rank <= 12
    assert METHODS["minimax"].plan(problem, 0.1, memory=2**28).rank > 5 * plan.rank
    assert head.error(factors.left, factors.right) <= factors.error_est


def test_clusters_of_queries_cost_little():
    rng = np.random.default_rng(2)
    ring = rng.normal(size=(200, 2))
    head = Head(0.5 * clustered(rng).k, ring / np.linalg.norm(ring, axis=1)[:, None], {"scale": 1.0})
    problem, plan, factors = build(Cells(), head, 0.1)
    assert plan.details["split"] == "queries" and plan.rank <= 6 and is_proved(problem, factors, 0.1)


def test_keys_nobody_looks_at_are_left_out():
    rng = np.random.default_rng(3)
    keys = np.vstack([5.0 + rng.normal(size=(5, 2)), -5.0 + rng.normal(size=(60, 2))])
    head = Head(2.0 + 0.5 * rng.normal(size=(70, 2)), keys, {"scale": 1.0})
    problem, plan, factors = build(Cells(), head, 0.1)
    assert plan.details["left_out"] >= 60 and plan.rank <= 5
    assert not factors.right[5:].any() and is_proved(problem, factors, 0.1)


def test_equal_keys_are_one_cell():
    head = Head(np.random.default_rng(0).normal(size=(7, 3)), np.ones((9, 3)), {})
    _, plan, factors = build(Cells(), head, 1e-6)
    assert plan.rank == 1 and head.error(factors.left, factors.right) <= 1e-13


def test_cells_have_their_own_dimension():
    """Keys on two crossing lines: one dimension a cell, two together."""
    rng = np.random.default_rng(4)
    along = rng.uniform(-1, 1, size=(80, 1))
    keys = np.vstack([[9.0, 0.0] + along[:40] * [1.0, 0.2], [-9.0, 3.0] + along[40:] * [0.3, 1.0]])
    head = Head(rng.uniform(-1, 1, size=(100, 2)), keys, {"scale": 1.0})
    problem, plan, factors = build(Cells(), head, 0.05)
    inner = [cell for cell in plan.state.cells if cell.degree > 0]
    assert inner and all(cell.dimension == 1 for cell in inner)
    assert is_proved(problem, factors, 0.05)


@pytest.mark.parametrize("n, m, d", [(1, 6, 2), (6, 1, 2), (1, 1, 1), (5, 6, 1)])
def test_edge_shapes(n, m, d):
    rng = np.random.default_rng(0)
    head = Head(3 * rng.normal(size=(n, d)), 3 * rng.normal(size=(m, d)), {})
    problem, plan, factors = build(Cells(), head, 0.2)
    assert plan.rank <= min(n, m) and is_proved(problem, factors, 0.2)


@given(st.integers(0, 4), st.sampled_from([0.5, 0.1, 0.01]))
def test_widest_passes_and_a_little_more_does_not(degree, target):
    width = widest(degree, target)
    assert minimax.fit(width, degree).rho_est <= target * (1 + 1e-6)
    assert minimax.fit(1.08 * width, degree).rho_est > target
    assert 0.98 * target <= coarse(target) <= target


def test_plans_are_the_same_every_time():
    head = clustered(np.random.default_rng(5))
    first, second = (build(Cells(), head, 0.1)[2] for _ in range(2))
    assert np.array_equal(first.left, second.left) and np.array_equal(first.right, second.right)


def test_refusals():
    side = np.linspace(0, 1, 4097)[:, None]
    assert (
        "splitting 4097 points" in Cells().plan(Head(side, side[:9], {}).problem(), 0.1, memory=2**40).refusal
    )
    head = clustered(np.random.default_rng(6))
    plan = Cells().plan(head.problem(), 0.1, memory=2**8)
    assert plan.rank and plan.refusal.startswith("needs")
    assert "below the rounding" in Cells().plan(head.problem(), 1e-15, memory=2**28).refusal


def test_method_is_registered():
    assert isinstance(METHODS["cells"], Cells)
