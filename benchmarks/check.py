"""How long a whole check takes, in units of the two matrix products it cannot avoid.

    python benchmarks/check.py [--n 8192 32768] [--d 64] [--r 64] [--threads 2]

One JSON line a measurement: the whole check (reading and hashing the inputs, spot checks, bound) over the time of
the two bare float64 products of the same tiles in as many threads, both timed in turn in this process; the median
of the ratios, with normaliser hints and without. A second process measures the peak memory beyond inputs and
factors.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import threadpoolctl

from rankcert import audit
from rankcert.checker import Engine, find_log_normalisers, read_inputs
from rankcert.checker.kernel import BLOCK, default_variant


def make_problem(n: int, d: int, r: int, seed: int = 0):
    """q, k, left, right: standard normal logits, and factors of the size that attention matrices have."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(n, d)), rng.normal(size=(n, d))
    return q, k, rng.random(size=(n, r)) / n, rng.random(size=(n, r))


def bare_products(q, k, left, right, threads: int) -> float:
    """Seconds for q k^T and left right^T, tile by tile into reused buffers, and nothing else."""
    height, n = Engine().tile_rows, q.shape[0]
    buffers = [np.empty((2, height, BLOCK)) for _ in range(threads)]

    def work(thread: int) -> None:
        s, t = buffers[thread]
        for i in range(thread * height, n, threads * height):
            rows = slice(i, i + height)
            count = q[rows].shape[0]
            for j in range(0, n, BLOCK):
                columns = slice(j, j + BLOCK)
                width = k[columns].shape[0]
                np.matmul(q[rows], k[columns].T, out=s[:count, :width])
                np.matmul(left[rows], right[columns].T, out=t[:count, :width])

    with threadpoolctl.threadpool_limits(1, "blas"), ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(work, range(threads)))
        return time.perf_counter() - started


def whole_check(q, k, left, right, hint, threads: int) -> float:
    """Seconds for an audit of caller's arrays: read, hash, bound every row."""
    started = time.perf_counter()
    verdict = audit(q, k, left, right, eps=0.5, log_normaliser=hint, threads=threads)
    seconds = time.perf_counter() - started
    assert np.isfinite(verdict.bound)
    return seconds


def peak_memory(n: int, d: int, r: int, threads: int, hinted: bool) -> float:
    """MiB by which an audit raises this process's peak, run after the arrays exist and the BLAS is warm."""
    arrays = make_problem(n, d, r)
    small = make_problem(1024, d, r)
    hint = find_log_normalisers(read_inputs(*small[:2]))
    whole_check(*small, hint, threads)  # compile, load and warm everything once
    hint = np.full(n, np.log(n) + 0.5) if hinted else None
    # the peak so far includes generating the arrays; fill memory up to it, so that only what comes on top counts
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024
    ballast = np.ones(max(0, before - resident) * 1024, dtype=np.uint8)
    audit(*arrays, log_normaliser=hint, threads=threads)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    del ballast
    return (after - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, nargs="+", default=[8192, 32768], help="rows and columns")
    parser.add_argument("--d", type=int, default=64, help="head width")
    parser.add_argument("--r", type=int, default=64, help="rank of the factors")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--repeats", type=int, default=7, help="measurements of each kind (3 beyond n = 16384)"
    )
    parser.add_argument("--measure-memory", choices=["hinted", "unhinted"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_memory:
        print(peak_memory(args.n[0], args.d, args.r, args.threads, args.measure_memory == "hinted"))
        return
    for n in args.n:
        arrays = make_problem(n, args.d, args.r)
        hint = find_log_normalisers(read_inputs(*arrays[:2]))
        rounds = [
            (
                bare_products(*arrays, args.threads),
                whole_check(*arrays, hint, args.threads),
                whole_check(*arrays, None, args.threads),
            )
            for _ in range(args.repeats if n <= 16384 else min(3, args.repeats))
        ]
        memory = [
            float(
                subprocess.run(
                    [
                        sys.executable,
                        __file__,
                        "--n",
                        str(n),
                        "--d",
                        str(args.d),
                        "--r",
                        str(args.r),
                        "--threads",
                        str(args.threads),
                        "--measure-memory",
                        kind,
                    ],
                    check=True,
                    capture_output=True,
                    text=True,
                ).stdout
            )
            for kind in ("hinted", "unhinted")
        ]
        print(
            json.dumps(
                {
                    "benchmark": "check",
                    "n": n,
                    "m": n,
                    "d": args.d,
                    "r": args.r,
                    "threads": args.threads,
                    "variant": default_variant(),
                    "products_seconds": round(statistics.median(r[0] for r in rounds), 4),
                    "ratio_with_hints": round(statistics.median(r[1] / r[0] for r in rounds), 3),
                    "ratio_without_hints": round(statistics.median(r[2] / r[0] for r in rounds), 3),
                    "extra_memory_mib_with_hints": round(memory[0], 1),
                    "extra_memory_mib_without_hints": round(memory[1], 1),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
