"""Factorizations B_ij = omega_j p(y_ij - s_i) e^(s_i) / Z_i from one polynomial p near exp (THEORY.md, Lemma 6).

y_ij = <query_i, key_j> are the centred logits on the visible dimensions, s_i the mid-range of row i, omega_j = e^b_j
and Z_i = sum_j omega_j e^y_ij over the row's kept keys. With p(y - s) = sum_a g_a(s) y^a, the monomial features of
Lemma 5 separate i from j.
"""

from abc import abstractmethod
from typing import NamedTuple

import numpy as np

from rankcert.approximants.base import Polynomial
from rankcert.constructions.base import (
    Construction,
    Factorization,
    Plan,
    refuse_exponent,
    refuse_memory,
    refuse_rounding,
)
from rankcert.errors import CannotCertify
from rankcert.geometry import half_ranges, once_per_problem, visible
from rankcert.kernels.table import count_monomials, monomial_table
from rankcert.problem import AttentionProblem

__all__ = ["PolynomialConstruction", "Rows", "largest_bias", "measure_rows", "monomials", "shift_powers"]


class Rows(NamedTuple):
    """Per row: shift s_i, half-range W_i, and the logarithm of the row's factor, all (n,)."""

    shift: np.ndarray
    half_range: np.ndarray
    exponent: np.ndarray


class PolynomialConstruction(Construction):
    """A construction from a univariate approximant of exp; subclasses say which."""

    @staticmethod
    @abstractmethod
    def find_degree(half_width: float, target: float) -> int:
        """See rankcert.approximants."""

    @staticmethod
    @abstractmethod
    def fit(half_width: float, degree: int) -> Polynomial:
        """See rankcert.approximants."""

    @staticmethod
    def widest(target: float) -> float:
        """The largest half-width at which rounded coefficients still reach a target, if that is known beforehand."""
        return np.inf

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        refusal = refuse_rounding(problem, eps)
        if refusal:
            return Plan(None, refusal)
        rows = measure_rows(problem)
        half_width = float(rows.half_range.max(initial=0.0))
        dimension = visible(problem).dimension
        details: dict[str, int | float | str] = {"dimension": dimension, "half_range": half_width}
        target = min(1.0, eps - problem.rounding_est)
        try:
            degree = self.find_degree(half_width, target)
        except CannotCertify as reason:
            return Plan(None, str(reason), details)
        details["degree"] = degree
        rank = count_monomials(dimension, degree)
        refusal = refuse_memory((problem.n + problem.m) * rank, memory)
        if refusal:
            return Plan(rank, refusal, details)
        if half_width > self.widest(target):
            return Plan(
                rank,
                f"logit half-range W = {half_width:.4g} is beyond {self.widest(target):.4g}, the most float64 "
                f"coefficients carry at eps = {eps:g}",
                details,
            )
        refusal = refuse_exponent(float(rows.exponent.max(initial=0.0)))
        if refusal:
            return Plan(rank, refusal, details)
        try:
            return Plan(rank, None, details, self.fit(half_width, degree))
        except CannotCertify as reason:
            return Plan(rank, str(reason), details)

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        x, seen, rows = problem.inputs, visible(problem), measure_rows(problem)
        polynomial: Polynomial = plan.state
        left = monomials(seen.query, polynomial.degree)
        stop = 0
        powers = np.repeat(polynomial.coefficients[:, None], problem.n, axis=1)
        for a, row_factor in enumerate(shift_powers(powers, rows.shift) * np.exp(rows.exponent)):
            start, stop = stop, count_monomials(seen.dimension, a)
            left[:, start:stop] *= row_factor[:, None]
        right = monomials(seen.key, polynomial.degree)
        right *= np.exp(np.where(x.kept_keys, x.key_bias - largest_bias(problem), -np.inf))[:, None]
        return Factorization(left, right, self.name, plan.details, polynomial.rho_est)


@once_per_problem
def measure_rows(problem: AttentionProblem) -> Rows:
    x, seen = problem.inputs, visible(problem)
    shift, half_range = half_ranges(problem, seen)
    # log_normaliser belongs to the logits as given, which exceed the centred ones by scale <q_i, centre>
    log_z = problem.log_normaliser - x.scale * (x.query @ seen.centre)
    return Rows(shift, half_range, shift + largest_bias(problem) - log_z)


def largest_bias(problem: AttentionProblem) -> float:
    """Taken off the biases in `right` and put back in `left`, so that the weights e^b stay in range."""
    x = problem.inputs
    return float(x.key_bias.max(where=x.kept_keys, initial=-np.inf)) if problem.n else 0.0


def monomials(points: np.ndarray, degree: int) -> np.ndarray:
    """The features of Lemma 5, (points, C(r + degree, degree)), graded."""
    from rankcert.kernels.monomials import write_features  # here, so that Numba loads only when it is needed

    table = monomial_table(points.shape[1], degree)
    out = np.empty((points.shape[0], table.factor.size))
    write_features(points, table.runs, table.factor, out)
    return out


def shift_powers(coefficients: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """g (D + 1, n) with p_i(y - shift_i) = sum_a g[a, i] y^a, where p_i has coefficients[:, i]: synthetic division."""
    rows = coefficients.copy()
    for done in range(len(rows) - 1):
        for a in range(len(rows) - 2, done - 1, -1):
            rows[a] -= shift * rows[a + 1]
    return rows
