"""How many monomials there are, and a table by which each is one product away from an earlier one."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

__all__ = ["MonomialTable", "count_monomials", "monomial_table"]


def count_monomials(variables: int, degree: int) -> int:
    """Monomials of total degree at most `degree`: C(variables + degree, degree), exact whatever its size."""
    return math.comb(variables + degree, variables)


class MonomialTable(NamedTuple):
    """The R monomials of total degree <= D in r variables, graded; number 0 is the constant 1.

    runs: (r D, 4) uint64, rows (start, stop, parent, variable): feature start + c is feature parent + c, times
        the variable, times factor[start + c]. Every run reads left of where it writes. (Unsigned, so that the
        compiled loop need not look for negative indices.)
    factor: (R,) float64. degree: (R,) int64, ascending.
    """

    runs: np.ndarray
    factor: np.ndarray
    degree: np.ndarray


@lru_cache(maxsize=8)
def monomial_table(variables: int, degree: int) -> MonomialTable:
    """The table for features sqrt(|alpha|! / alpha!) x^alpha, |alpha| <= degree (THEORY.md, Lemma 5).

    Within a degree the monomials are grouped by their first variable. So those of degree a with first variable v
    are x_v times the monomials of degree a - 1 with first variable >= v: source and target are contiguous.
    """
    runs = []
    power = np.zeros(count_monomials(variables, degree))  # of the monomial in its first variable
    factor = np.ones_like(power)
    order = np.zeros(power.size, dtype=np.int64)
    group = [0] * (
        variables + 1
    )  # in the degree done last, where first variable >= v begins, v = 0..variables
    stop = 1
    for a in range(1, degree + 1):
        parents, end, group = group, stop, []
        for v in range(variables):
            start, parent = stop, parents[v]
            stop = start + end - parent
            runs.append((start, stop, parent, v))
            group.append(start)
            power[start:stop] = 1.0
            shared = parents[v + 1] - parent  # parents whose own first variable is v
            power[start : start + shared] += power[parent : parent + shared]
            factor[start:stop] = np.sqrt(a / power[start:stop])
            order[start:stop] = a
        group.append(stop)
    table = MonomialTable(np.array(runs, dtype=np.uint64).reshape(-1, 4), factor, order)
    for array in table:
        array.flags.writeable = False  # the cache shares them between callers
    return table
