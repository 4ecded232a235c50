"""Generated attention heads and the plain NumPy statements the constructions are held to.

A head is drawn as a few integers (so that Hypothesis can shrink it) from which a seeded generator makes the arrays.
The oracles are plain NumPy and share no code with the package.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from oracles import allowed, dense_attention

from rankcert.checker import check_rows
from rankcert.problem import AttentionProblem


@dataclass
class Head:
    """q (n, d), k (m, d) and the options of an AttentionProblem."""

    q: np.ndarray
    k: np.ndarray
    options: dict[str, Any]

    def problem(self) -> AttentionProblem:
        return AttentionProblem(self.q, self.k, **self.options)

    @property
    def counted(self) -> np.ndarray:
        """Pairs on which an error counts: all but those a causal mask disallows."""
        return allowed(
            len(self.q), len(self.k), self.options.get("causal", False), self.options.get("offset", 0)
        )

    @property
    def kept(self) -> np.ndarray:
        """Pairs that carry weight."""
        bias = self.options.get("key_bias")
        return self.counted if bias is None else self.counted & (bias > -np.inf)

    @property
    def logits(self) -> np.ndarray:
        """scale <q_i, k_j>; NaN at pairs that are not kept."""
        scale = self.options.get("scale")
        scale = self.q.shape[1] ** -0.5 if scale is None else scale
        return np.where(
            self.kept, scale * (self.q @ np.where(self.kept.any(axis=0)[:, None], self.k, 0.0).T), np.nan
        )

    @property
    def widest(self) -> float:
        """The largest spread of the kept logits of a row."""
        return float((np.nanmax(self.logits, axis=1) - np.nanmin(self.logits, axis=1)).max())

    @property
    def attention(self) -> np.ndarray:
        """The softmax matrix, zero where nothing is kept."""
        return dense_attention(self.q, self.k, **self.options)

    def error(self, left: np.ndarray, right: np.ndarray) -> float:
        """max_i sum_j |P_ij - (left right^T)_ij| over the pairs that count."""
        return float(np.abs(self.attention - left @ right.T).sum(axis=1, where=self.counted).max())


@st.composite
def heads(draw, rows: int = 9, columns: int = 9, width: int = 3, size: float = 1.5) -> Head:
    """Heads of up to the given shape: repeated rows, biases with -inf, causal masks with offsets, several scales."""
    n, m, d = draw(st.integers(1, rows)), draw(st.integers(1, columns)), draw(st.integers(1, width))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 0.1, size]))
    q, k = spread * rng.normal(size=(n, d)), spread * rng.normal(size=(m, d)) + rng.normal(size=d)
    if draw(st.booleans()):
        q, k = q[rng.integers(n, size=n)], k[rng.integers(m, size=m)]
    options: dict[str, Any] = {"scale": draw(st.sampled_from([None, 1.0, -0.5, 0.0]))}
    if draw(st.booleans()):
        bias = draw(st.sampled_from([0.5, 3.0])) * rng.normal(size=m)
        bias[1:][rng.random(m - 1) < draw(st.sampled_from([0.0, 0.4]))] = -np.inf
        options["key_bias"] = bias
    if draw(st.booleans()):
        options |= {"causal": True, "offset": draw(st.integers(0, m))}
    return Head(q, k, options)


def build(construction, head: Head, eps: float, *, memory: int = 2**28):
    """Plan, build and return (problem, plan, factorization); the plan must not refuse and must count right."""
    problem = head.problem()
    plan = construction.plan(problem, eps, memory=memory)
    assert plan.refusal is None, plan.refusal
    factors = construction.build(problem, plan, eps)
    assert factors.left.shape == (problem.n, factors.rank) and factors.right.shape == (
        problem.m,
        factors.rank,
    )
    assert plan.rank in (None, factors.rank) and factors.method == construction.name
    assert np.isfinite(factors.left).all() and np.isfinite(factors.right).all()
    return problem, plan, factors


def is_proved(problem: AttentionProblem, factors, eps: float) -> bool:
    """The checker's word on it."""
    return bool(check_rows(problem.inputs, factors.left, factors.right, eps=eps))


def check_polynomial(construction, head: Head, eps: float) -> None:
    """What Lemma 6 promises of any approximant: the row error is at most rho, whatever biases and masks there are."""
    problem, plan, factors = build(construction, head, eps)
    assert factors.error_est == plan.state.rho_est <= eps
    assert head.error(factors.left, factors.right) <= plan.state.rho_est * (1 + 1e-9) + 1e-11
    assert is_proved(problem, factors, eps)
