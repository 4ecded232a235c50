"""The part of P that a search looks at: some rows, some keys, perhaps keys summed into groups."""

from typing import NamedTuple

import numpy as np

from rankcert.problem import AttentionProblem

__all__ = ["Block", "open_block"]


class Block(NamedTuple):
    """attention (n', K) float64: rows `rows` of P, summed over the groups of keys that `groups` (m,) names, -1 none.

    Every row of it may see every key that has a group, so the block of a causal head has no hidden pairs.
    """

    attention: np.ndarray
    rows: np.ndarray
    groups: np.ndarray


def open_block(problem: AttentionProblem, first: int = 0) -> Block:
    """Rows from `first` on and the keys that all of them may see, each its own group; masked keys have none.

    Of equal queries only the first of the block is there.
    """
    x = problem.inputs
    rows = np.arange(first, problem.n)
    classes = problem.query_classes.of[rows]
    rows = rows[np.sort(np.unique(classes, return_index=True)[1])]
    keys = np.flatnonzero(x.kept_keys[: x.reach[first]])
    attention = problem.attention_rows(rows)[:, keys]
    keys, attention = keys[attention.max(axis=0) > 0.0], attention[:, attention.max(axis=0) > 0.0]
    groups = np.full(problem.m, -1, dtype=np.int64)
    groups[keys] = np.arange(keys.size)
    return Block(attention, rows, groups)
