"""Certified ranks of every real head, against the SVD's: what was proved, what it cost, who won, what was trivial.

    python benchmarks/heads.py --heads DIR --resume FOLDER [--out FOLDER] [--workers 2] [--brackets]

DIR holds the files that benchmarks/heads_data.py builds. Every head of each is certified at eps 0.1 and 0.5: with
effort balanced at temperatures 1, 0.5 and 2, with effort high at temperature 1, with effort max at temperature 1 on
every sixth head. One JSON line a file, effort, temperature and eps (rankcert.survey.Summary says what stands in it;
above a causal mask neither factorization's errors count), and the rows of each run in --out as CSV. With --brackets
also a proved lower bound for each, at temperature 1: hours at effort high.

All goes through the resumable `rankcert heads`: after a kill, the same command goes on from --resume. After a change
of the constructions it must be an empty folder, because the version of rankcert alone tells its rows apart. One
worker by default: times are then of one thread on a machine that does nothing else. PL-BERT's layers share their
weights: its 84 heads are 12 sets of weights at 7 depths. Without --heads it says so and measures nothing.
"""

import argparse
import json
import sys
from pathlib import Path

from rankcert.survey import survey_heads

FILES = ("minilm", "plbert", "dinov2s", "smollm2")
TOLERANCES = (0.1, 0.5)
RUNS = {  # effort: temperatures, and every how many-th head
    "balanced": ((1.0, 0.5, 2.0), 1),
    "high": ((1.0,), 1),
    "max": ((1.0,), 6),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=Path, metavar="DIR", help="folder of the real-head files")
    parser.add_argument("--files", nargs="+", default=list(FILES), help="which of them")
    parser.add_argument("--efforts", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--method", default="auto")
    parser.add_argument("--brackets", action="store_true", help="also prove lower bounds, at temperature 1")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="finished heads are kept here")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the rows of each run here")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    if args.heads is None:
        skipped = "needs --heads DIR (see benchmarks/heads_data.py)"
        print(json.dumps({"benchmark": "heads", "skipped": skipped}))
        return
    for effort in args.efforts:
        temperatures, every = RUNS[effort]
        if args.brackets:
            temperatures = (1.0,)
        for name in args.files:

            def say(done: int, total: int, run: str = f"{name}, {effort}") -> None:
                print(f"\r{run}: {done} of {total}", end="\n" if done == total else "", file=sys.stderr)

            survey = survey_heads(
                args.heads / f"{name}.npz",
                eps=TOLERANCES,
                temperatures=temperatures,
                method=args.method,
                effort=effort,
                every=every,
                brackets=args.brackets,
                workers=args.workers,
                resume=args.resume,
                progress=say,
            )
            for group in survey.summary():
                label = {"benchmark": "heads", "file": name, "effort": effort, "every": every}
                print(json.dumps(label | group._asdict()), flush=True)
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                survey.save(args.out / f"{name}-{effort}.csv")


if __name__ == "__main__":
    main()
