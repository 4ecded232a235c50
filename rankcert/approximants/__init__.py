"""Functions of one variable close to exp, as small records with a proved distance from it.

    base.py         Polynomial: coefficients, interval, kind of error, `sup_bound` proved by the checker when asked
    taylor.py       relative error on [-W, W]; degrees by a formula, for any W
    minimax.py      relative error on [-W, W]; the smallest degrees there are, by the Remez exchange
    chebyshev.py    absolute error on [-2W, 0]; degrees like sqrt(W)
    gegenbauer.py   the zonal series on spheres of any dimension, absolute error

The first three offer find_degree(half_width, target) -> int and fit(half_width, degree) -> Polynomial, and raise
CannotCertify naming the number and the limit where float64 does not carry them.
"""
