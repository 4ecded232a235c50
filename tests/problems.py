"""Generated attention heads and factors, biased towards the edges where bounds break.

`draw_problem(seed, kind, ...)` is deterministic in its arguments, so that hypothesis can shrink and replay.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from oracles import dense_attention

ENTRIES = ("normal", "duplicates", "one-hot", "huge", "tiny", "subnormal", "zeros", "mixed")
BIASES = ("none", "normal", "masked", "finite-mask", "lowest", "large")
FACTORS = ("exact", "truncated", "random", "cancelling", "zero-columns", "wide", "tiny")
HINTS = ("none", "good", "off", "none", "good", "wrong")
DTYPES = ("float64", "float32", "float16", "int64")
LAYOUTS = ("C", "F", "strided", "reversed")


@dataclass(frozen=True, eq=False)
class Problem:
    """A head, factors for it, and a hint; `options` are the keyword arguments of the checker's functions."""

    q: np.ndarray
    k: np.ndarray
    left: np.ndarray
    right: np.ndarray
    hint: np.ndarray | None
    options: dict


@st.composite
def problems(draw) -> Problem:
    """Any combination of the kinds above, small enough for ball arithmetic."""
    choose = lambda kinds: draw(st.sampled_from(kinds))  # noqa: E731
    return draw_problem(
        seed=draw(st.integers(0, 2**32 - 1)),
        shape=(draw(st.integers(1, 12)), draw(st.integers(1, 16)), draw(st.integers(1, 5))),
        entries=choose(ENTRIES),
        bias=choose(BIASES),
        factors=choose(FACTORS),
        hint=choose(HINTS),
        dtype=choose(DTYPES),
        layout=choose(LAYOUTS),
        causal=draw(st.booleans()),
        offset=draw(st.integers(0, 12)),
    )


def draw_problem(seed, shape, entries, bias, factors, hint, dtype, layout, causal, offset) -> Problem:
    rng = np.random.default_rng(seed)
    n, m, d = shape
    q = _layout(_cast(_entries(rng, n, d, entries), dtype), layout)
    k = _layout(_cast(_entries(rng, m, d, entries), dtype), layout)
    key_bias = _bias(rng, m, bias)
    scale = float(rng.choice([1 / np.sqrt(d), 1.0, -0.7, 0.0, 3.0]))
    options = {"scale": scale, "key_bias": key_bias, "causal": causal, "offset": offset if causal else 0}
    p = dense_attention(q, k, **options)
    left, right = _factors(rng, p, factors)
    return Problem(q, k, left, right, _hint(rng, q, k, options, hint), options)


def _entries(rng, rows, d, kind):
    x = rng.normal(size=(rows, d))
    if kind == "duplicates":
        return x[rng.integers(0, max(1, rows // 3), size=rows)]
    if kind == "one-hot":
        return 30.0 * np.eye(max(rows, d))[:rows, :d] + 0.0
    if kind == "huge":
        return x * 10.0 ** rng.uniform(0, 2.5)
    if kind == "tiny":
        return x * 10.0 ** rng.uniform(-160, -3)
    if kind == "subnormal":
        return x * 2.0**-1060
    if kind == "zeros":
        return x * (rng.random((rows, 1)) < 0.5)
    if kind == "mixed":
        return x * 10.0 ** rng.uniform(-20, 1.5, size=(rows, d))
    return x


def _cast(x, dtype):
    if dtype == "int64":
        return np.clip(np.round(3 * x), -(10**6), 10**6).astype(np.int64)
    limit = float(np.finfo(dtype).max)
    return np.clip(x, -limit, limit).astype(dtype)


def _layout(x, layout):
    if layout == "F":
        return np.asfortranarray(x)
    if layout == "strided":
        wide = np.zeros((2 * x.shape[0], 3 * x.shape[1]), dtype=x.dtype)
        wide[::2, ::3] = x
        return wide[::2, ::3]
    if layout == "reversed":
        return np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]
    return x


def _bias(rng, m, kind):
    if kind == "none":
        return None
    bias = rng.normal(size=m)
    if kind == "large":
        return bias * 300.0
    hidden = rng.random(m) < 0.4
    hidden[0] = False  # so that every row, causal ones too, keeps a key
    value = {"masked": -np.inf, "finite-mask": rng.choice([-1e4, -1e9]), "lowest": np.finfo(np.float64).min}
    return np.where(hidden, value[kind], bias) if kind in value else bias


def _factors(rng, p, kind):
    n, m = p.shape
    u, s, vt = np.linalg.svd(p, full_matrices=False)
    r = int(rng.integers(0, s.size + 1))
    if kind == "exact":
        return p.copy(), np.eye(m)
    if kind == "truncated":
        return u[:, :r] * s[:r], vt[:r].T
    if kind == "random":
        return rng.normal(size=(n, r)) / m, rng.normal(size=(m, r))
    if kind == "cancelling":
        big = 10.0 ** rng.uniform(0, 9) * rng.normal(size=(m, 1))
        return np.hstack([p, np.ones((n, 1)), np.ones((n, 1))]), np.hstack([np.eye(m), big, -big])
    if kind == "zero-columns":
        return np.hstack([u * s, np.zeros((n, 2))]), np.hstack([vt.T, np.zeros((m, 2))])
    if kind == "wide":
        return np.repeat(p, 3, axis=1) / 3, np.repeat(np.eye(m), 3, axis=1)
    return np.full((n, 1), 1e-200), np.full((m, 1), 1e-150)


def _hint(rng, q, k, options, kind):
    if kind == "none":
        return None
    bias = np.zeros(len(k)) if options["key_bias"] is None else options["key_bias"]
    logits = options["scale"] * (np.asarray(q, np.float64) @ np.asarray(k, np.float64).T) + bias
    if options["causal"]:
        hidden = np.arange(len(k))[None, :] > np.arange(len(q))[:, None] + options["offset"]
        logits = np.where(hidden, -np.inf, logits)
    top = logits.max(axis=1)
    good = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    if kind == "off":
        return good + 10.0 ** rng.uniform(-14, -1) * rng.normal(size=good.size)
    return good if kind == "good" else good + rng.choice([-800.0, 5.0, 800.0, 1e6])
