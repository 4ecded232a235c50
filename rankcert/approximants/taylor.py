"""The Taylor polynomial of exp at 0 (THEORY.md, Lemma 7)."""

import math

import numpy as np

from rankcert.approximants.base import Polynomial
from rankcert.errors import CannotCertify

__all__ = ["LARGEST_DEGREE", "find_degree", "fit"]

LARGEST_DEGREE = 100  # beyond it powers and factorials leave the range in which float64 factors make sense


def _log_error(half_width: float, degree: int) -> float:
    """log of e^W W^(D+1) / (D+1)!, Lagrange's bound on the relative error."""
    k = float(degree + 1)
    return half_width + k * math.log(half_width) - math.lgamma(k + 1.0)


def find_degree(half_width: float, target: float) -> int:
    """The smallest D >= 0 with e^W W^(D+1) / (D+1)! <= target, for any W >= 0 and 0 < target <= 1.

    In logarithms and by bisection, so that it counts for any W what no computer could build. Lagrange's bound
    exceeds 1 until D + 1 > W and decreases from there on.
    """
    if half_width == 0.0:
        return 0
    wanted = math.log(target)
    refused, accepted = -1, 1
    while _log_error(half_width, accepted) > wanted:
        refused, accepted = accepted, 2 * accepted
    # Invariant: `accepted` reaches the target, `refused` and everything below do not.
    while accepted - refused > 1:
        middle = (accepted + refused) // 2
        if _log_error(half_width, middle) <= wanted:
            accepted = middle
        else:
            refused = middle
    return accepted


def fit(half_width: float, degree: int) -> Polynomial:
    """Coefficients 1/k! up to `degree`; `rho_est` is Lagrange's bound. Raises CannotCertify beyond LARGEST_DEGREE."""
    if degree > LARGEST_DEGREE:
        raise CannotCertify(
            f"Taylor degree {degree} is beyond {LARGEST_DEGREE}, the most float64 factors carry"
        )
    coefficients = np.array([1.0 / math.factorial(k) for k in range(degree + 1)])
    rho = math.exp(_log_error(half_width, degree)) if half_width else 0.0
    return Polynomial(coefficients, half_width, rho)
