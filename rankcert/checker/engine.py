"""How the checker walks over an n x m problem: row tiles by column blocks, several threads, bounded memory.

Never more than one tile of one block is held per thread. The column blocks are those of the kernel's summation
(PROOFS.md, Lemma 4), so neither the number of threads nor the tile height changes what is added in which order.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue

import numpy as np
from threadpoolctl import ThreadpoolController

from rankcert.checker import _kernel
from rankcert.checker.errors import InvalidInput, RankcertError
from rankcert.checker.kernel import BLOCK, LANES, VARIANTS, default_variant, require_safe_arithmetic

__all__ = ["Engine", "ProductFault", "blas_threads", "processors", "sweep"]

SPOTS = 1000  # entries of each matrix product that are recomputed by a plain loop, per sweep
SMALL = 2.0e7  # multiply-adds below which starting threads costs more than it gains

Progress = Callable[[int, int], None]


class ProductFault(RankcertError):
    """The BLAS returned an entry that no conventional matrix product can return."""


@dataclass(frozen=True)
class Engine:
    """How to compute, never what: the same statement is proved whatever is chosen here.

    gemm: "blas" (NumPy's matrix product, spot-checked) or "portable" (the kernel's own loops, no BLAS).
    threads: row tiles worked on at once; None takes the processors this process may use. While a sweep runs,
    BLAS itself is limited to one thread.
    tile_rows: rows of a tile. progress: called as progress(rows done, rows in all).
    """

    gemm: str = "blas"
    threads: int | None = None
    tile_rows: int = 128
    progress: Progress | None = None
    variant: str = field(default_factory=default_variant)

    def __post_init__(self):
        if self.gemm not in ("blas", "portable"):
            raise InvalidInput(f'gemm must be "blas" or "portable", got {self.gemm!r}')
        if self.variant not in VARIANTS:
            raise InvalidInput(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")
        for name in ("threads", "tile_rows"):
            value = getattr(self, name)
            if not (name == "threads" and value is None) and not (isinstance(value, int) and value >= 1):
                raise InvalidInput(f"{name} must be a positive integer, got {value!r}")

    @property
    def thread_count(self) -> int:
        """How many threads `threads` means on this machine."""
        return self.threads or processors()

    def describe(self) -> str:
        """One line for the verdict: what has to be trusted beyond the checker's source."""
        gemm = "NumPy's BLAS, spot-checked" if self.gemm == "blas" else "own loops"
        return f"float64, {self.variant} kernel, matrix products by {gemm}"


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def blas_threads(count: int):
    """A context in which BLAS uses that many threads; 1 for work that is spread over threads already."""
    return _controller().limit(limits=count, user_api="blas")


def sweep(
    reach: np.ndarray,
    engine: Engine,
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    visit: Callable[[slice, slice, list[np.ndarray], np.ndarray], None],
) -> None:
    """Call visit(rows, columns, products, reach) for every tile and block that some row reaches.

    `reach` (n,), not decreasing, is how many leading columns each row may see. `products` are left[rows] @
    right[columns].T for each (left, right) of `pairs`, in buffers that are reused, and visit's `reach` is how many of
    the block's columns each row may see. The blocks of one tile come in order of columns, in one thread. Raises
    UnsafeArithmetic, or ProductFault when a spot check fails.
    """
    n, m = reach.size, pairs[0][1].shape[0]
    pairs = [_without_zero_columns(left, right) for left, right in pairs]
    threads = engine.thread_count
    if n * m * sum(left.shape[1] for left, _ in pairs) < SMALL:
        threads = 1
    height = max(1, min(engine.tile_rows, -(-n // threads)))
    width = min(BLOCK, -(-m // LANES) * LANES)
    tiles = [slice(i, min(i + height, n)) for i in range(0, n, height)]
    spots = -(-SPOTS // max(1, len(tiles) * -(-m // BLOCK)))

    free: SimpleQueue[list[np.ndarray]] = SimpleQueue()  # one set of buffers a thread
    for _ in range(threads):
        free.put([np.empty((height, width)) for _ in pairs])

    def work(rows: slice) -> int:
        require_safe_arithmetic()
        buffers = free.get()
        seen = reach[rows]
        for start in range(0, int(seen[-1]), BLOCK):
            columns = slice(start, min(start + BLOCK, m))
            products = []
            for (left, right), buffer in zip(pairs, buffers, strict=True):
                product = _product(left[rows], right[columns], buffer, engine)
                if engine.gemm == "blas":
                    _spot_check(left[rows], right[columns], product, spots, rows.start * m + start)
                products.append(product)
            visit(rows, columns, products, np.clip(seen - start, 0, columns.stop - start))
        free.put(buffers)
        return rows.stop

    with ExitStack() as stack:
        stack.enter_context(blas_threads(1))
        run = map if threads == 1 else stack.enter_context(ThreadPoolExecutor(threads)).map
        for done in run(work, tiles):  # in order; an exception or Ctrl-C cancels the tiles not yet begun
            if engine.progress is not None:
                engine.progress(done, n)


def _without_zero_columns(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same product with fewer columns: those that are zero on either side add exact zeros (Lemma 2)."""
    useful = left.any(axis=0) & right.any(axis=0)
    if useful.all():
        return left, right
    useful[0] |= not useful.any()
    return np.ascontiguousarray(left[:, useful]), np.ascontiguousarray(right[:, useful])


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _product(left: np.ndarray, right: np.ndarray, buffer: np.ndarray, engine: Engine) -> np.ndarray:
    out = buffer[: left.shape[0], : right.shape[0]]
    if engine.gemm == "blas":
        return np.matmul(left, right.T, out=out)
    panels = -(-right.shape[0] // LANES)
    packed = np.zeros((panels, right.shape[1], LANES))
    for panel in range(panels):
        chunk = right[panel * LANES : (panel + 1) * LANES]
        packed[panel, :, : chunk.shape[0]] = chunk.T
    _kernel.product(engine.variant, left, packed, buffer[: left.shape[0]])
    return out


def _spot_check(left: np.ndarray, right: np.ndarray, product: np.ndarray, spots: int, seed: int) -> None:
    faults = _kernel.spot_faults(left, right, product, seed, spots)
    if faults:
        raise ProductFault(
            f"{faults} of {spots} spot-checked entries in one block of a matrix product are wrong: "
            "this BLAS cannot be trusted; use gemm='portable'"
        )
