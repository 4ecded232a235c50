"""What `rankcert.certify` finds on real heads, and what it costs in units of the dense SVD it replaces.

    python benchmarks/ranks.py --heads DIR [--eps 0.1 0.5]

DIR holds the files that benchmarks/heads_data.py builds. One JSON line a head, eps and file, then one line a file
and eps: geometric mean of certified rank / n over all its heads, how many answers were trivial (rank = n), the
methods that won, and the median of certify's time (search and check, one thread) over numpy.linalg.svd(P)'s, both
in this process with one BLAS thread. Without --heads it says so and measures nothing.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path

import numpy as np
import threadpoolctl

import rankcert
from rankcert.problem import AttentionProblem

FILES = ("minilm", "plbert", "dinov2s", "smollm2")


def measure(q: np.ndarray, k: np.ndarray, eps: float, options: dict) -> dict:
    """One head at one tolerance."""
    attention = AttentionProblem(q, k, **options).attention_rows(slice(0, q.shape[0]))
    started = time.perf_counter()
    np.linalg.svd(attention)
    svd_seconds = time.perf_counter() - started
    started = time.perf_counter()
    certificate = rankcert.certify(q, k, eps=eps, threads=1, **options)
    seconds = time.perf_counter() - started
    return {
        "n": q.shape[0],
        "eps": eps,
        "rank": certificate.rank,
        "bound": certificate.bound,
        "method": certificate.method,
        "seconds": round(seconds, 4),
        "svd_times": round(seconds / svd_seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=Path, metavar="DIR", help="folder of the real-head files")
    parser.add_argument("--eps", type=float, nargs="+", default=[0.1, 0.5])
    parser.add_argument("--files", nargs="+", default=list(FILES), help="which of them")
    args = parser.parse_args()
    if args.heads is None:
        print(
            json.dumps({"benchmark": "ranks", "skipped": "needs --heads DIR (see benchmarks/heads_data.py)"})
        )
        return
    with threadpoolctl.threadpool_limits(1, "blas"):
        for name in args.files:
            with np.load(args.heads / f"{name}.npz") as file:
                queries, keys = file["Q"], file["K"]
                options = {"scale": float(file["scale"]), "causal": bool(file["causal"])}
            measure(queries[0, 0], keys[0, 0], args.eps[0], options)  # compile and warm up
            for eps in args.eps:
                rows = []
                for layer, head in np.ndindex(*queries.shape[:2]):
                    rows.append(measure(queries[layer, head], keys[layer, head], eps, options))
                    print(
                        json.dumps(
                            {"benchmark": "ranks", "file": name, "layer": layer, "head": head} | rows[-1]
                        ),
                        flush=True,
                    )
                ratios = [row["rank"] / row["n"] for row in rows]
                print(
                    json.dumps(
                        {
                            "benchmark": "ranks",
                            "file": name,
                            "eps": eps,
                            "heads": len(rows),
                            "causal": options["causal"],
                            "geometric_mean_rank_over_n": round(statistics.geometric_mean(ratios), 4),
                            "median_rank": statistics.median(row["rank"] for row in rows),
                            "trivial": sum(ratio >= 1 for ratio in ratios),
                            "methods": Counter(row["method"] for row in rows),
                            "median_svd_times": round(statistics.median(row["svd_times"] for row in rows), 2),
                        }
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
