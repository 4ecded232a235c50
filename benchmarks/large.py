"""Heads too large to hold or decompose densely: what `subspace` finds, in units of the dense SVD it replaces.

    python benchmarks/large.py --heads DIR [--only dense causal huge]

DIR holds smollm2_long.npz, which benchmarks/heads_data.py builds. One JSON line a measurement, eps = 0.5:

    dense   three heads of 4096 tokens without their mask: rank and seconds at effort fast, then ranks and seconds of
            effort balanced, over those of numpy.linalg.svd in the same process, everything on one BLAS thread
    causal  the same heads at 2048 tokens with their mask, over the smallest truncated SVD that is within eps on the
            allowed pairs
    huge    n = m = 32768, Gaussian queries and keys with the mean and covariance of layer 8's, effort fast, 4 GiB:
            seconds and peak memory of a process that does nothing else

Seconds of `subspace` are those of its build, log-normalisers included and the check not; `error_est` is its own
measurement.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import threadpoolctl

import rankcert
from rankcert.checker import Engine
from rankcert.constructions import METHODS
from rankcert.constructions.svd import find_rank
from rankcert.problem import AttentionProblem

EPS = 0.5
MEMORY = 2**32
HUGE = 32768


def read_head(folder: Path, entry: int, n: int) -> tuple[np.ndarray, np.ndarray, float, int]:
    with np.load(folder / "smollm2_long.npz") as file:
        q, k = file["Q"][entry, 0, :n], file["K"][entry, 0, :n]
        return q, k, float(file["scale"]), int(file["layers"][entry])


def search(q: np.ndarray, k: np.ndarray, effort: str, **options) -> dict:
    """One build on one thread."""
    started = time.perf_counter()
    problem = AttentionProblem(q, k, engine=Engine(threads=1), **options)
    method = METHODS["subspace"].set(effort=effort)
    plan = method.plan(problem, EPS, memory=MEMORY)
    factors = method.build(problem, plan, EPS)
    seconds = time.perf_counter() - started
    return {"rank": factors.rank, "error_est": factors.error_est, "seconds": seconds} | dict(factors.details)


def measure_real(folder: Path, entry: int, n: int, causal: bool) -> None:
    q, k, scale, layer = read_head(folder, entry, n)
    options = {"scale": scale, "causal": causal}
    line: dict = {"benchmark": "large", "n": n, "layer": layer, "causal": causal, "eps": EPS}
    search(q[:128], k[:128], "balanced", **options)  # compile and warm up
    found = {effort: search(q, k, effort, **options) for effort in ("fast", "balanced")}
    problem = AttentionProblem(q, k, engine=Engine(threads=1), **options)
    attention = problem.attention_rows(slice(0, n))
    started = time.perf_counter()
    u, values, vt = np.linalg.svd(attention, full_matrices=False)
    seconds = time.perf_counter() - started
    allowed = np.tri(n, dtype=bool) if causal else None
    rank = find_rank(attention, u * values, vt, allowed, EPS - problem.rounding_est).rank
    line |= {"svd_rank": rank, "svd_seconds": round(seconds, 2)}
    for effort, result in found.items():
        line[effort] = result | {
            "seconds": round(result["seconds"], 2),
            "rank_ratio": round(result["rank"] / rank, 3),
            "svd_times": round(result["seconds"] / seconds, 3),
        }
    print(json.dumps(line), flush=True)


def gaussian_like(rows: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """n Gaussian rows with the mean and covariance of the given ones."""
    return rng.multivariate_normal(rows.mean(axis=0), np.cov(rows.T), size=n, method="cholesky")


def measure_huge(folder: Path) -> None:
    q, k, scale, layer = read_head(folder, 1, 8192)
    rng = np.random.default_rng(0)
    q, k = (gaussian_like(rows.astype(float), HUGE, rng) for rows in (q, k))
    started = time.perf_counter()
    certificate = rankcert.certify(
        q, k, eps=EPS, scale=scale, method="subspace", effort="fast", memory=MEMORY
    )
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    line = {
        "benchmark": "large",
        "n": HUGE,
        "like_layer": layer,
        "eps": EPS,
        "rank": certificate.rank,
        "bound": certificate.bound,
        "seconds": round(seconds, 1),
        "search_seconds": round(certificate.candidates[0].seconds, 1),
        "peak_GiB": round(peak, 2),
    }
    print(json.dumps(line | dict(certificate.details)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=Path, metavar="DIR", help="folder of the real-head files")
    parser.add_argument("--only", nargs="+", default=["dense", "causal", "huge"])
    parser.add_argument(
        "--in-this-process", action="store_true", help="measure huge here, for its peak memory"
    )
    args = parser.parse_args()
    if args.heads is None:
        print(
            json.dumps({"benchmark": "large", "skipped": "needs --heads DIR (see benchmarks/heads_data.py)"})
        )
        return
    if args.in_this_process:
        measure_huge(args.heads)
        return
    with threadpoolctl.threadpool_limits(1, "blas"):
        for what, n in (("causal", 2048), ("dense", 4096)):
            for entry in range(3) if what in args.only else ():
                measure_real(args.heads, entry, n, what == "causal")
    if "huge" in args.only:
        command = [sys.executable, __file__, "--heads", str(args.heads), "--in-this-process"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
