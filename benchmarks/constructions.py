"""The rank of every construction beside that of the dense SVD, over generated and real heads.

    python benchmarks/constructions.py [--eps 0.1] [--quick] [--heads DIR]
    python benchmarks/constructions.py --million        # pivots on 10^4 .. 10^6 tokens, d = 4, no n x m pass

One JSON line a head: the rank of every construction whose factors the checker proved, "trivial" where it is min(n, m)
or more, the reason where there is none, and what `auto` returns. Generated heads: q, k uniform on the sphere of R^d
with logits beta <q, k>, and heads with an attention sink and hot rows. Real heads: those shipped with the package, and
with --heads those of the files that benchmarks/heads_data.py builds (without, it says so). The last lines are geometric
means of rank / SVD rank over the heads where both are below trivial.
"""

import argparse
import json
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import threadpoolctl

import rankcert
from rankcert.checker import check_rows
from rankcert.constructions import METHODS
from rankcert.constructions.pivots import pivot_features
from rankcert.heads import EXAMPLES
from rankcert.problem import AttentionProblem

DIMENSIONS = (2, 3, 4, 6, 8)
BETAS = (0.5, 2.0, 8.0, 32.0, 64.0)
LARGE = ((2, 8.0, 1024), (2, 64.0, 1024), (3, 8.0, 1024), (2, 8.0, 4096), (4, 2.0, 4096))
FILES = ("minilm", "plbert", "dinov2s", "smollm2")
MEMORY = 2**31
ROW_CHECKED = 10**10  # pairs up to which pivots are proved by the row check


def sphere(n: int, d: int, beta: float) -> AttentionProblem:
    points = np.random.default_rng(d).normal(size=(2, n, d))
    q, k = points / np.linalg.norm(points, axis=2, keepdims=True)
    return AttentionProblem(q, k, scale=beta)


def sink(n: int, d: int, beta: float) -> AttentionProblem:
    """Short keys, one long one that every row looks at, and three hot rows."""
    rng = np.random.default_rng(d)
    q, k = rng.normal(size=(n, d)), 0.3 * rng.normal(size=(n, d))
    q[:, 0] += 3.0
    k[0], k[0, 0] = 0.0, 6.0
    q[5:8] *= 4.0
    return AttentionProblem(q, k, scale=beta)


def generated(quick: bool) -> Iterator[tuple[dict, AttentionProblem]]:
    for d in DIMENSIONS:
        for beta in BETAS:
            yield {"head": "sphere", "n": 256, "d": d, "beta": beta}, sphere(256, d, beta)
        yield {"head": "sink", "n": 256, "d": d, "beta": 0.5}, sink(256, d, 0.5)
    for d, beta, n in () if quick else LARGE:
        yield {"head": "sphere", "n": n, "d": d, "beta": beta}, sphere(n, d, beta)


def real(folder: Path | None) -> Iterator[tuple[dict, AttentionProblem]]:
    for name in EXAMPLES:
        head = rankcert.example_head(name)
        label = {"head": name, "n": len(head.q), "d": head.q.shape[1]}
        yield label, AttentionProblem(head.q, head.k, **head.options())
    if folder is None:
        skipped = f"{', '.join(FILES)}: need --heads DIR"
        print(json.dumps({"benchmark": "constructions", "skipped": skipped}), flush=True)
        return
    for name in FILES:
        with np.load(folder / f"{name}.npz") as file:
            queries, keys = file["Q"], file["K"]
            options = {"scale": float(file["scale"]), "causal": bool(file["causal"])}
        for layer, head in np.ndindex(*queries.shape[:2]):
            q, k = queries[layer, head], keys[layer, head]
            label = {"head": name, "layer": layer, "number": head, "n": len(q), "d": q.shape[1]}
            yield label, AttentionProblem(q, k, **options)


def measure(problem: AttentionProblem, eps: float) -> dict[str, int | str]:
    """The proved rank of every construction, or why there is none."""
    found: dict[str, int | str] = {}
    for name, construction in METHODS.items():
        plan = construction.plan(problem, eps, memory=MEMORY)
        if plan.rank is not None and plan.rank >= min(problem.n, problem.m):
            found[name] = "trivial"
        elif plan.refusal:
            found[name] = plan.refusal
        else:
            factors = construction.build(problem, plan, eps)
            verdict = check_rows(
                problem.inputs, factors.left, factors.right, eps=eps, log_normaliser=problem.log_normaliser
            )
            trivial = factors.rank >= min(problem.n, problem.m)
            found[name] = (
                ("trivial" if trivial else factors.rank) if verdict else f"not proved: {verdict.bound:.3g}"
            )
    return found


def certify(problem: AttentionProblem, eps: float) -> dict:
    x = problem.inputs
    started = time.perf_counter()
    certificate = rankcert.certify(
        x.query, x.key, eps=eps, scale=x.scale, key_bias=x.key_bias, causal=x.causal, offset=x.offset
    )
    seconds = time.perf_counter() - started
    return {"rank": certificate.rank, "method": certificate.method, "seconds": round(seconds, 2)}


def compare(args: argparse.Namespace) -> None:
    ratios: dict[str, list[float]] = defaultdict(list)
    trivial: dict[str, int] = defaultdict(int)
    heads = 0
    for source in (generated(args.quick), real(args.heads)):
        for label, problem in source:
            for eps in args.eps:
                ranks = measure(problem, eps)
                auto = certify(problem, eps)
                line = {"benchmark": "constructions"} | label | {"eps": eps, "ranks": ranks, "auto": auto}
                print(json.dumps(line), flush=True)
                heads += 1
                base = ranks["svd"]
                for name, rank in [*ranks.items(), ("auto", auto["rank"])]:
                    trivial[name] += rank == "trivial"
                    if isinstance(rank, int) and isinstance(base, int):
                        ratios[name].append(rank / base)
    for name in [*METHODS, "auto"]:
        summary = {
            "benchmark": "constructions",
            "method": name,
            "heads": heads,
            "compared": len(ratios[name]),
        }
        if ratios[name]:
            summary["geometric_mean_over_svd"] = round(statistics.geometric_mean(ratios[name]), 3)
        print(json.dumps(summary | {"trivial": trivial[name]}), flush=True)


def measure_million(eps: float) -> int:
    """Exit status 1 when a size is too large for the row check: its `bound_est` is then all there is, and no proof."""
    sizes, times = (10_000, 30_000, 100_000, 300_000, 1_000_000), []
    rng = np.random.default_rng(0)
    for n in sizes:
        points = rng.normal(size=(2, n, 4))
        q, k = points / np.linalg.norm(points, axis=2, keepdims=True)
        started = time.perf_counter()
        features = pivot_features(q, k, eps=eps, scale=2.0)
        times.append(time.perf_counter() - started)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        line = {
            "benchmark": "pivots",
            "n": n,
            "d": 4,
            "scale": 2.0,
            "eps": eps,
            "rank": features.rank,
            "bound_est": features.bound_est,
            "seconds": round(times[-1], 2),
            "peak_bytes_over_factors": round(peak / (16 * n * features.rank), 2),
        }
        if n * n <= ROW_CHECKED:
            line["bound"] = rankcert.audit(q, k, features.left, features.right, scale=2.0).bound
        print(json.dumps(line), flush=True)
    slope = np.polyfit(np.log(sizes), np.log(times), 1)[0]
    print(json.dumps({"benchmark": "pivots", "seconds_exponent": round(float(slope), 3)}), flush=True)
    return int(max(sizes) ** 2 > ROW_CHECKED)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--eps", type=float, nargs="+", default=[0.1])
    parser.add_argument("--heads", type=Path, metavar="DIR", help="folder of the real-head files")
    parser.add_argument("--quick", action="store_true", help="no head of more than 256 tokens but real ones")
    parser.add_argument(
        "--million", action="store_true", help="pivots without an n x m pass, up to a million tokens"
    )
    args = parser.parse_args()
    with threadpoolctl.threadpool_limits(1, "blas"):
        if args.million:
            raise SystemExit(measure_million(args.eps[0]))
        else:
            compare(args)


if __name__ == "__main__":
    main()
