"""A head in the coordinates constructions like best: log P_ij = <query_i, key_j> + row_i + column_j on kept pairs."""

from typing import NamedTuple

import numpy as np

from rankcert.geometry import once_per_problem, visible
from rankcert.problem import AttentionProblem

__all__ = ["Levels", "read_levels", "recentre"]


class Levels(NamedTuple):
    """query (n, r), key (m, r): visible coordinates. row (n,); column (m,), -inf for keys no row keeps."""

    query: np.ndarray
    key: np.ndarray
    row: np.ndarray
    column: np.ndarray


@once_per_problem
def read_levels(problem: AttentionProblem) -> Levels:
    """The visible coordinates of `geometry.visible`, minus the log-normalisers, and the key biases."""
    x, seen = problem.inputs, visible(problem)
    # log_normaliser belongs to the logits as given, which exceed the centred ones by scale <q_i, centre>
    row = x.scale * (x.query @ seen.centre) - problem.log_normaliser if problem.n else np.empty(0)
    return Levels(seen.query, seen.key, row, np.where(x.kept_keys, x.key_bias, -np.inf))


def recentre(levels: Levels, query_centre: np.ndarray, key_centre: np.ndarray) -> Levels:
    """The same head about other centres: <x, z> = <x - c, z - e> + <x - c, e> + <c, z>."""
    query, key = levels.query - query_centre, levels.key - key_centre
    column = levels.column + levels.key @ query_centre
    return Levels(query, key, levels.row + query @ key_centre, column)
