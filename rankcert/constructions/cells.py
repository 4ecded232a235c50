"""Keys (or queries) split into cells, each with a polynomial of its own (CONSTRUCTIONS.md, C3 and C4)."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rankcert.approximants import minimax
from rankcert.constructions.base import (
    LARGEST_EXPONENT,
    Construction,
    Factorization,
    Plan,
    refuse_memory,
    refuse_rounding,
)
from rankcert.constructions.levels import read_levels
from rankcert.constructions.polynomial import monomials, shift_powers
from rankcert.geometry import once_per_problem
from rankcert.kernels.table import count_monomials
from rankcert.problem import AttentionProblem

__all__ = ["Cells", "coarse", "widest"]

LARGEST_SIDE = 4096  # points to split: the tree has twice as many cells, and every row visits them all
LARGEST_DEGREE = 10
GUESSES = 8  # at the largest width a degree reaches
LARGEST_WIDTH = 10.0  # half-range of a cell
SHARES = (1.0, 0.6)  # of eps for the polynomials; the rest pays for cells that are left out
FLAT = 1e-11  # singular values below this share of the largest are rounding
BLOCK_ENTRIES = 2**20


class _Side(NamedTuple):
    """P with the points to split as columns, or P^T: log entry = <rows_i, points_j> + level_i + weight_j if kept.

    `index` (points,) says which keys (queries) the points are; `reach` is None unless causal; `transposed` when
    the points are queries. Columns of `rows` have length one, so that Euclid's metric measures logits.
    """

    rows: np.ndarray
    points: np.ndarray
    level: np.ndarray
    weight: np.ndarray
    index: np.ndarray
    reach: np.ndarray | None
    transposed: bool


class _Level(NamedTuple):
    """The nodes of one depth of the tree, from left to right.

    starts: where each begins in the order of the leaves. children: its first child among the nodes one deeper.
    dimension: rank of its centred points. top: their largest weight. half_range: the largest of a row's logits on
    it. exponent: the largest logarithm of a row's factor.
    """

    starts: np.ndarray
    children: np.ndarray
    dimension: np.ndarray
    top: np.ndarray
    half_range: np.ndarray
    exponent: np.ndarray


class _Tree(NamedTuple):
    """A side with its points sorted so that every cell is a run of them, and the depths of the tree, root first."""

    side: _Side
    levels: list[_Level]


class _Cell(NamedTuple):
    """Points start..stop of a tree; `degree` -1 leaves them out. `half_width`: what its polynomial is fitted for."""

    start: int
    stop: int
    dimension: int
    degree: int
    half_width: float

    @property
    def rank(self) -> int:
        return count_monomials(self.dimension, self.degree) if self.degree >= 0 else 0


class _Choice(NamedTuple):
    tree: _Tree
    cells: list[_Cell]
    error_est: float

    @property
    def rank(self) -> int:
        return sum(cell.rank for cell in self.cells)


class Cells(Construction):
    """Ranks of cells add up: C(r_c + D_c, D_c) for a cell's own dimension and degree, 1 for a single key.

    The points are parted again and again along the direction in which their logits vary most, down to single ones; the
    cheapest pruning of that tree is found by counting. Cells of keys with too little weight in every row to
    matter are left out.
    """

    name = "cells"
    lemma = "CONSTRUCTIONS.md, C3 and C4"

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        refusal = refuse_rounding(problem, eps)
        if refusal:
            return Plan(None, refusal)
        if not problem.n:
            return Plan(0, "there are no queries")
        largest = max(problem.n, problem.m)
        if largest > LARGEST_SIDE:
            return Plan(
                None, f"splitting {largest} points takes minutes; there may be {LARGEST_SIDE} at most"
            )
        target = eps - problem.rounding_est
        choices = [
            _choose(tree, target, share)
            for tree in _grow_trees(problem)
            for share in (SHARES[:1] if tree.side.transposed else SHARES)
        ]
        choice = min(choices, key=lambda option: option.rank)
        kept = [cell for cell in choice.cells if cell.degree >= 0]
        details: dict[str, int | float | str] = {
            "split": "queries" if choice.tree.side.transposed else "keys",
            "cells": len(kept),
            "largest_degree": max((cell.degree for cell in kept), default=0),
            "left_out": sum(cell.stop - cell.start for cell in choice.cells if cell.degree < 0),
        }
        refusal = refuse_memory((problem.n + problem.m) * choice.rank, memory)
        return Plan(choice.rank, refusal, details, choice)

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        choice: _Choice = plan.state
        side = choice.tree.side
        of_rows = np.zeros((side.rows.shape[0], choice.rank))
        of_points = np.zeros((problem.n if side.transposed else problem.m, choice.rank))
        stop = 0
        for cell in choice.cells:
            start, stop = stop, stop + cell.rank
            if start < stop:
                row_part, point_part = _factor_cell(side, cell)
                of_rows[:, start:stop] = row_part
                of_points[side.index[cell.start : cell.stop], start:stop] = point_part
        left, right = (of_points, of_rows) if side.transposed else (of_rows, of_points)
        return Factorization(left, right, self.name, plan.details, choice.error_est)


def coarse(target: float) -> float:
    """A tolerance at most a hundredth below the target (and below 1), of which there are few."""
    target = min(target, 0.99)
    return math.floor(target * 10 ** (2 - math.floor(math.log10(target)))) / 10 ** (
        2 - math.floor(math.log10(target))
    )


@lru_cache(maxsize=512)
def widest(degree: int, target: float) -> float:
    """A half-width W on which the minimax polynomial of this degree is relatively within `target` < 1.

    The largest one up to a few hundredths, and at most LARGEST_WIDTH.
    """
    width = float(np.arctanh(target)) * (1.0 - 1e-9)  # Lemma 8: tanh W at degree 0
    if degree == 0:
        return min(width, LARGEST_WIDTH)
    best = widest(degree - 1, target)
    tried = min(best * (1.0 + 1.2 / degree), LARGEST_WIDTH)
    for _ in range(GUESSES):
        with np.errstate(invalid="ignore", divide="ignore"):  # errors below rounding have no shape
            rho = minimax.fit(tried, degree).rho_est
        if rho <= target:
            best = max(best, tried)
            if rho >= 0.94 * target or tried == LARGEST_WIDTH:
                break
        # rho is nearly a multiple of W^(degree + 1)
        tried = min(tried * (0.97 * target / max(rho, 1e-300)) ** (1.0 / (degree + 1)), LARGEST_WIDTH)
        if not tried > best:
            break
    return best


@once_per_problem
def _grow_trees(problem: AttentionProblem) -> list[_Tree]:
    """One over the keys, one over the queries."""
    x, levels = problem.inputs, read_levels(problem)
    reach = x.reach if x.causal else None
    queries, keys = np.arange(problem.n), np.flatnonzero(x.kept_keys)
    trees = []
    for rows, points, level, weight, index, transposed in (
        (levels.query, levels.key[keys], levels.row, levels.column[keys], keys, False),
        (levels.key, levels.query, levels.column, levels.row, queries, True),
    ):
        lengths = np.sqrt((rows * rows).sum(axis=0))
        lengths[lengths == 0.0] = 1.0
        points = points * lengths
        order, depths = _bisect(points)
        side = _Side(rows / lengths, points[order], level, weight[order], index[order], reach, transposed)
        trees.append(_Tree(side, _measure(side, depths)))
    return trees


def _bisect(points: np.ndarray) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """An order of the points, and for each depth where its nodes begin in it and their dimensions."""
    order = np.arange(points.shape[0])
    starts, depths = np.array([0]), []
    while True:
        stops = np.append(starts[1:], order.size)
        dimension, following = np.zeros(starts.size, dtype=np.int64), []
        for node, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            following.append(start)
            if stop - start > 1:
                members = order[start:stop]
                centred = points[members] - points[members].mean(axis=0)
                _, values, directions = np.linalg.svd(centred, full_matrices=False)
                dimension[node] = _count(values, np.abs(points[members]).max(initial=0.0))
                if dimension[node]:
                    along = centred @ directions[0]
                    along *= np.sign(
                        directions[0][np.argmax(np.abs(directions[0]))]
                    )  # whatever sign LAPACK chose
                    sequence = np.argsort(along, kind="stable")
                    order[start:stop] = members[sequence]
                    following.append(start + _cut(along[sequence]))
        depths.append((starts, dimension))
        if len(following) == starts.size:
            return order, depths
        starts = np.array(following)


def _cut(along: np.ndarray) -> int:
    """How many of these ascending, centred numbers to part off: the best two means with a quarter on either side."""
    before = np.arange(1, along.size)
    gain = np.cumsum(along)[:-1] ** 2 * (1.0 / before + 1.0 / (along.size - before))
    gain[: (along.size - 1) // 4] = gain[along.size - 1 - (along.size - 1) // 4 :] = -1.0
    return int(np.argmax(gain)) + 1


def _count(values: np.ndarray, size: float) -> int:
    return int(np.count_nonzero(values > FLAT * max(values[0], size))) if values.size else 0


def _measure(side: _Side, depths: list[tuple[np.ndarray, np.ndarray]]) -> list[_Level]:
    """One pass over all pairs: extremes of each row's logits on the deepest nodes, then on their parents, and so on."""
    shapes = []
    for (starts, dimension), (deeper, _) in zip(depths, [*depths[1:], depths[-1]], strict=True):
        top = np.maximum.reduceat(side.weight, starts)
        unknown = np.zeros(starts.size), np.full(starts.size, -np.inf)
        shapes.append(_Level(starts, np.searchsorted(deeper, starts), dimension, top, *unknown))
    for rows, logits, hidden in _blocks(side):
        low = high = logits
        if hidden is not None:
            low, high = np.where(hidden, np.inf, logits), np.where(hidden, -np.inf, logits)
        kept = side.level[rows] > -np.inf
        low, high, level = low[kept], high[kept], side.level[rows][kept, None]
        for depth in range(len(shapes) - 1, -1, -1):
            shape = shapes[depth]
            first = shape.children if depth < len(shapes) - 1 else shape.starts
            if first.size < low.shape[1]:
                low = np.minimum.reduceat(low, first, axis=1)
                high = np.maximum.reduceat(high, first, axis=1)
            with np.errstate(invalid="ignore"):
                wide, middle = (high - low) / 2, (high + low) / 2 + level
            if hidden is not None:
                wide[low > high], middle[low > high] = 0.0, -np.inf
            np.maximum(shape.half_range, wide.max(axis=0, initial=0.0), out=shape.half_range)
            np.maximum(shape.exponent, middle.max(axis=0, initial=-np.inf) + shape.top, out=shape.exponent)
    return shapes


def _blocks(side: _Side) -> Iterator[tuple[slice, np.ndarray, np.ndarray | None]]:
    """(rows, their logits on all points, which of those pairs a causal mask hides)"""
    height = max(1, BLOCK_ENTRIES // max(1, side.points.shape[0]))
    for start in range(0, side.rows.shape[0], height):
        rows = slice(start, min(start + height, side.rows.shape[0]))
        yield rows, side.rows[rows] @ side.points.T, _hidden(side, rows, slice(None))


def _hidden(side: _Side, rows: slice, points: slice) -> np.ndarray | None:
    if side.reach is None:
        return None
    if side.transposed:
        return np.arange(rows.start, rows.stop)[:, None] >= side.reach[side.index[points]]
    return side.index[points] >= side.reach[rows, None]


def _choose(tree: _Tree, target: float, share: float) -> _Choice:
    """The cheapest pruning with polynomials within share * target, and what may be left out for the rest."""
    chosen = [_count_nodes(tree, level, coarse(share * target)) for level in tree.levels]
    total = chosen[-1][0].astype(float)
    splits = [np.zeros(total.size, dtype=bool)]
    for depth in range(len(chosen) - 2, -1, -1):
        below = np.add.reduceat(total, tree.levels[depth].children)
        own = chosen[depth][0]
        splits.insert(0, own > below)
        total = np.minimum(own, below)
    cells: list[_Cell] = []
    _collect(tree, chosen, splits, coarse(share * target), cells)
    cells.sort()
    if tree.side.transposed:
        return _Choice(tree, cells, max(_rho(cell) for cell in cells))
    return _leave_out(tree, cells, target)


def _count_nodes(tree: _Tree, level: _Level, target: float) -> tuple[np.ndarray, np.ndarray]:
    """The rank of each node as one cell and its degree; infinite where single points are no dearer or it cannot be."""
    size = np.diff(np.append(level.starts, tree.side.points.shape[0]))
    cost, degree = np.full(size.size, np.inf), np.zeros(size.size, dtype=np.int64)
    rank = np.ones(size.size)  # of the degree tried, if nothing else
    pending = level.exponent <= LARGEST_EXPONENT
    pending |= size == 1
    for tried in range(LARGEST_DEGREE + 1):
        if tried:
            rank *= (level.dimension + tried) / tried
        pending &= (rank < size) | (size == 1)
        if not pending.any():
            break
        fits = pending & (level.half_range <= widest(tried, target))
        cost[fits], degree[fits] = np.rint(rank[fits]), tried
        pending &= ~fits
    return cost, degree


def _collect(tree: _Tree, chosen, splits, target: float, cells: list[_Cell]) -> None:
    pending = [(0, 0)]
    while pending:
        depth, node = pending.pop()
        level = tree.levels[depth]
        if splits[depth][node]:
            below = tree.levels[depth].children
            stop = below[node + 1] if node + 1 < below.size else tree.levels[depth + 1].starts.size
            pending.extend((depth + 1, child) for child in range(below[node], stop))
            continue
        stop = level.starts[node + 1] if node + 1 < level.starts.size else tree.side.points.shape[0]
        degree = int(chosen[depth][1][node])
        width = widest(degree, target) if degree else float(level.half_range[node])
        dimension = int(level.dimension[node]) if degree else 0
        cells.append(_Cell(int(level.starts[node]), int(stop), dimension, degree, width))


def _rho(cell: _Cell) -> float:
    if cell.degree <= 0:
        return float(np.tanh(cell.half_width)) if cell.degree == 0 else 1.0
    return minimax.fit(cell.half_width, cell.degree).rho_est


def _leave_out(tree: _Tree, cells: list[_Cell], target: float) -> _Choice:
    """Drop cells, those with least weight per rank first, as long as every row's error stays within the target."""
    side = tree.side
    starts = np.array([cell.start for cell in cells])
    mass = np.empty((side.rows.shape[0], starts.size))
    for rows, logits, hidden in _blocks(side):
        logits += side.weight + side.level[rows, None]
        np.exp(logits, out=logits)
        if hidden is not None:
            logits[hidden] = 0.0
        mass[rows] = np.add.reduceat(logits, starts, axis=1)
    rho = {(cell.degree, cell.half_width): _rho(cell) for cell in cells}
    kept_error = np.array([rho[cell.degree, cell.half_width] for cell in cells])
    error = mass @ kept_error
    mass *= 1.0 - kept_error
    most = mass.max(axis=0)
    for c in np.argsort(most / np.array([cell.rank for cell in cells]), kind="stable"):
        if most[c] > target:
            continue
        dropped = error + mass[:, c]
        if dropped.max() <= target:
            error, cells[c] = dropped, cells[c]._replace(degree=-1)
    return _Choice(tree, cells, float(error.max()))


def _factor_cell(side: _Side, cell: _Cell) -> tuple[np.ndarray, np.ndarray]:
    """C3's two factors of one cell, over all rows and over its points."""
    run = slice(cell.start, cell.stop)
    points, rows = side.points[run], side.rows
    centre = points.mean(axis=0)
    logits = rows @ (points - centre).T
    hidden = _hidden(side, slice(0, rows.shape[0]), run)
    everywhere = True if hidden is None else ~hidden
    low = logits.min(axis=1, where=everywhere, initial=np.inf)
    high = logits.max(axis=1, where=everywhere, initial=-np.inf)
    seen = high >= low
    shift = np.add(high, low, where=seen, out=np.zeros_like(low)) / 2
    top = side.weight[run].max()
    factor = np.where(seen, np.exp(side.level + rows @ centre + shift + top), 0.0)
    weight = np.exp(side.weight[run] - top)
    if cell.degree == 0:
        return factor[:, None] / np.cosh(cell.half_width), weight[:, None]
    _, _, directions = np.linalg.svd(points - centre, full_matrices=False)
    directions = directions[: cell.dimension].T
    coefficients = minimax.fit(cell.half_width, cell.degree).coefficients
    powers = np.repeat(coefficients[:, None], shift.size, axis=1)
    left = monomials(np.ascontiguousarray(rows @ directions), cell.degree)
    right = monomials(np.ascontiguousarray((points - centre) @ directions), cell.degree)
    stop = 0
    for a, row_factor in enumerate(shift_powers(powers, shift) * factor):
        start, stop = stop, count_monomials(cell.dimension, a)
        left[:, start:stop] *= row_factor[:, None]
    return left, right * weight[:, None]
