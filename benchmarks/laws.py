"""The laws by measurement: certified ranks against beta, fitted slopes, tables, JSON and a plot.

    OMP_NUM_THREADS=1 python benchmarks/laws.py --out laws.json --plot laws.svg        all families, 20 to 30 minutes
    OMP_NUM_THREADS=1 python benchmarks/laws.py --lower --out both.json --plot both.svg  both sides, at most 2048 points
    OMP_NUM_THREADS=1 python benchmarks/laws.py --quick                                fewer points, a minute

Points are kept in --resume (default laws-points.json; with --quick in laws-points-quick.json): an interrupted run
goes on where it stopped. docs/LAWS.md says what is measured and why. Exit status 1 when a slope of a
full run is not where it should be.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rankcert.laws import FAMILIES, Report, run_laws


def print_tables(report: Report, console: Console) -> None:
    """The points, then the slopes."""
    for title, (columns, rows) in (("points", report.point_rows()), ("slopes", report.family_rows())):
        table = Table(*columns, title=f"{title} (eps = {report.eps:g})", title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), help="default: all")
    parser.add_argument("--eps", type=float, default=0.1)
    parser.add_argument("--betas", type=float, nargs="+", help="default: 2^0, 2^(1/2), .., 2^10")
    parser.add_argument("--n", type=int, help="points; default: each family's own number")
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--lower", action="store_true", help="also prove lower bounds")
    parser.add_argument("--effort", default="balanced", help="of the search for lower bounds")
    parser.add_argument("--resume", type=Path, help="file of finished points")
    parser.add_argument("--out", type=Path, help="JSON of points and slopes")
    parser.add_argument("--plot", type=Path, help="PNG or SVG (needs matplotlib)")
    args = parser.parse_args()
    started = time.perf_counter()

    def say(stage: str) -> None:
        print(f"[{time.perf_counter() - started:6.0f} s] {stage}", file=sys.stderr, flush=True)

    report = run_laws(
        args.family,
        eps=args.eps,
        betas=args.betas,
        n=args.n,
        quick=args.quick,
        lower=args.lower,
        effort=args.effort,
        resume=args.resume or Path("laws-points-quick.json" if args.quick else "laws-points.json"),
        progress=say,
    )
    print_tables(report, Console(width=140))
    if args.out is not None:
        args.out.write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n", "utf-8")
    if args.plot is not None:
        from rankcert.plots import plot_laws

        plot_laws(report, args.plot)
    missed = any(False in (report.met(family), report.met_lower(family)) for family in report.families)
    return 1 if missed and not args.quick else 0  # a quick run covers too little of beta to decide


if __name__ == "__main__":
    sys.exit(main())
