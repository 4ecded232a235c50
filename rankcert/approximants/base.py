"""The record of an approximant."""

from dataclasses import dataclass

import numpy as np

__all__ = ["Polynomial"]


@dataclass(frozen=True, eq=False)
class Polynomial:
    """p(x) = sum_a coefficients[a] x^a, meant for |x| <= half_width.

    `rho_est` estimates max |p(x) e^-x - 1| there. It is a guess of good quality, not an enclosure: what a
    factorization built from p is worth is for the checker to say.
    """

    coefficients: np.ndarray
    half_width: float
    rho_est: float

    @property
    def degree(self) -> int:
        return self.coefficients.size - 1
