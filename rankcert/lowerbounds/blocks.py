"""The part of P that a search looks at: some rows, some keys, perhaps keys summed into groups (LOWERBOUNDS.md, L3)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rankcert.problem import AttentionProblem

__all__ = ["Block", "open_block", "try_splits"]

ARRAYS = 8  # of rows x groups float64 numbers that a search on a block holds
PROFILE = 256  # rows by which keys are told apart
ROUNDS = 3  # of Lloyd's algorithm
HEIGHT = 64  # rows of P made at once
FIRST_POINTS, REFINEMENTS = 5, 2  # of the split under a causal mask


class Block(NamedTuple):
    """attention (n', K) float64: rows `rows` of P, summed over the groups of keys that `groups` (m,) names, -1 none.

    Every row of it may see every key that has a group, so the block of a causal head has no hidden pairs.
    """

    attention: np.ndarray
    rows: np.ndarray
    groups: np.ndarray


def open_block(problem: AttentionProblem, first: int, side: int, memory: int, seed: int) -> Block:
    """Rows from `first` on and the keys that all of them may see, at most `side` rows and groups of keys.

    Fewer where `memory` bytes hold no more. Of equal queries only the first of the block is there. Up to `side` keys
    are groups of their own, more are clustered; masked keys have none.
    """
    random = np.random.default_rng(seed)
    side = max(1, min(side, int((memory / (8 * ARRAYS)) ** 0.5)))
    x = problem.inputs
    rows = np.arange(first, problem.n)
    rows = rows[np.sort(np.unique(problem.query_classes.of[rows], return_index=True)[1])]
    if rows.size > side:
        rows = np.sort(random.choice(rows, side, replace=False))
    keys = np.flatnonzero(x.kept_keys[: x.reach[first]])
    sample = rows[np.linspace(0, rows.size - 1, min(rows.size, PROFILE)).astype(np.int64)]
    labels = np.arange(keys.size)
    if keys.size > side:
        labels = _cluster(_gather(problem, sample, keys, np.arange(keys.size), np.float32), side, random)
    attention = _gather(problem, rows, keys, labels, np.float64)
    groups = np.full(problem.m, -1, dtype=np.int64)
    groups[keys] = labels
    return Block(attention, rows, groups)


def _gather(problem: AttentionProblem, rows, keys, labels, dtype) -> np.ndarray:
    """P at these rows and keys, summed over equal labels 0, 1, .., all of which occur."""
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    out = np.empty((rows.size, starts.size), dtype)
    for start in range(0, rows.size, HEIGHT):
        tile = problem.attention_rows(rows[start : start + HEIGHT])[:, keys[order]]
        out[start : start + HEIGHT] = np.add.reduceat(tile, starts, axis=1)
    return out


def _cluster(profiles: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """At most `count` groups of columns (rows, m) that point in like directions: labels 0, 1, .., all used."""
    mass = profiles.sum(axis=0, dtype=np.float64)
    points = (profiles / np.maximum(mass, np.finfo(np.float32).tiny)).T.astype(np.float32)
    points /= np.maximum(np.sqrt((points**2).sum(axis=1, keepdims=True)), np.float32(1e-30))
    likely = np.flatnonzero(mass > 0.0)
    centres = points[random.choice(likely, min(count, likely.size), replace=False)]
    for turn in range(ROUNDS):
        labels = np.concatenate(
            [(points[at : at + 4096] @ centres.T).argmax(axis=1) for at in range(0, len(points), 4096)]
        )
        if turn + 1 < ROUNDS:
            order = np.argsort(labels, kind="stable")
            starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
            centres = np.add.reduceat(points[order], starts, axis=0)
            centres /= np.maximum(np.sqrt((centres**2).sum(axis=1, keepdims=True)), np.float32(1e-30))
    return np.unique(labels, return_inverse=True)[1]


def try_splits(problem: AttentionProblem, visit: Callable[[int], Any]) -> None:
    """Call visit(first row of a block), which returns its merit, larger is better, for the blocks worth a try.

    Only row 0 unless the head is causal; else a few rows, and then rows halfway between the best and its neighbours.
    """
    if not problem.inputs.causal:
        visit(0)
        return
    merits: dict[int, Any] = {}
    last = problem.n - 1
    gap = last / (FIRST_POINTS + 1)
    points = [round(gap * (i + 1)) for i in range(FIRST_POINTS)]
    for _ in range(REFINEMENTS + 1):
        for point in points:
            if 0 <= point <= last and point not in merits:
                merits[point] = visit(point)
        gap /= 2
        best = max(merits, key=lambda point: merits[point])
        points = [round(best - gap), round(best + gap)]
