"""Rows and witnesses enclosed in ball arithmetic: no BLAS, no float64 rounding analysis.

Needs python-flint (extra `exact`).
"""

import math

import numpy as np

from rankcert.checker.errors import RankcertError
from rankcert.checker.inputs import Inputs

__all__ = ["enclose_bernstein_limit", "enclose_leakage_sum", "enclose_rows", "flint_version"]

PRECISION = 160  # bits beyond those that the size of the logits eats
CHUNK = 64  # rows whose products are held at once


def _flint():
    try:
        import flint
    except ImportError:
        raise RankcertError('ball arithmetic needs python-flint: pip install "rankcert[exact]"') from None
    return flint


def flint_version() -> str:
    """The version of python-flint in use."""
    return _flint().__version__


def enclose_rows(inputs: Inputs, left, right, rows, progress=None) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) float64 bounds of sum_j |P_ij - (left right^T)_ij| for each row i of `rows`.

    Every operation from the binary64 inputs on is done on balls of at least 160 bits, and the ends are rounded
    outward. left and right are finite float64 (n, r) and (m, r). progress(done, total) is called as rows finish.
    """
    flint = _flint()
    rows = np.asarray(rows, dtype=np.int64)
    lower, upper = np.empty(rows.size), np.empty(rows.size)
    with flint.ctx.workprec(_bits(inputs)):
        right_t, product = _matrix(flint, right).transpose(), None
        for at, attention in enumerate(_attention(flint, inputs, rows)):
            if at % CHUNK == 0 and left.shape[1]:
                product = _matrix(flint, left[rows[at : at + CHUNK]]) * right_t
            error = flint.arb(0)
            for j, p in enumerate(attention):
                error += abs(p - product[at % CHUNK, j]) if product is not None else p
            lower[at], upper[at] = _ends(error)
            if progress is not None:
                progress(at + 1, rows.size)
    return lower, upper


def enclose_bernstein_limit(inputs: Inputs, rows, groups, weights, progress=None) -> tuple[float, float]:
    """(lower, upper) bounds of 1 / max_k ||F_k||_1, F = weights (A weights)^-1, A the attention of `rows` by groups.

    Theorem 9 without its rounding: below the lower one every eps is proved to need rank N. (0, inf) where A weights
    cannot be inverted in balls. Arguments as `read_rows` and `read_weights` return them, N >= 1.
    """
    flint = _flint()
    with flint.ctx.workprec(_bits(inputs)):
        sums = flint.arb_mat(rows.size, weights.shape[0])
        for at, attention in enumerate(_attention(flint, inputs, rows)):
            for j, p in enumerate(attention):
                if groups[j] >= 0:
                    sums[at, int(groups[j])] += p
            if progress is not None:
                progress(at + 1, rows.size)
        exact = _matrix(flint, weights)
        try:
            frame = exact * (sums * exact).inv()
        except ZeroDivisionError:
            return 0.0, math.inf
        norm = flint.arb(0)
        for k in range(weights.shape[0]):
            norm = norm.max(sum((abs(frame[k, c]) for c in range(rows.size)), flint.arb(0)))
        lower, upper = _ends(1 / norm)
    return max(lower, 0.0), upper


def enclose_leakage_sum(inputs: Inputs, rows, progress=None) -> tuple[float, float]:
    """(lower, upper) bounds of sum_j max_i P_ij, i in `rows` (sorted), over the keys that all of them may see."""
    flint = _flint()
    with flint.ctx.workprec(_bits(inputs)):
        most = [flint.arb(0)] * int(inputs.reach[rows[0]])
        for at, attention in enumerate(_attention(flint, inputs, rows)):
            most = [a.max(p) for a, p in zip(most, attention, strict=False)]
            if progress is not None:
                progress(at + 1, rows.size)
        return _ends(sum(most, flint.arb(0)))


def _bits(inputs: Inputs) -> int:
    """The precision: PRECISION bits below the point of the largest logit."""
    size = abs(inputs.scale) * math.sqrt(
        float((inputs.query**2).sum(axis=1).max(initial=0.0))
        * float((inputs.key**2).sum(axis=1).max(initial=0.0))
    )
    return PRECISION + max(0, int(math.log2(size + 1.0)))


def _attention(flint, inputs: Inputs, rows: np.ndarray):
    """Row by row of P, a ball for each key that the row may see."""
    scale = flint.arb(inputs.scale)
    bias = [None if b == -np.inf else flint.arb(float(b)) for b in inputs.key_bias]
    keys_t = _matrix(flint, inputs.key).transpose()
    for start in range(0, rows.size, CHUNK):
        chunk = rows[start : start + CHUNK]
        logits = _matrix(flint, inputs.query[chunk]) * keys_t
        for a, i in enumerate(chunk):
            # A masked key has weight zero. Dividing all weights by one e^top changes no quotient.
            seen = range(int(inputs.reach[i]))
            s = [None if bias[j] is None else scale * logits[a, j] + bias[j] for j in seen]
            top = max((x for x in s if x is not None), key=lambda x: float(x.mid())).mid()
            weights = [flint.arb(0) if x is None else (x - top).exp() for x in s]
            total = sum(weights, flint.arb(0))
            yield [w / total for w in weights]


def _matrix(flint, array: np.ndarray):
    return flint.arb_mat(array.shape[0], array.shape[1], [float(x) for x in array.ravel()])


def _ends(ball) -> tuple[float, float]:
    # float() rounds to nearest, so one step outward makes each end safe; an unbounded ball has mid or radius nan/inf
    lower, upper = float(ball.lower()), float(ball.upper())
    if not (math.isfinite(lower) and math.isfinite(upper)):
        return -math.inf, math.inf
    return math.nextafter(lower, -math.inf), math.nextafter(upper, math.inf)
