"""Attention through domain features: time and memory against the number of tokens.

    python benchmarks/domain.py [--n 10000 100000 1000000] [--dim 4] [--width 2] [--eps 0.1]

Queries and keys fill two balls with |scale| query_radius key_radius = width. One JSON line for each n: seconds of
`DomainCertificate.apply` (features of every token, running sums, outputs; one BLAS thread), its peak memory beyond
the arrays, and at the smallest n exact attention in NumPy blocks of the same process. Last the exponent of a
power-law fit of seconds over n, and the proved bound, which holds for every head of the domain.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import threadpoolctl

import rankcert


def ball(rng: np.random.Generator, count: int, dim: int, radius: float) -> np.ndarray:
    x = rng.normal(size=(count, dim))
    x *= (radius * rng.random(count) ** (1 / dim) / np.linalg.norm(x, axis=1))[:, None]
    return x


def exact_attention(q: np.ndarray, k: np.ndarray, values: np.ndarray) -> np.ndarray:
    """softmax(q k^T) values, 256 rows at a time."""
    out = np.empty((q.shape[0], values.shape[1]))
    for start in range(0, q.shape[0], 256):
        rows = slice(start, start + 256)
        logits = q[rows] @ k.T
        np.exp(logits - logits.max(axis=1, keepdims=True), out=logits)
        out[rows] = logits @ values / logits.sum(axis=1, keepdims=True)
    return out


def measure(n: int, args: argparse.Namespace) -> dict:
    rng = np.random.default_rng(0)
    certificate = rankcert.certify_domain(args.dim, 1.0, args.width, scale=1.0, eps=args.eps)
    q, k = ball(rng, n, args.dim, 1.0), ball(rng, n, args.dim, args.width)
    values = rng.normal(size=(n, args.values))
    with threadpoolctl.threadpool_limits(1, "blas"):
        certificate.apply(q[:100], k[:100], values[:100])  # compile
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds, out = [], None
        for _ in range(args.repeats):
            del out
            started = time.perf_counter()
            out = certificate.apply(q, k, values)
            seconds.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row = {
            "benchmark": "domain",
            "n": n,
            "dim": args.dim,
            "width": args.width,
            "rank": certificate.rank,
            "bound": certificate.bound,
            "seconds": statistics.median(seconds),
            "extra_memory_mib": (after - before) / 1024,
            "output_mib": out.nbytes / 2**20,
        }
        if n == min(args.n):
            started = time.perf_counter()
            exact = exact_attention(q, k, values)
            row["exact_seconds"] = time.perf_counter() - started
            error = np.linalg.norm(out - exact, axis=1).max() / np.linalg.norm(values, axis=1).max()
            row["measured_output_error"] = error
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--dim", type=int, default=4)
    parser.add_argument("--width", type=float, default=2.0, help="half-range W of the logits")
    parser.add_argument("--eps", type=float, default=0.1)
    parser.add_argument("--values", type=int, default=64, help="columns of the values")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.n[0], args)))
        return
    rows = []
    for n in args.n:  # a process each, so that peak memory is that size's own
        sizes = [str(n)] if n == min(args.n) else [str(n), str(min(args.n))]
        command = [
            sys.executable,
            __file__,
            "--one",
            "--n",
            *sizes,
            "--dim",
            str(args.dim),
            "--width",
            str(args.width),
            "--eps",
            str(args.eps),
            "--values",
            str(args.values),
            "--repeats",
            str(args.repeats),
        ]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(json.dumps(rows[-1]), flush=True)
    if len(rows) > 1:
        exponent = np.polyfit(np.log([r["n"] for r in rows]), np.log([r["seconds"] for r in rows]), 1)[0]
        print(
            json.dumps(
                {"benchmark": "domain", "exponent": round(float(exponent), 3), "bound": rows[0]["bound"]}
            )
        )


if __name__ == "__main__":
    main()
