"""Proved lower bounds on the eps-rank: searches for witnesses, which the checker then judges (LOWERBOUNDS.md).

    bernstein.py    rows S and weights G for which P_S G has a small inverse: the strong one
    leakage.py      rows that put most of their mass on keys of their own: one pass over heads of any length

A search returns a `Found`, integers only; whether it proves anything is for `rankcert.checker` to say.
"""

from rankcert.lowerbounds.bernstein import find_bernstein, sweep_bernstein
from rankcert.lowerbounds.leakage import FoundLeakage, find_leakage
from rankcert.lowerbounds.witness import Found

__all__ = ["WITNESSES", "Found", "FoundLeakage", "find_bernstein", "find_leakage", "sweep_bernstein"]

WITNESSES = ("bernstein", "leakage")  # kinds, in the order in which they are looked for
