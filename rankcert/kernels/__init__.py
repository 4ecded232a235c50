"""Compiled loops of the producing side, each with a plain twin.

    table.py        counting monomials and the order they are written in (no loops worth compiling)
    monomials.py    Numba: rows of monomial features
    rowspread.py    Numba: row extremes of a matrix while rank-one terms are taken off it
    reflect.py      Numba: one row-wise half of a splitting step
    prefix.py       Numba: least squares of every row over its own prefix of a basis
    streaming.py    Numba: row errors, and pulls towards l1 balls, of one tile of P
    reference.py    the same functions in plain NumPy, same signatures; of monomials and rowspread bit for bit the same

Numba is loaded by importing a compiled one and by nothing else. Nothing here is trusted by a verdict.
"""

__all__ = ["REORDERED"]

# For loops without exponentials whose sums may be taken in any order, so that they vectorise. Infinities and NaN keep
# their meaning.
REORDERED = {"reassoc", "nsz", "contract", "arcp"}
