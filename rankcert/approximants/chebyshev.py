"""The Chebyshev series of exp on [-w, 0], an additive error where the largest value is 1 (THEORY.md, Lemma 11).

With x = W (t - 1), w = 2W, it is the zonal series of dimension 2 at z = W: coefficients e^-W I_k(W) of 2 T_k(t), all
positive, so that the error is largest at x = 0, where it is the tail of the series. Its degree grows like
sqrt(W log(1/error)) where that of a relative approximant grows like W.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.polynomial.chebyshev import cheb2poly

from rankcert.approximants import gegenbauer
from rankcert.approximants.base import Polynomial
from rankcert.errors import CannotCertify

__all__ = ["WIDEST", "find_degree", "fit", "rounding_est"]

WIDEST = 64.0  # of W: powers about the middle of the interval cost e^(.42 W) of float64's digits


def rounding_est(half_width: float) -> float:
    """About what the rounding of coefficients in powers of x costs: sum |c_k| W^k <= e^((sqrt 2 - 1) W)."""
    return 2.0**-53 * math.exp((math.sqrt(2.0) - 1.0) * half_width)


def find_degree(half_width: float, target: float) -> int:
    """The smallest D >= 0 whose series has error at most `target`; W up to 1e8."""
    return gegenbauer.find_degree(2, half_width, target)


@lru_cache(maxsize=64)
def fit(half_width: float, degree: int) -> Polynomial:
    """The series of this degree, in powers of x + W on [-2W, 0]; kind "absolute". CannotCertify for W > WIDEST."""
    if half_width > WIDEST:
        raise CannotCertify(
            f"logit half-range W = {half_width:.4g} is beyond {WIDEST:g}, the most a Chebyshev series in powers carries"
        )
    if half_width == 0.0:
        return Polynomial(np.eye(1, degree + 1)[0], half_width, 0.0, "absolute")
    series = gegenbauer.fit(2, half_width, degree)
    powers = np.zeros(degree + 1)
    powers[: series.coefficients.size] = cheb2poly(series.coefficients)
    coefficients = powers / float(half_width) ** np.arange(degree + 1.0)
    coefficients.flags.writeable = False  # the cache shares it
    return Polynomial(coefficients, half_width, series.rho_est + rounding_est(half_width), "absolute")
