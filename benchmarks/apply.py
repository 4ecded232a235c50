"""Applying a certified factorization against exact attention by torch, both with two threads.

    python benchmarks/apply.py [--heads DIR] [--n 8192] [--rank 128] [--repeats 9]

One head of n tokens (the first of DIR/smollm2_long.npz without its mask; without --heads a generated one), factors of
the given rank from two passes of subspace iteration, proved by the checker, and n x 64 Gaussian values. One JSON line:
seconds of `Certificate.apply` and of torch's scaled_dot_product_attention (float32), interleaved, the best of
`repeats` each; their ratio; and the largest distance between the two outputs in units of the proved row bound, which
includes the rounding of the application. torch is needed: pip install torch.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import threadpoolctl

from rankcert.certificates import make_certificate
from rankcert.checker import check_rows
from rankcert.problem import AttentionProblem

THREADS = 2
BLOCK = 1024


def read(heads: Path | None, n: int) -> tuple[np.ndarray, np.ndarray, str]:
    if heads is None:
        rng = np.random.default_rng(0)
        return rng.normal(size=(n, 64)), rng.normal(size=(n, 64)), "generated"
    with np.load(heads / "smollm2_long.npz") as file:
        return file["Q"][0, 0, :n], file["K"][0, 0, :n], "smollm2_long 0, unmasked"


def factorize(problem: AttentionProblem, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """P V V^T, V an orthonormal basis from two passes of subspace iteration."""
    rng = np.random.default_rng(0)
    right = np.linalg.qr(rng.normal(size=(problem.m, rank)))[0]
    blocks = [slice(i, i + BLOCK) for i in range(0, problem.n, BLOCK)]
    for _ in range(2):
        total = np.zeros_like(right)
        for rows in blocks:
            attention = problem.attention_rows(rows)
            total += attention.T @ (attention @ right)
        right = np.linalg.qr(total)[0]
    return np.concatenate([problem.attention_rows(rows) @ right for rows in blocks]), right


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=Path, metavar="DIR", help="folder of the real-head files")
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print(json.dumps({"benchmark": "apply", "skipped": "needs torch"}))
        return
    q, k, origin = read(args.heads, args.n)
    problem = AttentionProblem(q, k)
    left, right = factorize(problem, args.rank)
    verdict = check_rows(problem.inputs, left, right, eps=2.0, log_normaliser=problem.log_normaliser)
    certificate = make_certificate(
        problem.inputs, 2.0, left, right, problem.log_normaliser, method="audit", details={}, verdict=verdict
    )
    values = np.random.default_rng(1).normal(size=(args.n, 64)).astype(np.float32)
    tensors = [torch.from_numpy(np.ascontiguousarray(x, np.float32))[None, None] for x in (q, k, values)]
    torch.set_num_threads(THREADS)
    seconds: dict[str, list[float]] = {"apply": [], "sdpa": []}
    with threadpoolctl.threadpool_limits(THREADS, "blas"), torch.inference_mode():
        for _ in range(args.repeats + 1):
            started = time.perf_counter()
            exact = torch.nn.functional.scaled_dot_product_attention(*tensors, scale=problem.inputs.scale)
            seconds["sdpa"].append(time.perf_counter() - started)
            started = time.perf_counter()
            out = certificate.apply(values)
            seconds["apply"].append(time.perf_counter() - started)
    _, bounds = certificate.apply(values, return_bound=True)
    off = np.linalg.norm(out - exact[0, 0].numpy(), axis=1)
    allowed = bounds * np.linalg.norm(values.astype(float), axis=1).max()
    best = {name: min(runs[1:]) for name, runs in seconds.items()}
    print(
        json.dumps(
            {
                "benchmark": "apply",
                "head": origin,
                "n": args.n,
                "rank": args.rank,
                "threads": THREADS,
                "bound": certificate.bound,
                "cancellation": round(certificate.cancellation, 2),
                "apply_seconds": round(best["apply"], 5),
                "sdpa_seconds": round(best["sdpa"], 5),
                "times_faster": round(best["sdpa"] / best["apply"], 1),
                "largest_distance_over_bound": round(float((off / allowed).max()), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
