"""The record of an approximant."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rankcert.checker.suprema import sup_error_bound

__all__ = ["Polynomial"]


@dataclass(frozen=True, eq=False)
class Polynomial:
    """p(x) = sum_a coefficients[a] x^a, meant for |x| <= half_width.

    rho_est: a good guess, never an enclosure, of the error rho there; `kind` says which one that is,
        "relative"  rho = max |p(x) e^-x - 1|
        "absolute"  rho = max |p(x) - e^(x - half_width)|, so that e^x is at most 1: an interval [-w, 0], w = 2
                    half_width, with powers about its middle, where they lose the fewest digits.
    """

    coefficients: np.ndarray
    half_width: float
    rho_est: float
    kind: str = "relative"

    @property
    def degree(self) -> int:
        return self.coefficients.size - 1

    @cached_property
    def sup_bound(self) -> float:
        """A proved upper bound of rho for exactly these float64 coefficients, within about 0.2 % of it.

        Computed by the checker when first asked for, which takes up to about half a second.
        """
        return sup_error_bound(self.coefficients, self.half_width, self.kind)
