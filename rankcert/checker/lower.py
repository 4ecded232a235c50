"""The lower checks: proofs that no matrix of smaller rank is within eps (PROOFS.md, Theorems 9 and 10)."""

from collections.abc import Callable
from threading import Lock

import numpy as np

from rankcert.checker.engine import Engine, ProductFault, blas_threads, sweep
from rankcert.checker.errors import InvalidInput
from rankcert.checker.inputs import Inputs
from rankcert.checker.kernel import EPS_M, exponentials, require_safe_arithmetic
from rankcert.checker.rows import DOWN, HINT_LIMIT, UP, find_log_normalisers, read_eps, weight_terms
from rankcert.checker.verdict import LowerVerdict, conclude_lower

__all__ = [
    "check_bernstein",
    "check_leakage",
    "conclude_leakage",
    "read_rows",
    "read_weights",
    "support_fault",
]

FRAME_LIMIT = 2.0**100  # entries of the float witness; larger ones would prove nothing for eps above 2^-100

Take = Callable[[slice, slice, np.ndarray], None]


def check_bernstein(
    inputs: Inputs, rows, groups, weights, *, eps: float, engine: Engine | None = None
) -> LowerVerdict:
    """Prove that every matrix within `eps` of the softmax matrix P has rank N or more, from a Bernstein witness.

    rows (N,): distinct query indices, in any order. groups (m,): which of K groups each key belongs to, -1 for none.
    weights (K, N): int8 or int16. With A (N, K) the attention of these rows summed over each group, the witness says
    that the largest row l1 norm of weights (A weights)^-1 is below 1/eps. It is advice of any origin: the verdict is
    PROVED, or UNDECIDED if the numbers do not show it. Under a causal mask a key that one of the rows may not see must
    have no group, and the rank is a causal rank. N = 0 proves rank 0.

    Memory: N x K, K x N and N x N float64, and one tile of N x m a thread. Raises InvalidInput for arrays of the wrong
    type or shape, for repeated rows, for rows or groups that do not exist. Source: PROOFS.md, Theorem 9.

    >>> import numpy as np
    >>> from rankcert.checker import read_inputs
    >>> inputs = read_inputs(9.0 * np.eye(3), np.eye(3), scale=1.0)
    >>> verdict = check_bernstein(inputs, np.arange(3), np.arange(3), np.eye(3, dtype=np.int8), eps=0.5)
    >>> verdict.status, verdict.rank, round(verdict.eps_below, 4)
    ('PROVED', 3, 0.9995)
    """
    require_safe_arithmetic()
    engine = engine or Engine()
    eps = read_eps(eps)
    rows = read_rows(inputs, rows)
    groups, weights = read_weights(inputs, rows, groups, weights)
    if rows.size == 0:
        return _nothing_to_prove(inputs, eps)
    fault, below, numbers = support_fault(inputs, rows, groups), 0.0, {}
    if not fault:
        try:
            below, numbers = _bernstein_limit(inputs, rows, groups, weights, engine)
        except (_WitnessFault, ProductFault) as caught:
            fault = str(caught)
    return conclude_lower(
        inputs, "bernstein", rows.size, eps, below, engine=engine.describe(), breakdown=numbers, fault=fault
    )


def check_leakage(inputs: Inputs, rows, *, eps: float, engine: Engine | None = None) -> LowerVerdict:
    """Prove a rank that every matrix within `eps` of the softmax matrix P needs, from a choice of rows.

    rows (N,): distinct query indices, in any order. The rank proved is at least (f - eps N) / (1 + eps), f the sum over
    the keys of the largest attention that one of these rows pays to it; under a causal mask over the keys that all of
    them may see. UNDECIDED, and rank 0, if that is not positive. No rows prove rank 0.

    Memory: one number a key, and one tile of N x m a thread. Raises InvalidInput for rows that are not distinct query
    indices. Source: PROOFS.md, Theorem 10.

    >>> import numpy as np
    >>> from rankcert.checker import read_inputs
    >>> inputs = read_inputs(9.0 * np.eye(3), np.eye(3), scale=1.0)
    >>> check_leakage(inputs, np.arange(3), eps=0.2).rank
    2
    """
    require_safe_arithmetic()
    engine = engine or Engine()
    eps = read_eps(eps)
    rows = read_rows(inputs, rows)
    if rows.size == 0:
        return _nothing_to_prove(inputs, eps)
    shared = int(inputs.reach[rows[0]])  # keys that every one of the rows may see: reach does not decrease
    most, lock = np.zeros(shared), Lock()

    def take(at, columns, weight):
        seen = slice(columns.start, min(columns.stop, shared))
        if seen.start < seen.stop:
            largest = weight[:, : seen.stop - seen.start].max(axis=0)
            with lock:
                np.maximum(most[seen], largest, out=most[seen])

    try:
        distance = _sweep_weights(inputs, rows, engine, take)
    except (_WitnessFault, ProductFault) as caught:
        return conclude_lower(inputs, "leakage", 1, eps, 0.0, engine=engine.describe(), fault=str(caught))
    # f, rounded down: its sum meets at most m additions, that of the distances N
    held = float(most.sum()) * (1 - inputs.m * EPS_M)
    lost = float(distance.sum()) * (1 + rows.size * EPS_M)
    return conclude_leakage(inputs, rows.size, eps, held, lost, engine=engine.describe())


def conclude_leakage(
    inputs: Inputs, size: int, eps: float, held: float, lost: float, *, engine: str
) -> LowerVerdict:
    """The verdict on `size` rows whose largest attentions sum to held - lost or more (Theorem 10)."""
    count = np.arange(size)
    limits = _limit(held - count, lost, size + count)  # of eps, for rank 1, 2, ...
    rank = int(np.flatnonzero(eps < limits).max(initial=0)) + 1  # the largest it proves, or else 1, unproved
    numbers = {"largest attentions": held, "rounding": lost}
    return conclude_lower(inputs, "leakage", rank, eps, limits[rank - 1], engine=engine, breakdown=numbers)


class _WitnessFault(Exception):
    """Why a witness proves nothing at any eps."""


def _nothing_to_prove(inputs: Inputs, eps: float) -> LowerVerdict:
    return conclude_lower(inputs, "rule", 0, eps, np.inf, engine="rule, no arithmetic")


def _bernstein_limit(
    inputs: Inputs, rows: np.ndarray, groups: np.ndarray, weights: np.ndarray, engine: Engine
) -> tuple[float, dict[str, float]]:
    """A number below which every eps is proved to need rank N, and the parts of it (Theorem 9)."""
    n_rows, n_groups = rows.size, weights.shape[0]
    if n_groups < n_rows:
        raise _WitnessFault(f"{n_groups} groups of keys cannot tell {n_rows} rows apart")
    sums = np.zeros((n_groups, n_rows))  # A transposed: its rows are gathered, a whole cache line at a time

    def take(at, columns, weight):
        order = np.argsort(groups[columns], kind="stable")
        inside = groups[columns][order]
        order, inside = order[inside >= 0], inside[inside >= 0]
        starts = np.flatnonzero(np.diff(inside, prepend=-1))
        if starts.size:
            sums[inside[starts], at] += np.add.reduceat(np.ascontiguousarray(weight.T)[order], starts, axis=0)

    tau = float(_sweep_weights(inputs, rows, engine, take).max())
    sums = np.ascontiguousarray(sums.T)
    frame = _frame(sums, weights)
    sizes = np.abs(frame).sum(axis=1) * (1 + n_rows * EPS_M)
    defect = np.zeros(n_rows)

    def visit(at, columns, products, reach):
        (product,) = products
        own = np.arange(max(at.start, columns.start), min(at.stop, columns.stop))
        product[own - at.start, own - columns.start] -= 1.0
        defect[at] += np.abs(product, out=product).sum(axis=1)

    sweep(np.full(n_rows, n_rows), engine, [(sums, np.ascontiguousarray(frame.T))], visit)
    rounding = n_groups * EPS_M * (sums * sizes).sum(axis=1) * (1 + (n_rows + n_groups + 2) * EPS_M)
    alpha = float(np.nextafter(UP * (defect * (1 + (n_rows + 1) * EPS_M) + rounding + 1e-40).max(), np.inf))
    size = float(sizes.max())
    if not alpha < 1.0:
        raise _WitnessFault(f"its weights are too ill-conditioned on these rows (defect {alpha:.3g})")
    return _limit((1.0 - alpha) / size, tau, 1.0), {"defect": alpha, "row norm": size, "rounding": tau}


def _limit(have, lose, share):
    """(have - lose) / share, rounded down (Lemma 6)."""
    return np.nextafter(DOWN * ((DOWN * have - UP * lose) / share), -np.inf)


def _sweep_weights(inputs: Inputs, rows: np.ndarray, engine: Engine, take: Take) -> np.ndarray:
    """Call take(rows, columns, weights) tile by tile for these rows of the computed softmax, zero where disallowed.

    Returns what the l1 distance between a row of P and its computed weights is at most (Lemma 11), summed by anybody
    over groups of keys included: at most m additions a sum.
    """
    query, seen = inputs.query[rows], inputs.reach[rows]
    hint = find_log_normalisers(inputs, engine, rows)
    if not (np.abs(hint) <= HINT_LIMIT).all():
        raise _WitnessFault(
            f"row {rows[int(np.argmin(np.abs(hint) <= HINT_LIMIT))]} has no usable normaliser"
        )
    total = np.zeros(rows.size)

    def visit(at, columns, products, reach):
        x = inputs.scale * products[0]
        x += inputs.key_bias[columns]
        x -= hint[at, None]
        weight = exponentials(x, engine.variant)
        if reach[0] < weight.shape[1]:
            weight[np.arange(weight.shape[1]) >= reach[:, None]] = 0.0
        total[at] += weight.sum(axis=1)
        take(at, columns, weight)

    sweep(seen, engine, [(query, inputs.key)], visit)
    usable = (total >= 0.5) & (total < np.inf)  # false for NaN
    if not usable.all():
        at = int(np.argmin(usable))
        raise _WitnessFault(f"the weights of row {rows[at]} sum to {total[at]}")
    terms = weight_terms(inputs, query, hint, total, 2 * inputs.m)
    return np.nextafter(UP * (sum(terms.values()) + 1e-40), np.inf)


def _frame(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """weights (sums weights)^-1, about: whatever comes out, Theorem 9 takes it as the witness."""
    exact = weights.astype(np.float64)
    with blas_threads(1), np.errstate(all="ignore"):
        try:
            frame = exact @ np.linalg.inv(sums @ exact)
        except np.linalg.LinAlgError:
            frame = np.full(weights.shape, np.nan)
    if not (np.abs(frame) <= FRAME_LIMIT).all():
        raise _WitnessFault("its weights are singular on these rows, as far as float64 can tell")
    return frame


def read_rows(inputs: Inputs, rows) -> np.ndarray:
    """Distinct query indices as sorted int64 (N,), or InvalidInput."""
    rows = _integers("rows", rows, 1)
    outside = (rows < 0) | (rows >= inputs.n)
    if outside.any():
        raise InvalidInput(
            f"rows must be query indices from 0 to {inputs.n - 1}, got {rows[np.argmax(outside)]}"
        )
    rows = np.sort(rows)
    again = rows[1:] == rows[:-1]
    if again.any():
        raise InvalidInput(f"rows must be distinct, but {rows[np.argmax(again)]} occurs more than once")
    return rows


def read_weights(inputs: Inputs, rows: np.ndarray, groups, weights) -> tuple[np.ndarray, np.ndarray]:
    """Groups as int64 (m,) and weights as they are, int8 or int16 (K, N), or InvalidInput."""
    groups = _integers("groups", groups, 1)
    if groups.shape != (inputs.m,):
        raise InvalidInput(f"groups must have one number per key, shape ({inputs.m},), got {groups.shape}")
    weights = np.asarray(weights)
    if weights.dtype not in (np.int8, np.int16):
        raise InvalidInput(f"weights must be int8 or int16, got dtype {weights.dtype}")
    if weights.ndim != 2 or weights.shape[1] != rows.size:
        raise InvalidInput(f"weights must be 2-D with one column per row ({rows.size}), got {weights.shape}")
    outside = (groups < -1) | (groups >= weights.shape[0])
    if outside.any():
        raise InvalidInput(
            f"groups must be -1 or a row of weights (0 to {weights.shape[0] - 1}), got {groups[np.argmax(outside)]}"
        )
    return groups, weights


def support_fault(inputs: Inputs, rows: np.ndarray, groups: np.ndarray) -> str:
    """Why these groups are no witness under a causal mask: a key that not all of the (sorted) rows may see."""
    hidden = np.flatnonzero(groups[int(inputs.reach[rows[0]]) :] >= 0)
    if not hidden.size:
        return ""
    return f"key {int(inputs.reach[rows[0]] + hidden[0])} has a group, but row {rows[0]} may not see it"


def _integers(name: str, values, ndim: int) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:  # a ragged list
        raise InvalidInput(f"{name} is not an array of integers: {error}") from None
    if array.dtype.kind not in "iu" and array.size:
        raise InvalidInput(f"{name} must be integers, got dtype {array.dtype}")
    if array.ndim != ndim:
        raise InvalidInput(f"{name} must be {ndim}-D, got shape {array.shape}")
    return array.astype(np.int64)
