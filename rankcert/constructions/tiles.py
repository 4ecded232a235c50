"""P by row tiles, computed again whenever they are needed: what the constructions for large heads work on."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event, local
from typing import TypeVar

import numpy as np

from rankcert.checker.engine import blas_threads
from rankcert.problem import AttentionProblem

__all__ = ["Tiles", "accumulate"]

HEIGHT = 256  # rows of a tile: matrix products want many, the cache few
PANEL = 1024  # columns of a product that is added somewhere: its temporary stays in cache
SMALL = 2**20  # pairs below which starting threads costs more than it gains
PRODUCT_ROUNDING = 1e-6  # what single precision adds to a row's measured error
ROUGH = 1e-3  # share of eps that single precision may cost; else everything is float64

Total = TypeVar("Total")


class Tiles:
    """The rows of P over its kept keys, in tiles of `dtype`, with exact zeros at disallowed pairs.

    Tiles are computed when asked for, and with `hold` kept for the next time; nobody may write to them.

    kept (m',): the keys some row keeps. counts (n,): how many of them, from the first, row i may see; never
    decreasing. target: what row errors must not exceed so that the checker will agree, single precision included.
    """

    def __init__(self, problem: AttentionProblem, eps: float, *, hold: bool = False):
        x = problem.inputs
        self.problem = problem
        self.kept = np.flatnonzero(x.kept_keys)
        self.n, self.m = problem.n, self.kept.size
        self.counts = np.searchsorted(self.kept, x.reach)
        self.causal = bool(self.counts[0] < self.m)
        key = x.key[self.kept]
        centre = key.mean(axis=0)  # a row's logits may be shifted: smaller ones have smaller rounding errors
        key -= centre
        shift = problem.log_normaliser - x.scale * (x.query @ centre)
        size = abs(x.scale) * np.sqrt((x.query**2).sum(axis=1) * (key**2).sum(axis=1).max())
        noise = 2.0**-24 * float((4 * size + 2 * np.abs(shift)).max())
        single = noise <= ROUGH * eps
        self.dtype = np.dtype(np.float32 if single else np.float64)
        self.target = eps - problem.rounding_est - (noise + PRODUCT_ROUNDING if single else 0.0)
        # bias and normaliser as two more coordinates: the product is the exponent
        self._query = np.empty((self.n, x.d + 2), self.dtype)
        self._query[:, :-2] = x.scale * x.query
        self._query[:, -2], self._query[:, -1] = 1.0, -shift
        self._key = np.empty((x.d + 2, self.m), self.dtype)
        with np.errstate(over="ignore"):  # a bias below the range of float32 is one of -inf
            self._key[:-2], self._key[-2], self._key[-1] = key.T, x.key_bias[self.kept], 1.0
        self._buffers = local()
        self._held: dict[tuple[int, int], np.ndarray] | None = {} if hold else None
        self.threads = problem.engine.thread_count
        if self.n * self.m < SMALL:
            self.threads = 1

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return max(1, min(HEIGHT, self.n))

    def rows(self, rows: slice | np.ndarray, name: str = "") -> np.ndarray:
        """P[rows], as far as its last row sees (`rows` ascending); in the thread's buffer of that name, if any."""
        place = (rows.start, rows.stop) if isinstance(rows, slice) and self._held is not None else None
        if place is not None and place in self._held:
            return self._held[place]
        counts = self.counts[rows]
        tile = self.buffer(name, counts.size, int(counts[-1])) if name and place is None else None
        tile = np.matmul(self._query[rows], self._key[:, : counts[-1]], out=tile)
        np.exp(tile, out=tile)
        self.hide(tile, counts)
        if place is not None:
            self._held[place] = tile
        return tile

    def buffer(self, name: str, rows: int, columns: int) -> np.ndarray:
        """An array of this thread, with anything in it, which the next call with that name will overwrite."""
        held = vars(self._buffers)  # of this thread alone
        if name not in held:
            held[name] = np.empty(self.height * self.m, self.dtype)
        return held[name][: rows * columns].reshape(rows, columns)

    @staticmethod
    def hide(tile: np.ndarray, counts: np.ndarray) -> None:
        """Set to zero what row i of the tile has beyond its first counts[i] entries."""
        first = counts[0]
        if first < tile.shape[1]:
            tile[:, first:][np.arange(first, tile.shape[1]) >= counts[:, None]] = 0.0

    def sweep(
        self,
        begin: Callable[[int], Total],
        visit: Callable[[slice, np.ndarray, Total], None],
    ) -> list[Total]:
        """visit(rows, P[rows], total) for every tile; each thread has one stretch of rows and one total = begin(its
        first row). The totals come back in the order of their rows, so that sums over them depend on the number of
        threads only."""
        stop = Event()

        def work(stretch: slice) -> Total:
            total = begin(stretch.start)
            for start in range(stretch.start, stretch.stop, self.height):
                if stop.is_set():
                    break
                rows = slice(start, min(start + self.height, stretch.stop))
                visit(rows, self.rows(rows, "tile"), total)
            return total

        stretches = list(self._stretches())
        with ExitStack() as stack:
            stack.enter_context(blas_threads(1))
            if len(stretches) == 1:
                return [work(stretches[0])]
            pool = stack.enter_context(ThreadPoolExecutor(len(stretches)))
            stack.callback(stop.set)  # leaving early, by Ctrl-C: the threads end after their tile
            return list(pool.map(work, stretches))

    def _stretches(self) -> Iterator[slice]:
        """Contiguous rows with about equally many pairs, one stretch a thread."""
        pairs = np.cumsum(self.counts)
        ends = np.searchsorted(pairs, pairs[-1] * np.arange(1, self.threads + 1) / self.threads)
        start = 0
        for end in np.minimum(ends + 1, self.n):
            if end > start:
                yield slice(start, int(end))
                start = int(end)


def accumulate(total: np.ndarray, tile: np.ndarray, rows: np.ndarray) -> None:
    """total[: width of the tile] += tile^T rows, without a temporary of its size."""
    for start in range(0, tile.shape[1], PANEL):
        panel = tile[:, start : start + PANEL]
        total[start : start + panel.shape[1]] += panel.T @ rows
