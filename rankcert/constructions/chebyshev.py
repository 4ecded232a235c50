"""Attention as polynomials of the logits that are absolutely close to exp, one a row (THEORY.md, Lemma 11).

    B_ij = omega_j p_i(y_ij - s_i) e^M_i / Z_i,     p_i(t) near e^(t - W_i) on [-W_i, W_i],   M_i = s_i + W_i

with the row's mid-range s_i and half-range W_i. The Chebyshev series bounds the degree before a logit is looked at.
Coefficients fitted to the row's own logits need a smaller one: least squares with the row's weights is never worse than
that bound, and reweighting takes it towards the smallest l1 error. The fit is done for all rows while planning, because
the degree, and with it the rank, hangs on it.
"""

from typing import NamedTuple

import numpy as np

from rankcert.approximants import chebyshev
from rankcert.constructions.base import (
    Construction,
    Factorization,
    Plan,
    refuse_exponent,
    refuse_memory,
    refuse_rounding,
)
from rankcert.constructions.polynomial import largest_bias, measure_rows, monomials, shift_powers
from rankcert.errors import CannotCertify
from rankcert.geometry import visible
from rankcert.kernels.table import count_monomials
from rankcert.problem import AttentionProblem

__all__ = ["Chebyshev"]

LARGEST_DEGREE = 100
SAMPLE = 48  # rows that refuse a degree before all rows are fitted
GROUPS = 128  # of rows of like W for the degree from the series
TILE = 2**15  # entries of a block of logits: a few such arrays fit into a cache
SWEEPS = 8  # of reweighting
REACH = 4.0  # reweighting is tried where least squares is within this factor of what is allowed
SMOOTHING = 0.02  # errors below this part of the mean one count as that large in the weights


class _Fit(NamedTuple):
    """Row polynomials of degree D: powers (D + 1, rows) of (y - s_i) / W_i, and their l1 errors (rows,)."""

    powers: np.ndarray
    error: np.ndarray


class _State(NamedTuple):
    """What build needs: powers (D + 1, n) of y, keys moved by `offset`, and the estimated error."""

    powers: np.ndarray
    offset: np.ndarray
    error_est: float


class Chebyshev(Construction):
    """Rank C(r + D, D), D growing like sqrt(W log(m / eps)) where relative approximants have W.

    Costs a few passes over all logits to plan; heads whose rank would exceed min(n, m) are refused after a few rows.
    """

    name = "chebyshev"
    lemma = "Lemma 11"

    def plan(self, problem: AttentionProblem, eps: float, *, memory: int) -> Plan:
        refusal = refuse_rounding(problem, eps)
        if refusal:
            return Plan(None, refusal)
        rows, dimension = measure_rows(problem), visible(problem).dimension
        allowed = min(1.0, eps - problem.rounding_est)
        half_range = float(rows.half_range.max(initial=0.0))
        details: dict[str, int | float | str] = {"dimension": dimension, "half_range": half_range}
        exponent = float((rows.exponent + rows.half_range).max(initial=0.0))
        refusal = refuse_exponent(exponent)
        if refusal:
            return Plan(None, refusal, details)
        logits = _Logits(problem)
        try:
            most = _series_degree(rows.half_range, logits.total, allowed)
        except CannotCertify as reason:
            return Plan(None, str(reason), details)
        details["series_degree"] = most
        trivial = min(problem.n, problem.m)
        degree = logits.sampled_degree(allowed, min(most, LARGEST_DEGREE), trivial)
        while True:
            rank = count_monomials(dimension, degree)
            details["degree"] = degree
            if rank > trivial:
                return Plan(rank, f"its rank would exceed min(n, m) = {trivial}", details)
            refusal = refuse_memory((problem.n + problem.m) * rank, memory)
            if refusal:
                return Plan(rank, refusal, details)
            if degree > LARGEST_DEGREE:
                return Plan(
                    rank,
                    f"degree {degree} is beyond {LARGEST_DEGREE}, the most float64 powers carry",
                    details,
                )
            fit = logits.fit(np.arange(problem.n), degree, allowed)
            powers, offset, rounding = logits.expand(fit.powers)
            error = float((fit.error + rounding).max(initial=0.0))
            if error <= allowed:
                return Plan(rank, None, details, _State(powers, offset, error))
            if not rounding.max(initial=0.0) <= allowed:
                return Plan(
                    rank,
                    f"powers of the logits up to degree {degree} lose eps = {eps:g} to rounding, about "
                    f"{rounding.max():.1e} at half-range W = {half_range:.4g}",
                    details,
                )
            degree += 1

    def build(self, problem: AttentionProblem, plan: Plan, eps: float) -> Factorization:
        x, seen, state = problem.inputs, visible(problem), plan.state
        degree = len(state.powers) - 1
        left, right = monomials(seen.query, degree), monomials(_moved_keys(problem, state.offset), degree)
        stop = 0
        for a, row_factor in enumerate(state.powers):
            start, stop = stop, count_monomials(seen.dimension, a)
            left[:, start:stop] *= row_factor[:, None]
        right *= np.exp(np.where(x.kept_keys, x.key_bias - largest_bias(problem), -np.inf))[:, None]
        return Factorization(left, right, self.name, plan.details, state.error_est)


def _series_degree(half_range: np.ndarray, total: np.ndarray, allowed: float) -> int:
    """The least D whose series has error <= allowed / total_i for every row, rows of like W counted as the widest."""
    degree = 0
    order = np.argsort(half_range)
    for group in np.array_split(order, min(GROUPS, order.size)) if order.size else []:
        widest, heaviest = float(half_range[group].max()), float(total[group].max())
        degree = max(degree, chebyshev.find_degree(widest, allowed / heaviest))
    return degree


def _moved_keys(problem: AttentionProblem, offset: np.ndarray) -> np.ndarray:
    return np.where(problem.inputs.kept_keys[:, None], visible(problem).key - offset, 0.0)


class _Logits:
    """Fits to the logits of one problem, in blocks of rows.

    A block is t_ij = (y_ij - s_i) / W_i in [-1, 1], targets e^(W_i (t_ij - 1)) <= 1 and weights omega_j e^M_i / Z_i
    (zero where nothing is kept), so that a row's l1 error is the weighted sum of |p_i(t) - target|. total_i is the sum
    of its weights.
    """

    def __init__(self, problem: AttentionProblem):
        self.problem, self.rows, self.seen = problem, measure_rows(problem), visible(problem)
        x = problem.inputs
        self.weight = np.exp(np.where(x.kept_keys, x.key_bias - largest_bias(problem), -np.inf))
        self.factor = np.exp(self.rows.exponent + self.rows.half_range)
        self.total = self.factor * np.append(0.0, np.cumsum(self.weight))[np.minimum(x.reach, problem.m)]
        self.width = np.where(self.rows.half_range > 0.0, self.rows.half_range, 1.0)

    def sampled_degree(self, allowed: float, most: int, trivial: int) -> int:
        """The least degree at which all of a sample of rows fit, or at which the rank exceeds `trivial`."""
        n, dimension = self.problem.n, self.seen.dimension
        worst = np.argsort(self.rows.half_range + np.log(self.total))[::-1][: SAMPLE // 2]
        chosen = np.unique(np.append(worst, np.linspace(0, n - 1, min(n, SAMPLE - worst.size)).astype(int)))
        while most > 0 and count_monomials(dimension, most - 1) > trivial:
            most -= 1
        squares = self.least_squares(chosen, most).max(axis=1, initial=0.0)
        for degree in np.flatnonzero(squares <= REACH * allowed):
            if squares[degree] <= allowed or (self.fit(chosen, int(degree), allowed).error <= allowed).all():
                return int(degree)
        return most

    def blocks(self, chosen: np.ndarray):
        """Yield (part of chosen, t, target, weight)."""
        x, height = self.problem.inputs, max(1, TILE // self.problem.m)
        for start in range(0, chosen.size, height):
            rows = chosen[start : start + height]
            t = (self.seen.query[rows] @ self.seen.key.T - self.rows.shift[rows, None]) / self.width[
                rows, None
            ]
            kept = (np.arange(self.problem.m) < x.reach[rows, None]) & x.kept_keys
            np.copyto(t, 0.0, where=~kept)
            target = np.exp(np.minimum(self.rows.half_range[rows, None] * (t - 1.0), 0.0))
            weight = np.where(kept, self.factor[rows, None] * self.weight, 0.0)
            yield slice(start, start + rows.size), t, target, weight

    def least_squares(self, chosen: np.ndarray, degree: int) -> np.ndarray:
        """l1 errors (degree + 1, chosen) of the least squares fits of degree 0, 1, .. degree."""
        errors = np.empty((degree + 1, chosen.size))
        for part, t, target, weight in self.blocks(chosen):
            for k, (residual, *_) in enumerate(_orthogonal_fits(t, target, weight, degree)):
                errors[k, part] = np.einsum("ij,ij->i", weight, np.abs(residual))
        return errors

    def fit(self, chosen: np.ndarray, degree: int, allowed: float) -> _Fit:
        """Least squares, then reweighted towards l1 for the rows whose error is not allowed yet."""
        powers, error = np.empty((degree + 1, chosen.size)), np.empty(chosen.size)
        for part, t, target, weight in self.blocks(chosen):
            found, least, residual = _fit_once(t, target, weight, weight, degree)
            active = np.flatnonzero(least > allowed)
            residual = residual[active]
            for _ in range(SWEEPS):
                if not active.size:
                    break
                t, target, weight = (
                    a if a.shape[0] == active.size else a[active] for a in (t, target, weight)
                )
                size = np.abs(residual)
                mean = np.einsum("ij,ij->i", weight, size) / weight.sum(axis=1)
                reweighted = weight / np.maximum(size, SMOOTHING * mean[:, None])
                again, errors, residual = _fit_once(t, target, weight, reweighted, degree)
                better = errors < least[active]
                least[active[better]] = errors[better]
                found[:, active[better]] = again[:, better]
                going = least[active] > allowed
                t, target, weight, residual = t[going], target[going], weight[going], residual[going]
                active = active[going]
            powers[:, part], error[part] = found, least
        return _Fit(powers, error)

    def expand(self, powers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Powers of the logits themselves, factors included; how far to move the keys; rounding's share of the error.

        Moving all keys moves the mid-ranges by a linear function of the query, which is chosen to make them small.
        """
        seen, rows = self.seen, self.rows
        offset = np.linalg.lstsq(seen.query, rows.shift, rcond=None)[0] if seen.dimension else np.zeros(0)
        shift = rows.shift - seen.query @ offset
        scaled = powers * self.factor / self.width ** np.arange(len(powers))[:, None]
        out = shift_powers(scaled, shift)
        lengths = [np.sqrt((z * z).sum(axis=1)) for z in (seen.query, _moved_keys(self.problem, offset))]
        degrees = np.arange(len(powers))[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            columns = (self.weight * lengths[1] ** degrees).sum(axis=1)
            tau = (np.abs(out) * lengths[0] ** degrees * columns[:, None]).sum(axis=0)
        rank = count_monomials(seen.dimension, len(powers) - 1)
        return out, offset, np.nan_to_num(rank * np.finfo(float).eps * tau, nan=np.inf)


def _orthogonal_fits(t: np.ndarray, target: np.ndarray, weight: np.ndarray, degree: int):
    """Yield per degree (residual, c, a, b): fits by each row's orthogonal polynomials (Stieltjes' recurrence).

    q_(k+1) = (t - a_k) q_k - b_k q_(k-1), monic; c_k is the coefficient of q_k. A row with fewer distinct t than
    degrees ends in zeros. The residual is the same array every time.
    """
    residual = target.copy()
    before, q, norm_before = np.zeros_like(t), np.ones_like(t), None
    for _ in range(degree + 1):
        heavy = weight * q
        norm = np.einsum("ij,ij->i", heavy, q)
        alive = norm > 1e-30 if norm_before is None else norm > 1e-26 * norm_before
        safe = np.where(alive, norm, 1.0)
        c = np.where(alive, np.einsum("ij,ij->i", heavy, residual) / safe, 0.0)
        residual -= c[:, None] * q
        heavy *= q
        a = np.where(alive, np.einsum("ij,ij->i", heavy, t) / safe, 0.0)
        b = np.zeros_like(a) if norm_before is None else norm / norm_before
        yield residual, c, a, b
        before, q = q, np.where(alive[:, None], (t - a[:, None]) * q - b[:, None] * before, 0.0)
        norm_before = safe


def _fit_once(t, target, weight, used, degree):
    """(powers of t, l1 error, residual) of the fit that is least squares for the weights `used`."""
    total = np.zeros((degree + 1, t.shape[0]))
    before, q = np.zeros_like(total), np.zeros_like(total)
    q[0] = 1.0
    residual = target
    for residual, c, a, b in _orthogonal_fits(t, target, used, degree):  # noqa: B007
        total += c * q
        following = -a * q - b * before
        following[1:] += q[:-1]
        before, q = q, following
    return total, np.einsum("ij,ij->i", weight, np.abs(residual)), residual
