"""Every head of a file, certified at several tolerances and temperatures: in parallel, and resumable after a kill.

One task is one head at one temperature and one eps. Tasks run in the processes of any concurrent.futures executor (of
this machine, or of a Dask cluster); they receive arrays and return a row and a certificate file's bytes. Only the
calling process touches the disk, and what it has written is complete.
"""

import csv
import hashlib
import io
import json
import multiprocessing
import operator
import os
import signal
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, wait
from concurrent.futures.process import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from rankcert import __version__
from rankcert.brackets import Bracket, lower_bound
from rankcert.certificates import write_pieces
from rankcert.certification import MEMORY, certify
from rankcert.checker import Engine, read_eps, read_inputs, verify, verify_bracket
from rankcert.checker.engine import processors
from rankcert.constructions.exact import Exact
from rankcert.constructions.svd import TruncatedSVD
from rankcert.errors import CannotCertify, InvalidInput, MalformedCertificate, RankcertError
from rankcert.geometry import dimension_report
from rankcert.heads import Head, read_heads
from rankcert.problem import AttentionProblem

__all__ = ["Row", "Summary", "Survey", "refuse_table", "survey_heads"]

RECORD = 2  # version of the records; a change of what a row means makes old ones useless
SVD_RUNS = 3
SVD_PATIENCE = 1.0  # seconds after which a dense SVD is not timed once more
WARM_UP_ROWS = 32
FEWEST_FOR_P = 10  # pairs; the p value is an approximation for many, and says 0 of any three in order
SUFFIXES = (".csv", ".json", ".parquet")


@dataclass(frozen=True)
class Row:
    """One head at one temperature and eps.

    status: "proved", or "unproved" with the reason in `note`; then rank and bound are None and method is "".
    bound: the checker's, in the run that made the row; a row of another run is that run's word, unless its
    certificate was kept and proved again (`survey_heads`).
    svd_rank: of the smallest truncation of P's SVD within eps (above a causal mask P is zero and errors do not
    count); None where a dense SVD is out of reach. Measured, not proved.
    r_tau: directions the centred logits need within the survey's tau (proved); None where tau is below rounding.
    trivial: the rank is 1 or less, or no smaller than min(n, m) or what equal queries or keys give for nothing.
    lower: the rank proved to be needed, when a bracket was asked for.
    seconds went into planning and building all that was tried, check_seconds into the checker, lower_seconds and
    lower_check_seconds into the lower bound; svd_seconds is the median of numpy.linalg.svd(P) in the same process. All
    with one thread.
    """

    layer: int
    head: int
    temperature: float
    eps: float
    n: int
    m: int
    d: int
    causal: bool
    svd_rank: int | None
    rank: int | None
    bound: float | None
    method: str
    status: str
    trivial: bool
    r_tau: int | None
    lower: int | None
    seconds: float
    check_seconds: float
    lower_seconds: float | None
    lower_check_seconds: float | None
    svd_seconds: float | None
    note: str
    inputs_sha256: str

    @property
    def svd_times(self) -> float | None:
        """The search's time in units of numpy.linalg.svd(P)."""
        return self.seconds / self.svd_seconds if self.svd_seconds else None

    @property
    def lower_svd_times(self) -> float | None:
        """The same of the search for the lower bound."""
        return self.lower_seconds / self.svd_seconds if self.lower_seconds and self.svd_seconds else None

    def to_dict(self) -> dict:
        """All fields and `svd_times`, for JSON."""
        return asdict(self) | {"svd_times": self.svd_times}


class Summary(NamedTuple):
    """All heads at one temperature and eps.

    rank_over_svd: geometric mean of certified rank / SVD rank over the `compared` heads that have both, neither 0.
    rank_over_lower: geometric mean of certified rank / proved lower bound over the `bracketed` heads that have both,
    neither 0; closed: how many of them have both equal.
    svd_times_median, svd_times_90: of the search's time over the SVD's; lower_seconds_median, lower_svd_times_median:
    of the search for the lower bound. wins: heads by construction. trivial, unproved: (layer, head) of each.
    spearman: rank correlation of r_tau with the certified rank over spearman_n heads, None when these are fewer than 3
    or one of the two is constant; spearman_p: its two-sided p value, None below 10.
    """

    temperature: float
    eps: float
    heads: int
    proved: int
    median_rank: float | None
    compared: int
    rank_over_svd: float | None
    bracketed: int
    rank_over_lower: float | None
    closed: int
    svd_times_median: float | None
    svd_times_90: float | None
    lower_seconds_median: float | None
    lower_svd_times_median: float | None
    wins: dict[str, int]
    trivial: list[tuple[int, int]]
    unproved: list[tuple[int, int]]
    spearman: float | None
    spearman_p: float | None
    spearman_n: int


@dataclass(frozen=True)
class Survey:
    """The rows, heads in the order they came in, each by temperature and eps; and how they were made."""

    rows: tuple[Row, ...]
    settings: Mapping[str, object]

    @property
    def groups(self) -> list[tuple[float, float]]:
        """The (temperature, eps) of the survey, in order."""
        return list(dict.fromkeys((row.temperature, row.eps) for row in self.rows))

    def of(self, temperature: float, eps: float) -> list[Row]:
        """The rows of one temperature and eps."""
        return [row for row in self.rows if (row.temperature, row.eps) == (temperature, eps)]

    def summary(self) -> list[Summary]:
        """One summary for each temperature and eps."""
        return [_summarize(temperature, eps, self.of(temperature, eps)) for temperature, eps in self.groups]

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        return {
            "settings": dict(self.settings),
            "summary": [group._asdict() for group in self.summary()],
            "rows": [row.to_dict() for row in self.rows],
        }

    def save(self, path: str | os.PathLike) -> None:
        """Write the rows as .csv (empty: unknown) or .parquet (needs pyarrow), or all of `to_dict` as .json.

        Raises InvalidInput for another ending, without pyarrow, and for a place that cannot be written to.
        """
        path = Path(path)
        refuse_table(path)
        writers = {".csv": _to_csv, ".json": _to_json, ".parquet": _to_parquet}
        data = writers[path.suffix.lower()](self)
        try:
            write_pieces(path, [data])
        except OSError as error:
            raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from None

    def row_table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of the table of heads, for people."""
        columns = [
            "layer",
            "head",
            "T",
            "eps",
            "SVD rank",
            "lower bound",
            "certified rank",
            "by",
            "r_tau",
            "seconds",
            "note",
        ]
        return columns, [
            [
                str(row.layer),
                str(row.head),
                f"{row.temperature:g}",
                f"{row.eps:g}",
                _shown(row.svd_rank),
                _shown(row.lower),
                _shown(row.rank),
                row.method,
                _shown(row.r_tau),
                f"{row.seconds:.2f}",
                "unproved" if row.status != "proved" else "trivial" if row.trivial else "",
            ]
            for row in self.rows
        ]

    def summary_table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of the table of summaries, for people."""
        columns = [
            "T",
            "eps",
            "proved",
            "rank / SVD rank",
            "rank / lower bound",
            "time / SVD time",
            "90 %",
            "won by",
            "trivial",
            "Spearman r_tau, rank",
            "p",
            "n",
        ]
        rows = []
        for group in self.summary():
            rows.append(
                [
                    f"{group.temperature:g}",
                    f"{group.eps:g}",
                    f"{group.proved} of {group.heads}",
                    _shown(group.rank_over_svd, ".3f"),
                    _shown(group.rank_over_lower, ".3f"),
                    _shown(group.svd_times_median, ".1f"),
                    _shown(group.svd_times_90, ".1f"),
                    ", ".join(f"{name} {count}" for name, count in group.wins.items()),
                    " ".join(f"{layer}:{head}" for layer, head in group.trivial) or "none",
                    _shown(group.spearman, ".3f"),
                    _shown(group.spearman_p, ".1e"),
                    str(group.spearman_n),
                ]
            )
        return columns, rows


def survey_heads(
    source: str | os.PathLike | Mapping[tuple[int, int], Head],
    *,
    eps: Sequence[float] = (0.1,),
    temperatures: Sequence[float] = (1.0,),
    method: str = "auto",
    effort: str = "balanced",
    seed: int = 0,
    tau: float = 0.5,
    every: int = 1,
    brackets: bool = False,
    memory: int = MEMORY,
    workers: int | None = None,
    scheduler: str | None = None,
    resume: str | os.PathLike | None = None,
    certificates: str | os.PathLike | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Certify every head of a file at every eps and temperature, in processes of one thread each.

    Parameters
    ----------
    source : an .npz or .safetensors file (rankcert.heads.read_heads), or {(layer, head): Head} as that returns.
    eps : tolerances. temperatures : logits are those of the file divided by T; 2 flattens, 0.5 sharpens.
    method, effort, seed, memory : as in `rankcert.certify`; memory is for each process.
    tau : tolerance of r_tau, the interaction dimension beside each rank.
    every : of the heads in order, the first and each `every`-th after it.
    brackets : also prove a lower bound on every rank, with the same effort and seed (`rankcert.lower_bound`).
    workers : processes on this machine; None takes all processors. They are started by importing, not by copying:
        a script has to call this below `if __name__ == "__main__":`.
    scheduler : address of a Dask scheduler; tasks go to its workers instead (the extra `cluster`; rankcert must be
        installed there, and `dask worker --nthreads 1` keeps the times honest).
    resume : a folder of finished rows. Each new one is written there as soon as it is proved, and those found there
        for the same inputs, options and version of rankcert are not computed again; whatever else stands there, or is
        damaged, is left out. Their times, and their bounds, are the word of the run that made them.
    certificates : a folder where each row's certificate is saved, or with `brackets` its bracket. Then a row found in
        `resume` counts only if that is there and is proved again, now, from the heads given.
    progress : progress(rows done, rows in all), called in this process.

    Returns a Survey. Rows that nothing could prove are in it with status "unproved". Raises InvalidInput, before any
    work, for heads, options or folders without meaning, and RankcertError when a worker dies (a Dask cluster gives
    its tasks to another). After that, Ctrl-C or a kill, what is finished is in `resume`.

    >>> import rankcert
    >>> heads = {(0, number): rankcert.example_head(name) for number, name in enumerate(["diffuse", "causal"])}
    >>> survey = rankcert.survey_heads(heads, eps=[0.5], method="svd", workers=1)
    >>> all(row.bound <= 0.5 and row.rank == row.svd_rank for row in survey.rows)
    True
    """
    heads = source if isinstance(source, Mapping) else read_heads([source])
    tolerances = [read_eps(value) for value in _several("eps", eps)]
    temperatures = [_positive("temperatures", value) for value in _several("temperatures", temperatures)]
    how = {"method": method, "effort": effort, "seed": seed, "memory": memory}
    certify(
        np.zeros((0, 1)), np.zeros((1, 1)), eps=1.0, **how
    )  # on no queries: refuses what it would refuse later
    tau = _positive("tau", tau)
    every = _count("every", every)
    workers = _count("workers", processors() if workers is None else workers)
    settings = how | {"tau": tau, "brackets": bool(brackets)}
    tasks = [
        task
        for place, given in list(heads.items())[::every]
        for task in _tasks(place, given, temperatures, tolerances, settings, certificates is not None)
    ]
    store = _Store(resume, certificates)
    rows = [store.read(task) for task in tasks]
    open_tasks = [number for number, row in enumerate(rows) if row is None]
    report = progress or (lambda done, total: None)
    done = len(tasks) - len(open_tasks)
    report(done, len(tasks))
    if open_tasks:
        pool = _local_pool(min(workers, len(open_tasks))) if scheduler is None else _dask_pool(scheduler)
        with pool as (executor, width):
            for number, (row, certificate) in _completed(executor, width, tasks, open_tasks):
                store.write(tasks[number], row, certificate)
                rows[number] = row
                done += 1
                report(done, len(tasks))
    return Survey(tuple(rows), settings)


# ---- one task --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Task:
    """What a worker needs for one row; `options` are the problem's, the scale at this temperature among them."""

    layer: int
    head: int
    temperature: float
    eps: float
    q: np.ndarray
    k: np.ndarray
    options: Mapping[str, object]
    settings: Mapping[str, object]
    inputs_sha256: str
    keep: bool  # whether to return the certificate

    def identity(self) -> dict:
        """Everything that decides the row, but for the times in it."""
        return {
            "record": RECORD,
            "rankcert": __version__,
            "layer": self.layer,
            "head": self.head,
            "temperature": self.temperature,
            "eps": self.eps,
            "inputs_sha256": self.inputs_sha256,
            **self.settings,
        }

    def name(self) -> str:
        """A file name of its own."""
        digest = _digest(self.identity())[:16]
        return f"layer{self.layer}-head{self.head}-t{self.temperature:g}-eps{self.eps:g}-{digest}"


def _tasks(place, given: Head, temperatures, tolerances, settings, keep: bool) -> Iterator[_Task]:
    """The tasks of one head; InvalidInput says which head it is."""
    try:
        layer, head = map(operator.index, place)
    except (TypeError, ValueError):
        raise InvalidInput(f"heads must be called by (layer, head), two integers, got {place!r}") from None
    for temperature in temperatures:
        try:
            options = given.options()
            inputs = read_inputs(given.q, given.k, **options)
            options["scale"] = inputs.scale / temperature
            inputs = read_inputs(given.q, given.k, **options)
        except InvalidInput as error:
            raise InvalidInput(f"layer {layer}, head {head}: {error}") from None
        digest = inputs.digests["inputs_sha256"]
        for eps in tolerances:
            q, k = np.asarray(given.q), np.asarray(given.k)
            yield _Task(layer, head, temperature, eps, q, k, options, settings, digest, keep)


def _measure(task: _Task) -> tuple[Row, bytes | None]:
    """One row and, if it is to be kept, the file of its certificate."""
    settings = task.settings
    how = {name: settings[name] for name in ("method", "effort", "seed", "memory")}
    with threadpool_limits(1):
        _warm_up(task.q.shape[1], bool(task.options.get("causal")), settings["method"], settings["brackets"])
        certificate, lower, note = None, None, ""
        try:
            certificate = certify(task.q, task.k, eps=task.eps, threads=1, **how, **task.options)
            candidates = certificate.candidates
        except CannotCertify as error:
            candidates, note = error.candidates, str(error)
        if settings["brackets"]:
            both = {name: settings[name] for name in ("effort", "seed", "memory")}
            lower = lower_bound(task.q, task.k, eps=task.eps, threads=1, **both, **task.options)
        problem = AttentionProblem(task.q, task.k, **task.options, engine=Engine(threads=1))
        svd_rank, svd_seconds = _svd(problem, task.eps, settings["memory"])
        try:
            r_tau = dimension_report(problem, [settings["tau"]])[0].dimension
        except CannotCertify:
            r_tau = None
        exact = Exact().plan(problem, task.eps, memory=settings["memory"]).rank
    rank = None if certificate is None else certificate.rank
    row = Row(
        layer=task.layer,
        head=task.head,
        temperature=task.temperature,
        eps=task.eps,
        n=problem.n,
        m=problem.m,
        d=problem.d,
        causal=problem.inputs.causal,
        svd_rank=svd_rank,
        rank=rank,
        bound=None if certificate is None else certificate.bound,
        method="" if certificate is None else certificate.method,
        status="unproved" if certificate is None else "proved",
        trivial=rank is not None and (rank <= 1 or rank >= min(problem.n, problem.m, exact)),
        r_tau=r_tau,
        lower=None if lower is None else lower.rank,
        seconds=sum(candidate.seconds for candidate in candidates),
        check_seconds=sum(candidate.check_seconds for candidate in candidates),
        lower_seconds=lower and sum(candidate.seconds for candidate in lower.candidates),
        lower_check_seconds=lower and sum(candidate.check_seconds for candidate in lower.candidates),
        svd_seconds=svd_seconds,
        note=note,
        inputs_sha256=task.inputs_sha256,
    )
    if certificate is None or not task.keep:
        return row, None
    return row, (certificate if lower is None else Bracket(lower, certificate)).to_bytes()


def _svd(problem: AttentionProblem, eps: float, memory: int) -> tuple[int | None, float | None]:
    """The truncated SVD's rank, and how long numpy.linalg.svd(P) takes; None where it is not to be had."""
    svd = TruncatedSVD()
    plan = svd.plan(problem, eps, memory=memory)
    if plan.refusal or not problem.n:
        return None, None
    rank = svd.build(problem, plan, eps).rank if eps < 1.0 else 0  # the rows of P sum to 1
    attention = problem.attention_rows(slice(0, problem.n))
    seconds: list[float] = []
    while len(seconds) < SVD_RUNS and sum(seconds) < SVD_PATIENCE:
        started = time.perf_counter()
        np.linalg.svd(attention)
        seconds.append(time.perf_counter() - started)
    return rank, statistics.median(seconds)


@cache
def _warm_up(d: int, causal: bool, method: str, brackets: bool) -> None:
    """Load the compiled loops on a small head, once a process, so that no row's time holds it."""
    q, k = np.random.default_rng(0).normal(size=(2, WARM_UP_ROWS, d))
    try:
        if brackets:
            lower_bound(q, k, eps=0.1, causal=causal, effort="fast", threads=1)
        certify(q, k, eps=0.1, causal=causal, method=method, effort="fast", threads=1)
    except CannotCertify:
        pass


# ---- where tasks run -------------------------------------------------------------------------------------------------

Pool = Iterator[
    tuple[Executor, Callable[[], int]]
]  # the executor, and how many tasks it should have at a time


def _completed(
    executor: Executor, width: Callable[[], int], tasks: Sequence[_Task], numbers: Sequence[int]
) -> Iterator[tuple[int, tuple[Row, bytes | None]]]:
    """Results by the number of their task, as they come in. Few tasks are under way, for the sake of memory."""
    waiting, running = deque(numbers), {}
    while waiting or running:
        for _ in range(min(len(waiting), width() - len(running))):
            number = waiting.popleft()
            running[executor.submit(_measure, tasks[number])] = number
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future.result()


@contextmanager
def _local_pool(workers: int) -> Pool:
    """Processes of this machine, which end with this one, however it ends."""
    context = multiprocessing.get_context("spawn")
    listen, alive = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(listen,))
    try:
        yield executor, lambda: 2 * workers
        executor.shutdown()  # idle workers end by themselves
    except BrokenExecutor:
        raise RankcertError(
            "a worker process died: it was killed, perhaps for want of memory, or could not start because the "
            'calling script lacks `if __name__ == "__main__":`'
        ) from None
    finally:
        alive.close()  # after an error they may be at work for long
        executor.shutdown(cancel_futures=True)
        listen.close()


def _begin_worker(listen) -> None:
    """Ctrl-C is the calling process's affair: here `certify` would take it as "stop searching"."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_caller, args=(listen,), daemon=True).start()


def _end_with_caller(listen) -> None:
    """Nothing is ever sent; the pipe ends when its other end is closed, if only by the caller's death."""
    listen.poll(None)
    os._exit(1)


@contextmanager
def _dask_pool(address: str) -> Pool:
    """The workers of a Dask scheduler."""
    try:
        from distributed import Client, KilledWorker
    except ImportError:
        raise InvalidInput(
            "a scheduler needs Dask; install it with: pip install 'rankcert[cluster]'"
        ) from None
    try:
        client = Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot reach a Dask scheduler at {address}: {str(error)[:200]}") from None
    with client:
        executor = client.get_executor(pure=False)
        try:
            yield executor, lambda: 2 * max(1, sum(client.nthreads().values()))
        except KilledWorker as error:
            raise RankcertError(f"the scheduler gave a task up: {error}") from None
        except CancelledError:
            raise RankcertError(f"the scheduler at {address} dropped a task") from None
        finally:
            executor.shutdown(wait=False)


# ---- what is on disk -------------------------------------------------------------------------------------------------


class _Store:
    """Finished rows in one folder, their certificates in another; either may be None."""

    def __init__(self, rows: str | os.PathLike | None, certificates: str | os.PathLike | None):
        self.rows = None if rows is None else Path(rows)
        self.certificates = None if certificates is None else Path(certificates)
        for folder in (self.rows, self.certificates):
            if folder is not None:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise InvalidInput(
                        f"cannot make the folder {folder}: {error.strerror or error}"
                    ) from None

    def read(self, task: _Task) -> Row | None:
        """The row of this very task, if it stands there whole; with certificates, only if it is proved again."""
        if self.rows is None:
            return None
        try:
            record = json.loads((self.rows / f"{task.name()}.json").read_text("utf-8"))
            if record["task"] != task.identity() or record["sha256"] != _digest(record["row"]):
                return None
            row = Row(**record["row"])
        except (OSError, ValueError, TypeError, KeyError):  # absent, damaged, or something else altogether
            return None
        if self.certificates is None or row.status != "proved":
            return row
        try:
            if task.settings["brackets"]:
                both = verify_bracket(self._certificate(task), task.q, task.k, eps=task.eps, **task.options)
                if both.lower.rank != row.lower:
                    return None
                verdict = both.upper
            else:
                verdict = verify(self._certificate(task), task.q, task.k, eps=task.eps, **task.options)
        except (OSError, MalformedCertificate):
            return None
        return replace(row, bound=verdict.bound) if verdict and verdict.rank == row.rank else None

    def write(self, task: _Task, row: Row, certificate: bytes | None) -> None:
        """The certificate first: where there is a row, there is its certificate."""
        if self.certificates is not None and certificate is not None:
            _write(self._certificate(task), certificate)
        if self.rows is not None:
            fields = asdict(row)
            record = {"task": task.identity(), "row": fields, "sha256": _digest(fields)}
            text = json.dumps(record, indent=1, allow_nan=False)
            _write(self.rows / f"{task.name()}.json", text.encode())

    def _certificate(self, task: _Task) -> Path:
        return self.certificates / f"{task.name()}.safetensors"


def _write(path: Path, data: bytes) -> None:
    try:
        write_pieces(path, [data])
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from None


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- summaries and tables --------------------------------------------------------------------------------------------


def _summarize(temperature: float, eps: float, rows: Sequence[Row]) -> Summary:
    proved = [row for row in rows if row.status == "proved"]
    ratios = [row.rank / row.svd_rank for row in proved if row.rank and row.svd_rank]
    gaps = [row.rank / row.lower for row in proved if row.rank and row.lower]
    lower_times = [row.lower_seconds for row in rows if row.lower_seconds is not None]
    lower_svd_times = [row.lower_svd_times for row in rows if row.lower_svd_times is not None]
    times = [row.svd_times for row in rows if row.svd_times is not None]
    both = [(row.r_tau, row.rank) for row in proved if row.r_tau is not None]
    spearman, p_value = _spearman(both)
    return Summary(
        temperature=temperature,
        eps=eps,
        heads=len(rows),
        proved=len(proved),
        median_rank=statistics.median(row.rank for row in proved) if proved else None,
        compared=len(ratios),
        rank_over_svd=statistics.geometric_mean(ratios) if ratios else None,
        bracketed=len(gaps),
        rank_over_lower=statistics.geometric_mean(gaps) if gaps else None,
        closed=gaps.count(1.0),
        svd_times_median=statistics.median(times) if times else None,
        svd_times_90=float(np.percentile(times, 90)) if times else None,
        lower_seconds_median=statistics.median(lower_times) if lower_times else None,
        lower_svd_times_median=statistics.median(lower_svd_times) if lower_svd_times else None,
        wins=dict(Counter(row.method for row in proved).most_common()),
        trivial=[(row.layer, row.head) for row in rows if row.trivial],
        unproved=[(row.layer, row.head) for row in rows if row.status != "proved"],
        spearman=spearman,
        spearman_p=p_value,
        spearman_n=len(both),
    )


def _spearman(pairs: Sequence[tuple[int, int]]) -> tuple[float | None, float | None]:
    """Rank correlation and its p value; None for what has none."""
    if len(pairs) < 3 or any(len(set(values)) == 1 for values in zip(*pairs, strict=True)):
        return None, None
    import scipy.stats  # takes a second to load, which no worker needs

    found = scipy.stats.spearmanr(*zip(*pairs, strict=True))
    return float(found.statistic), float(found.pvalue) if len(pairs) >= FEWEST_FOR_P else None


def refuse_table(path: Path) -> None:
    """Refuse what `Survey.save` could not write, without a survey: before the work, not after."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidInput(f"a table's name must end in {', '.join(SUFFIXES)}, got {str(path)!r}")
    if path.suffix.lower() == ".parquet":
        _pyarrow()


def _to_csv(survey: Survey) -> bytes:
    text = io.StringIO(newline="")
    columns = [field.name for field in fields(Row)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, "svd_times"])
    writer.writerows([*astuple(row), row.svd_times] for row in survey.rows)
    return text.getvalue().encode()


def _to_json(survey: Survey) -> bytes:
    return (json.dumps(survey.to_dict(), indent=1, allow_nan=False) + "\n").encode()


def _to_parquet(survey: Survey) -> bytes:
    arrow = _pyarrow()
    kinds = {int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_(), str: arrow.string()}
    types = {field.name: kind for field in fields(Row) for kind in kinds if kind in _kinds(field.type)}
    schema = arrow.schema(
        [(name, kinds[kind]) for name, kind in types.items()] + [("svd_times", arrow.float64())]
    )
    table = arrow.Table.from_pylist([row.to_dict() for row in survey.rows], schema=schema)
    data = io.BytesIO()
    arrow.parquet.write_table(table, data)
    return data.getvalue()


def _kinds(annotation) -> tuple:
    """The types of an annotation such as int or int | None."""
    return getattr(annotation, "__args__", (annotation,))


def _pyarrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidInput("Parquet needs pyarrow; install it with: pip install 'rankcert[tables]'") from None
    return pyarrow


def _shown(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


# ---- input -----------------------------------------------------------------------------------------------------------


def _several(name: str, values) -> list:
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, np.ndarray)) or not len(values):
        raise InvalidInput(f"{name} must be a list of one or more numbers, got {values!r}")
    if len(set(values)) < len(values):
        raise InvalidInput(f"{name} names a number twice: {list(values)!r}")
    return list(values)


def _positive(name: str, value) -> float:
    number = float(value) if isinstance(value, (int, float, np.number)) else float("nan")
    if not (isfinite(number) and number > 0.0):
        raise InvalidInput(f"{name} must be positive and finite, got {value!r}")
    return number


def _count(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"{name} must be a positive integer, got {value!r}")
    return value
