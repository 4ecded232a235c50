"""e^(z (t - 1)) = sum_l a_l(z) C_l(t) on [-1, 1]: the zonal series on the sphere of R^dim (THEORY.md, Lemma 12).

C_l is the Gegenbauer polynomial of index v = dim/2 - 1 (dim = 3: Legendre; dim = 2: T_l, that is cos(l angle)), and

    a_l(z) = e^-z Gamma(v) (2/z)^v (v + l) I_(v+l)(z) > 0,     dim = 2: e^-z (2 - [l = 0]) I_l(z).

Everything carries the factor e^-z, so that the a_l C_l(1) are positive and sum to 1: whatever a truncation leaves out
is its error at t = 1, exactly the largest there is.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rankcert.checker.suprema import series_error_bound
from rankcert.errors import CannotCertify, InvalidInput

__all__ = ["LARGEST_Z", "Series", "coefficients", "find_degree", "fit", "tail_est", "values_at_one"]

LARGEST_Z = 1e8  # the degrees grow with its square root
NEGLIGIBLE = 1e-20  # of the target: where the forward summation of a tail stops


@dataclass(frozen=True, eq=False)
class Series:
    """sum_l coefficients[l] C_l(t) for |t| <= 1; `rho_est` estimates rho = max |series - e^(z (t - 1))| there."""

    coefficients: np.ndarray
    dim: int
    z: float
    rho_est: float

    @property
    def degree(self) -> int:
        return self.coefficients.size - 1

    @cached_property
    def sup_bound(self) -> float:
        """A proved upper bound of rho for exactly these float64 coefficients (inf for z or degree above 4096)."""
        return series_error_bound(self.coefficients, self.dim, self.z)


def fit(dim: int, z: float, degree: int) -> Series:
    """The series cut after C_degree."""
    return Series(coefficients(dim, z, degree), dim, z, tail_est(dim, z, degree))


def find_degree(dim: int, z: float, target: float) -> int:
    """The smallest L >= 0 whose tail is at most `target`, an absolute error where the function's maximum is 1."""
    return int(np.argmax(_tails(dim, z, target) <= target))


def tail_est(dim: int, z: float, degree: int) -> float:
    """sum over l > degree of a_l C_l(1), summed from the small end."""
    tails = _tails(dim, z, np.finfo(float).tiny, degree + 2)
    return float(tails[degree])


def coefficients(dim: int, z: float, degree: int) -> np.ndarray:
    """a_0..a_degree."""
    return np.exp(_log_coefficients(dim, z, degree + 1))


def values_at_one(dim: int, degree: int) -> np.ndarray:
    """C_0(1)..C_degree(1) as floats (inf where they are larger)."""
    return np.exp(_log_values_at_one(dim, degree + 1))


def _tails(dim: int, z: float, target: float, count: int = 32) -> np.ndarray:
    """tails[L] = sum over l > L of a_l C_l(1), for all L until it is far below the target."""
    while True:
        terms = np.exp(_log_coefficients(dim, z, count) + _log_values_at_one(dim, count))
        # all terms sum to 1 and are unimodal in l, so that small ones after the larger half stay small
        if terms[-1] <= NEGLIGIBLE * target and terms.sum() > 0.5:
            return np.append(np.cumsum(terms[:0:-1])[::-1], 0.0)
        count *= 2


def _log_coefficients(dim: int, z: float, count: int) -> np.ndarray:
    from scipy.special import gammaln, hyp0f1, ive  # here, so that nothing else waits for it

    if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or dim < 2:
        raise InvalidInput(f"dim must be an integer >= 2, got {dim!r}")
    if not z >= 0.0:
        raise InvalidInput(f"z must be a number >= 0, got {z!r}")
    if z > LARGEST_Z:
        raise CannotCertify(f"z = {z:.4g} is beyond {LARGEST_Z:g}, up to which zonal series are offered")
    index, l = dim / 2 - 1, np.arange(count, dtype=float)  # noqa: E741
    order = index + l
    with np.errstate(divide="ignore"):
        if dim == 2:
            lead = (
                l * np.log(z / 2) - gammaln(l + 1) + np.log(2.0) if z else np.where(l, -np.inf, np.log(2.0))
            )
            lead[0] = 0.0
        else:  # (z/2)^l / (v (v + 1) .. (v + l - 1)), times 0F1(v + l + 1, z^2 / 4)
            lead = l * np.log(z / 2) if z else np.where(l, -np.inf, 0.0)
            lead[0] = 0.0
            lead = lead + gammaln(index) - gammaln(order)
        small = np.minimum(z, z * z / (4 * order + 4)) < 600.0
        out = np.empty(count)
        out[small] = lead[small] + np.log(hyp0f1(order[small] + 1, z * z / 4)) - z
        large = ~small
        scaled = np.log(ive(order[large], z))
        if dim == 2:
            out[large] = scaled + np.where(l[large], np.log(2.0), 0.0)
        else:
            out[large] = scaled + gammaln(index) + index * np.log(2 / z if z else 1.0) + np.log(order[large])
    return out


def _log_values_at_one(dim: int, count: int) -> np.ndarray:
    from scipy.special import gammaln

    l = np.arange(count, dtype=float)  # noqa: E741
    return np.zeros(count) if dim == 2 else gammaln(l + dim - 2) - gammaln(l + 1) - gammaln(dim - 2)
