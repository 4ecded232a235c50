"""Compiled loops of the producing side, each with a plain twin.

    table.py        counting monomials and the order they are written in (no loops worth compiling)
    monomials.py    Numba: rows of monomial features
    rowspread.py    Numba: row extremes of a matrix while rank-one terms are taken off it
    reference.py    the same two functions in plain NumPy, same signatures, same results bit for bit

Numba is loaded by importing `monomials` or `rowspread` and by nothing else. Nothing here is trusted by a verdict.
"""
