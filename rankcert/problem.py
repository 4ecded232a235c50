"""The one input door: what the caller passes becomes an `AttentionProblem`.

It holds the checker's own reading of the arrays plus what constructions need again and again: the log-normalisers,
the classes of equal queries and keys, and blocks of the attention matrix. Nothing here is trusted by a verdict.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from rankcert.checker import Engine, Inputs, Verdict, check_rows, find_log_normalisers, read_inputs

__all__ = ["AttentionProblem", "Classes"]


class Classes(NamedTuple):
    """Equal rows of an array: `first[c]` is the first member of class c, `of[i]` the class of row i or -1."""

    first: np.ndarray
    of: np.ndarray


class AttentionProblem:
    """softmax(scale * q k^T + key_bias) of one head, with an optional causal mask.

    Shapes: q (n, d), k (m, d), key_bias (m,). See `rankcert.certify` for what is accepted.
    """

    def __init__(
        self, q, k, *, scale=None, key_bias=None, causal=False, offset=0, engine: Engine | None = None
    ):
        self.inputs: Inputs = read_inputs(q, k, scale=scale, key_bias=key_bias, causal=causal, offset=offset)
        self.engine = engine or Engine()

    @property
    def n(self) -> int:
        return self.inputs.n

    @property
    def m(self) -> int:
        return self.inputs.m

    @property
    def d(self) -> int:
        return self.inputs.d

    @cached_property
    def log_normaliser(self) -> np.ndarray:
        """log sum_j exp(s_ij) over kept keys, one per row (accurate to a few ulp, not proved)."""
        return find_log_normalisers(self.inputs, self.engine)

    @cached_property
    def query_classes(self) -> Classes:
        """Equal queries."""
        return _classes(self.inputs.query, np.ones(self.n, dtype=bool))

    @cached_property
    def key_classes(self) -> Classes:
        """Equal keys among the kept ones; `of` is -1 for a key no row keeps. Biases play no part."""
        return _classes(self.inputs.key, self.inputs.kept_keys)

    def attention_rows(self, rows: slice | np.ndarray) -> np.ndarray:
        """P[rows] as dense float64 (exact zeros at masked and disallowed pairs)."""
        x = self.inputs
        logits = x.scale * (x.query[rows] @ x.key.T) + x.key_bias
        hidden = np.arange(self.m) >= x.reach[rows, None]
        return np.exp(np.where(hidden, -np.inf, logits - self.log_normaliser[rows, None]))

    def check(self, left: np.ndarray, right: np.ndarray, *, eps: float | None, engine: Engine) -> Verdict:
        """The checker's word on factors of P, with the log-normalisers as its hint."""
        return check_rows(
            self.inputs, left, right, eps=eps, log_normaliser=self.log_normaliser, engine=engine
        )

    @cached_property
    def rounding_est(self) -> float:
        """About how much rounding the checker will add to a well-conditioned factorization's error."""
        x = self.inputs
        if not self.n:
            return 0.0
        finite = x.key_bias[x.kept_keys]
        size = abs(x.scale) * np.sqrt((x.query**2).sum(1)) * np.sqrt((x.key**2).sum(1).max())
        terms = (x.d + 3) * size + np.abs(self.log_normaliser) + 2 * min(np.abs(finite).max(), 360.0) + 400
        return float(np.finfo(float).eps * terms.max())


def _classes(rows: np.ndarray, kept: np.ndarray) -> Classes:
    of = np.full(rows.shape[0], -1, dtype=np.int64)
    chosen = np.flatnonzero(kept)
    data, width = (rows[chosen] + 0.0).tobytes(), rows.itemsize * rows.shape[1]  # + 0.0: -0.0 equals 0.0
    seen: dict[bytes, int] = {}
    members = [seen.setdefault(data[at : at + width], len(seen)) for at in range(0, len(data), width)]
    of[chosen] = members
    return Classes(chosen[np.unique(members, return_index=True)[1]], of)
