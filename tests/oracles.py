"""Independent ways to know the right answer. They share no code with the package.

`ball_errors` follows the definition in 160-bit balls from exact dot products; `dense_attention` is plain NumPy;
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


def ball_errors(q, k, left, right, *, scale, key_bias=None, causal=False, offset=0, rows=None):
    """[(lower, upper)] of sum_j |P_ij - (left right^T)_ij| as 160-bit arb ends, by the definition."""
    q, k, left, right = (rationals(x) for x in (q, k, left, right))
    bias = [0.0] * len(k) if key_bias is None else [float(b) for b in key_bias]
    may = allowed(len(q), len(k), causal, offset)
    ends = []
    with flint.ctx.workprec(160):
        for i in range(len(q)) if rows is None else rows:
            logits = {
                j: arb(exact_dot(q[i], k[j])) * arb(scale) + arb(bias[j])
                for j in range(len(k))
                if may[i, j] and bias[j] > -math.inf
            }
            top = arb(max(float(x) for x in logits.values()))
            weights = {j: (x - top).exp() for j, x in logits.items()}
            total = sum(weights.values(), arb(0))
            error = arb(0)
            for j in range(len(k)):
                if may[i, j]:
                    p = weights[j] / total if j in weights else arb(0)
                    error += abs(p - arb(exact_dot(left[i], right[j])))
            ends.append((error.lower(), error.upper()))
    return ends


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
