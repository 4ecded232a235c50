"""Rows enclosed in ball arithmetic: no BLAS, no float64 rounding analysis. Needs python-flint (extra `exact`)."""

import math

import numpy as np

from rankcert.checker.errors import RankcertError
from rankcert.checker.inputs import Inputs

__all__ = ["enclose_rows", "flint_version"]

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
    size = abs(inputs.scale) * math.sqrt(
        float((inputs.query**2).sum(axis=1).max(initial=0.0))
        * float((inputs.key**2).sum(axis=1).max(initial=0.0))
    )
    bits = PRECISION + max(0, int(math.log2(size + 1.0)))
    with flint.ctx.workprec(bits):
        scale = flint.arb(inputs.scale)
        bias = [None if b == -np.inf else flint.arb(float(b)) for b in inputs.key_bias]
        keys_t, right_t = _matrix(flint, inputs.key).transpose(), _matrix(flint, right).transpose()
        for start in range(0, rows.size, CHUNK):
            chunk = rows[start : start + CHUNK]
            logits = _matrix(flint, inputs.query[chunk]) * keys_t
            product = _matrix(flint, left[chunk]) * right_t if left.shape[1] else None
            for a, i in enumerate(chunk):
                reach = int(inputs.reach[i])
                error = _row_error(flint, logits, product, a, reach, scale, bias)
                lower[start + a], upper[start + a] = _ends(error)
                if progress is not None:
                    progress(start + a + 1, rows.size)
    return lower, upper


def _matrix(flint, array: np.ndarray):
    return flint.arb_mat(array.shape[0], array.shape[1], [float(x) for x in array.ravel()])


def _row_error(flint, logits, product, a, reach, scale, bias):
    # A masked key has weight zero and still counts |t_ij|. Dividing all weights by one e^top changes no quotient.
    s = [None if bias[j] is None else scale * logits[a, j] + bias[j] for j in range(reach)]
    top = max((x for x in s if x is not None), key=lambda x: float(x.mid())).mid()
    weights = [None if x is None else (x - top).exp() for x in s]
    total = sum((w for w in weights if w is not None), flint.arb(0))
    error = flint.arb(0)
    for j, w in enumerate(weights):
        p = flint.arb(0) if w is None else w / total
        error += abs(p - product[a, j]) if product is not None else p
    return error


def _ends(ball) -> tuple[float, float]:
    # float() rounds to nearest, so one step outward makes each end safe; an unbounded ball has mid or radius nan/inf
    lower, upper = float(ball.lower()), float(ball.upper())
    if not (math.isfinite(lower) and math.isfinite(upper)):
        return -math.inf, math.inf
    return math.nextafter(lower, -math.inf), math.nextafter(upper, math.inf)
