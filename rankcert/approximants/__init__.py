"""Polynomials p close to exp on [-W, W] in the relative norm max |p(x) e^-x - 1| (THEORY.md, Lemma 6).

    base.py     the record both methods return
    taylor.py   degrees by a formula, for any W
    minimax.py  the smallest degrees there are, by the Remez exchange in float64, for W <= 10

Both modules offer find_degree(half_width, target) -> int and fit(half_width, degree) -> Polynomial, and raise
CannotCertify with a readable reason where float64 does not carry them.
"""
