"""Independent ways to know the right answer. They share no code with the package.

`ball_errors`, `ball_limit` and `ball_leakage` follow the definitions in balls, from exact dot products;
`dense_attention` is plain NumPy;
`second_bound` is the checker's formula written again, with NumPy's exp taken at 8 units of rounding.
"""

import math

import flint
import numpy as np
from flint import arb, fmpq

EPS_M = 2.0**-52


def rationals(rows) -> list[list[fmpq]]:
    """The entries of a 2-D array as exact rationals."""
    return [[fmpq(*float(x).as_integer_ratio()) for x in row] for row in np.asarray(rows)]


def exact_dot(a: list[fmpq], b: list[fmpq]) -> fmpq:
    return sum((x * y for x, y in zip(a, b, strict=True)), fmpq(0))


def allowed(n: int, m: int, causal: bool, offset: int) -> np.ndarray:
    """(n, m) booleans: j <= i + offset, or everything."""
    if not causal:
        return np.ones((n, m), dtype=bool)
    return np.arange(m)[None, :] <= np.arange(n)[:, None] + offset


def ball_attention(q, k, rows, *, scale, key_bias=None, causal=False, offset=0) -> list[list[arb | None]]:
    """These rows of P in balls of the precision in force: zero at masked keys, None at disallowed ones."""
    q, k = rationals(q), rationals(k)
    bias = [0.0] * len(k) if key_bias is None else [float(b) for b in key_bias]
    may = allowed(len(q), len(k), causal, offset)
    attention = []
    for i in rows:
        logits = {
            j: arb(exact_dot(q[i], k[j])) * arb(scale) + arb(bias[j])
            for j in range(len(k))
            if may[i, j] and bias[j] > -math.inf
        }
        top = arb(max(float(x) for x in logits.values()))
        weights = {j: (x - top).exp() for j, x in logits.items()}
        total = sum(weights.values(), arb(0))
        attention.append(
            [(weights[j] / total if j in weights else arb(0)) if may[i, j] else None for j in range(len(k))]
        )
    return attention


def ball_errors(q, k, left, right, *, rows=None, **options):
    """[(lower, upper)] of sum_j |P_ij - (left right^T)_ij| as 160-bit arb ends, by the definition."""
    left, right = rationals(left), rationals(right)
    rows = range(len(q)) if rows is None else rows
    ends = []
    with flint.ctx.workprec(160):
        for i, attention in zip(rows, ball_attention(q, k, rows, **options), strict=True):
            error = arb(0)
            for j, p in enumerate(attention):
                if p is not None:
                    error += abs(p - arb(exact_dot(left[i], right[j])))
            ends.append((error.lower(), error.upper()))
    return ends


def ball_limit(q, k, rows, groups, weights, **options) -> tuple[arb, arb]:
    """Ends of min |A G z|_inf / |G z|_inf over z: below it, and at no larger eps by this witness, rank N is proved.

    A: rows of P added up by groups, G: any weights (K, N), ints or floats. (0, inf) when A G has no inverse in balls.
    """
    count, size = np.shape(weights)
    with flint.ctx.workprec(400):
        sums = flint.arb_mat(size, count)
        for c, attention in enumerate(ball_attention(q, k, rows, **options)):
            for j, p in enumerate(attention):
                if groups[j] >= 0:
                    sums[c, int(groups[j])] += p  # a disallowed key with a group fails here: it is no witness
        exact = flint.arb_mat(count, size, [arb(float(x)) for x in np.ravel(weights)])
        try:
            inverse = exact * (sums * exact).inv()
        except ZeroDivisionError:
            return arb(0), arb("inf")
        norms = [sum((abs(inverse[g, c]) for c in range(size)), arb(0)) for g in range(count)]
        limit = 1 / max(norms, key=lambda x: float(x.mid()))
        return (limit.lower(), limit.upper()) if limit.is_finite() else (arb(0), arb("inf"))


def ball_leakage(q, k, rows, **options) -> tuple[arb, arb]:
    """Ends of sum_j max_i P_ij, i in rows, over the keys that all of them may see."""
    with flint.ctx.workprec(160):
        columns = zip(*ball_attention(q, k, rows, **options), strict=True)
        total = sum((max(c, key=lambda x: float(x.mid())) for c in columns if None not in c), arb(0))
        return total.lower(), total.upper()


def ball_outputs(q, k, values, *, scale, key_bias=None) -> list[list[arb]]:
    """softmax(scale q k^T + key_bias) values entry by entry in 160-bit balls, by the definition."""
    q, k, values = (rationals(x) for x in (q, k, values))
    bias = [0.0] * len(k) if key_bias is None else [float(b) for b in key_bias]
    kept = [j for j in range(len(k)) if bias[j] > -math.inf]
    outputs = []
    with flint.ctx.workprec(160):
        for row in q:
            logits = [arb(exact_dot(row, k[j])) * arb(scale) + arb(bias[j]) for j in kept]
            top = arb(max(float(x) for x in logits))
            weights = [(x - top).exp() for x in logits]
            total = sum(weights, arb(0))
            outputs.append(
                [
                    sum((w * arb(values[j][c]) for j, w in zip(kept, weights, strict=True)), arb(0)) / total
                    for c in range(len(values[0]))
                ]
            )
    return outputs


def dense_attention(q, k, *, scale=None, key_bias=None, causal=False, offset=0) -> np.ndarray:
    """P as float64, zeros at masked and disallowed pairs."""
    q, k = np.asarray(q, dtype=np.float64), np.asarray(k, dtype=np.float64)
    bias = np.zeros(len(k)) if key_bias is None else np.asarray(key_bias, dtype=np.float64)
    kept = allowed(len(q), len(k), causal, offset) & (bias > -np.inf)
    clean = np.where((bias > -np.inf)[:, None] & kept.any(axis=0)[:, None], k, 0.0)
    scale = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    logits = np.where(kept, scale * (q @ clean.T) + np.where(bias > -np.inf, bias, 0.0), -np.inf)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def second_bound(q, k, left, right, hint, *, scale, key_bias, causal=False, offset=0) -> np.ndarray:
    """Theorem 2 of PROOFS.md once more, for finite biases, by unblocked NumPy (row bounds)."""
    n, m, d, r = len(q), len(k), q.shape[1], left.shape[1]
    x = scale * (q @ k.T) + key_bias - hint[:, None]
    may = allowed(n, m, causal, offset)
    w = np.where(may & (x >= -708), np.exp(np.minimum(x, 700.0)), 0.0)
    a = np.where(may, np.abs(w - left @ right.T), 0.0).sum(axis=1)
    z = w.sum(axis=1)
    big_n = abs(scale) * np.linalg.norm(q, axis=1) * np.linalg.norm(k, axis=1).max()
    eta = EPS_M * ((d + 3) * big_n + np.abs(hint) + min(2 * np.abs(key_bias).max(), 720.0))
    tau = np.abs(left) @ np.abs(right).sum(axis=0)
    h = m  # a plain sum
    slack = np.abs(1 - z) + h * EPS_M * z + eta + 8 * EPS_M + r * EPS_M * tau + 1e-40
    return (a * (1 + (h + 1) * EPS_M) + slack) * (1 + 64 * EPS_M)
