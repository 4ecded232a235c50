"""The row check: a proved bound on every row's l1 error (PROOFS.md, Theorems 2 and 3)."""

import math

import numpy as np

from rankcert.checker import _kernel
from rankcert.checker.engine import Engine, ProductFault, sweep
from rankcert.checker.errors import InvalidInput
from rankcert.checker.inputs import Inputs, exact_float64
from rankcert.checker.kernel import BLOCK, EPS_M, LANES, exponentials, require_safe_arithmetic
from rankcert.checker.verdict import Verdict, conclude

__all__ = [
    "DOWN",
    "HINT_LIMIT",
    "UP",
    "applied_row_bounds",
    "cancellation_upper",
    "check_rows",
    "factor_fault",
    "find_log_normalisers",
    "logit_residual",
    "read_eps",
    "read_factors",
    "weight_terms",
]

FACTOR_LIMIT = 2.0**250  # entries of the factors (guard G)
TAU_LIMIT = 2.0**500
HINT_LIMIT = 2.0**100
UP = 1 + 64 * EPS_M  # covers evaluating a bound of fewer than 25 nonnegative terms (Lemma 6)
DOWN = 1 - 64 * EPS_M


def read_eps(eps) -> float:
    """A tolerance as a positive finite float, or InvalidInput."""
    try:
        value = float(eps)
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 < value < math.inf:
        raise InvalidInput(f"eps must be a positive finite number, got {eps!r}")
    return value


def find_log_normalisers(
    inputs: Inputs, engine: Engine | None = None, chosen: np.ndarray | None = None
) -> np.ndarray:
    """log Z_i over the kept keys of every row, or of the `chosen` ones (increasing): a hint, not a proved number."""
    engine = engine or Engine()
    query, seen = inputs.query, inputs.reach
    if chosen is not None:
        query, seen = query[chosen], seen[chosen]
    top = np.full(seen.size, -np.inf)
    total = np.zeros(seen.size)

    def visit(rows, columns, products, reach):
        _kernel.normalisers(
            engine.variant, products[0], inputs.key_bias[columns], reach, inputs.scale, top[rows], total[rows]
        )

    sweep(seen, engine, [(query, inputs.key)], visit)
    return top + np.log(total)


def check_rows(
    inputs: Inputs,
    left,
    right,
    *,
    eps: float | None = None,
    log_normaliser=None,
    engine: Engine | None = None,
) -> Verdict:
    """Bound sum_j |P_ij - (left right^T)_ij| for every row i, rounding included.

    left (n, r), right (m, r); `log_normaliser` (n,) is untrusted advice (None: found here by a first sweep; bad
    advice can only weaken the bound). Entries at keys masked by -inf count with P_ij = 0; pairs disallowed by a
    causal mask do not count. With `eps` the verdict is PROVED, REFUTED or UNDECIDED; without, MEASURED.
    Factors that are not finite or beyond guard (G) give UNDECIDED. Shapes that do not fit raise InvalidInput.
    """
    require_safe_arithmetic()
    engine = engine or Engine()
    left, right = read_factors(inputs, left, right)
    if eps is not None:
        eps = read_eps(eps)
    n, r = left.shape
    if n == 0 or r == 0:
        # By rule: nothing to approximate, or B = 0, whose rows are off by exactly sum_j P_ij = 1.
        one = np.ones(n)
        return conclude(
            inputs, r, eps, one, one, breakdown={"the zero matrix": one}, engine="rule, no arithmetic"
        )

    fault = factor_fault(left, right)
    tau = np.zeros(n) if fault else _tau_upper(left, right)
    if not fault and not (tau.max() <= TAU_LIMIT):
        fault = f"sum_l |u_il| sum_j |v_jl| exceeds 2**500 in row {int(np.argmax(tau))}"
    hint = None if log_normaliser is None else exact_float64("log_normaliser", log_normaliser, 1)
    if hint is not None and hint.shape != (n,):
        raise InvalidInput(f"log_normaliser must have one number per query, shape ({n},), got {hint.shape}")
    if hint is not None and not (np.abs(hint) <= HINT_LIMIT).all():
        fault = fault or "a log_normaliser is not finite or beyond 2**100"

    weight, error = np.zeros(n), np.zeros(n)
    if not fault:
        try:
            if hint is None:
                hint = find_log_normalisers(inputs, engine)

            def visit(rows, columns, products, reach):
                _kernel.rows(
                    engine.variant,
                    *products,
                    inputs.key_bias[columns],
                    reach,
                    hint[rows],
                    inputs.scale,
                    weight[rows],
                    error[rows],
                )

            sweep(inputs.reach, engine, [(inputs.query, inputs.key), (left, right)], visit)
        except ProductFault as caught:
            fault = str(caught)
    if fault:
        return conclude(inputs, r, eps, weight, error, fault=fault, engine=engine.describe())

    usable = (weight >= 0.5) & (weight < np.inf)  # false for NaN
    if not usable.all():
        row = int(np.argmin(usable))
        fault = f"row {row}: its log_normaliser is too far off (it leaves the weights a sum of {weight[row]})"
        return conclude(inputs, r, eps, weight, error, fault=fault, engine=engine.describe())
    terms = _terms(inputs, r, hint, weight, error, tau)
    slack = sum(values for name, values in terms.items() if name != "factor error")
    upper = np.nextafter(UP * (terms["factor error"] + slack), np.inf)
    lower = np.nextafter(DOWN * (error * (1 - (_depth(inputs.m) + 1) * EPS_M)) - UP * slack, -np.inf)
    return conclude(inputs, r, eps, upper, lower, breakdown=terms, engine=engine.describe())


def logit_residual(inputs: Inputs, left, right, engine: Engine | None = None) -> Verdict:
    """Bound max_i ||softmax(l_i + b) - softmax((left right^T)_i + b)||_1, l_ij = scale <q_i, k_j>, for every row.

    The bound is 2 tanh(osc_i / 4), osc_i the spread of l_ij - (left right^T)_ij over the row's kept keys
    (PROOFS.md, Theorem 4). left (n, r), right (m, r); r = 0 compares with softmax(b). Status MEASURED.
    """
    require_safe_arithmetic()
    engine = engine or Engine()
    left, right = read_factors(inputs, left, right)
    n, r = left.shape
    fault = factor_fault(left, right)
    most, least = np.full(n, -np.inf), np.full(n, np.inf)
    if not fault and n:

        def visit(rows, columns, products, reach):
            _kernel.spread(*products, inputs.key_bias[columns], reach, inputs.scale, most[rows], least[rows])

        # a zero column stands for r = 0, whose product is the zero matrix
        pair = (left, right) if r else (np.zeros((n, 1)), np.zeros((inputs.m, 1)))
        try:
            sweep(inputs.reach, engine, [(inputs.query, inputs.key), pair], visit)
        except ProductFault as caught:
            fault = str(caught)
    norm = _norms_upper(left) * _norms_upper(right).max(initial=0.0)
    rounding = EPS_M * ((inputs.d + 3) * _logit_size_upper(inputs, inputs.query) + (r + 3) * norm) + 1e-40
    oscillation = UP * (most - least + 2 * rounding)
    # 2 tanh(y) = 2 - 4 / (e^2y + 1); e^2y is ours, clamped where the result is 2 anyway
    tanh_form = 2.0 - 4.0 / (exponentials(np.minimum(oscillation / 2, 600.0)) + 1.0) + 16 * EPS_M
    upper = np.nextafter(np.minimum(UP * oscillation / 2, tanh_form), np.inf)
    breakdown = {"oscillation": oscillation, "rounding": rounding}
    return conclude(
        inputs, r, None, upper, np.zeros(n), breakdown=breakdown, fault=fault, engine=engine.describe()
    )


def read_factors(inputs: Inputs, left, right) -> tuple[np.ndarray, np.ndarray]:
    left, right = exact_float64("left", left, 2), exact_float64("right", right, 2)
    want = (inputs.n, inputs.m)
    if (left.shape[0], right.shape[0]) != want or left.shape[1] != right.shape[1]:
        raise InvalidInput(
            f"left must be ({want[0]}, r) and right ({want[1]}, r) with one r, got {left.shape} and {right.shape}"
        )
    return left, right


def factor_fault(left: np.ndarray, right: np.ndarray) -> str:
    for name, factor in (("left", left), ("right", right)):
        for start in range(0, factor.shape[0], 4096):
            bad = ~(np.abs(factor[start : start + 4096]) <= FACTOR_LIMIT)
            if bad.any():
                i, column = np.unravel_index(int(np.argmax(bad)), bad.shape)
                value = factor[start + i, column]
                return f"{name}[{start + i}, {column}] is {value}, not a finite number of size at most 2**250"
    return ""


def _by_blocks(rows: np.ndarray, function) -> np.ndarray:
    # elementwise work without a temporary of the array's own size
    parts = [function(rows[start : start + 1024]) for start in range(0, rows.shape[0], 1024)]
    return np.concatenate(parts) if parts else np.zeros(0)


def applied_row_bounds(row_bounds: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Row bounds (n,) of left (right^T x) as it is computed, in units of max_j ||x_j|| (PROOFS.md, Theorem 8).

    `row_bounds` were proved of the factors. Holds in every norm that depends on absolute values only, for finite
    values x with 2^-500 <= max_j ||x_j|| <= 2^500, in float64, rows of x that meet zero rows of `right` left out.
    """
    require_safe_arithmetic()
    rounding = (right.shape[0] + right.shape[1] + 4) * EPS_M * _tau_upper(left, right)
    return np.nextafter(UP * (row_bounds + rounding + 2.0**-200), np.inf)


def cancellation_upper(left: np.ndarray, right: np.ndarray) -> float:
    """At least max_i sum_l |u_il| sum_j |v_jl|: how far rounding in an application of the factors is amplified."""
    return float(_tau_upper(left, right).max(initial=0.0))


def _tau_upper(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """At least sum_l |u_il| sum_j |v_jl| (Lemma 5)."""
    sigma = np.zeros(right.shape[1])
    for start in range(0, right.shape[0], 1024):
        sigma += np.abs(right[start : start + 1024]).sum(axis=0)
    tau = _by_blocks(left, lambda block: (np.abs(block) * sigma).sum(axis=1))
    return tau * (1 + (right.shape[0] + right.shape[1]) * EPS_M) + 1e-80


def _norms_upper(rows: np.ndarray) -> np.ndarray:
    """At least the Euclidean norm of each row (Lemma 5)."""
    norms = _by_blocks(rows, lambda block: np.sqrt((block * block).sum(axis=1)))
    return norms * (1 + (rows.shape[1] + 6) * EPS_M) + 1e-80


def _logit_size_upper(inputs: Inputs, query: np.ndarray) -> np.ndarray:
    """N_i: at least |scale| ||q_i|| max_j ||k_j|| over kept keys (hidden keys are zero), for these queries."""
    return abs(inputs.scale) * _norms_upper(query) * _norms_upper(inputs.key).max() * (1 + 4 * EPS_M)


def _depth(m: int) -> int:
    """h: additions any term passes on its way into a row sum (Lemma 4)."""
    return BLOCK // LANES + int(math.log2(LANES)) + -(-m // BLOCK)


def weight_terms(
    inputs: Inputs, query: np.ndarray, hint: np.ndarray, weight: np.ndarray, depth: int
) -> dict[str, np.ndarray]:
    """What adds up to the l1 distance of softmax rows from the weights computed for them, at most (Lemma 11).

    One number for each row of `query`; `weight` is their sum, in which no term met more than `depth` additions. To the
    sum of these terms belong 1e-40 for underflow.
    """
    kept_bias = np.abs(inputs.key_bias[inputs.kept_keys]).max(initial=0.0)
    size = _logit_size_upper(inputs, query)
    eta = EPS_M * ((inputs.d + 3) * size + np.abs(hint) + 2 * min(kept_bias, 360.0))
    return {
        "normaliser": np.abs(1 - weight),
        "summation": depth * EPS_M * weight,
        "logits": eta,
        "exponential": np.full_like(eta, 2 * EPS_M),
    }


def _terms(inputs: Inputs, r: int, hint, weight, error, tau) -> dict[str, np.ndarray]:
    """The terms of Theorem 2's bound, row by row; they are nonnegative and add up to it."""
    h = _depth(inputs.m)
    return {
        "factor error": error * (1 + (h + 1) * EPS_M),
        **weight_terms(inputs, inputs.query, hint, weight, h),
        "factor product": r * EPS_M * tau + 1e-40,
    }
