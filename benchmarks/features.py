"""Monomial features written into a reused tile, against scikit-learn's PolynomialFeatures.

Prints one JSON object a line: first the comparison (rankcert by tiles, scikit-learn in C and in Fortran order, same
points, same run, interleaved, medians), then rankcert alone at growing row counts, whose nanoseconds per entry
should not grow. scikit-learn writes the same monomials unscaled, into one array it allocates.

    OMP_NUM_THREADS=1 python benchmarks/features.py --dimension 16 --degree 3 --rows 20000
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from sklearn.preprocessing import PolynomialFeatures

from rankcert.kernels.monomials import write_features
from rankcert.kernels.table import count_monomials, monomial_table


def write_tiles(points: np.ndarray, degree: int, tile: np.ndarray) -> None:
    """All features of all points, each tile overwriting the last."""
    table = monomial_table(points.shape[1], degree)
    for start in range(0, points.shape[0], tile.shape[0]):
        part = points[start : start + tile.shape[0]]
        write_features(part, table.runs, table.factor, tile[: part.shape[0]])


def median_seconds(contestants: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median wall time of each, taking turns, after one turn that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, run in contestants.items():
            begun = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dimension", type=int, default=16)
    parser.add_argument("--degree", type=int, default=3)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the comparison")
    parser.add_argument("--tile-rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--largest", type=int, default=10**6, help="rows of the last run of rankcert alone")
    args = parser.parse_args()

    columns = count_monomials(args.dimension, args.degree)
    tile = np.empty((args.tile_rows, columns))
    rng = np.random.default_rng(0)
    points = rng.normal(size=(args.rows, args.dimension))
    others = {order: PolynomialFeatures(args.degree, order=order).fit(points) for order in "CF"}
    medians = median_seconds(
        {
            "rankcert": lambda: write_tiles(points, args.degree, tile),
            "sklearn_C": lambda: others["C"].transform(points),
            "sklearn_F": lambda: others["F"].transform(points),
        },
        args.repeats,
    )
    shape = {"dimension": args.dimension, "degree": args.degree, "columns": columns}
    ratios = {f"times_{name}": medians[name] / medians["rankcert"] for name in ("sklearn_C", "sklearn_F")}
    seconds = {f"{name}_seconds": value for name, value in medians.items()}
    print(json.dumps(shape | {"rows": args.rows, "repeats": args.repeats} | seconds | ratios), flush=True)

    rows = args.largest
    counts = []
    while rows >= 1000:
        counts.append(rows)
        rows //= 10
    for count in reversed(counts):
        points = rng.normal(size=(count, args.dimension))
        taken = median_seconds({"rankcert": lambda p=points: write_tiles(p, args.degree, tile)}, 3)[
            "rankcert"
        ]
        per_entry = 1e9 * taken / (count * columns)
        print(
            json.dumps(shape | {"rows": count, "rankcert_seconds": taken, "ns_per_entry": per_entry}),
            flush=True,
        )


if __name__ == "__main__":
    main()
