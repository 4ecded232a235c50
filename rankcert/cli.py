"""The command line: `rankcert certify | verify | audit | bracket | dimension | heads | laws`.

The answer goes to stdout, one line, or one JSON object with --json; tables and progress go to stderr.
Exit status: 0 proved (or measured, for audit without eps), 1 refuted, undecided, or other inputs than the
certificate's, 2 usage or arrays that are no attention head, 3 a malformed certificate file, 130 `heads` interrupted.
"""

import json
import sys
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal
from math import isfinite
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import typer

from rankcert.errors import CannotCertify, InvalidInput, MalformedCertificate, RankcertError
from rankcert.heads import EXAMPLES, Head, example_head, read_arrays, read_head, read_heads, read_npy

__all__ = ["app", "main"]

app = typer.Typer(
    name="rankcert",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Certified low-rank factorizations of softmax attention heads.\n\n"
    "Exit status: 0 proved or measured; 1 refuted, undecided or other inputs; 2 usage or invalid arrays; "
    "3 malformed certificate.",
)

Inputs = Annotated[
    list[Path] | None,
    typer.Argument(
        help="the head: one .npz or .safetensors holding Q and K, or two .npy files (queries, keys)",
        show_default=False,
    ),
]
Layer = Annotated[int | None, typer.Option(help="position of the layer, for files of (layers, heads, n, d)")]
HeadIndex = Annotated[
    int | None, typer.Option("--head", help="position of the head, for files of many heads")
]
Example = Annotated[bool, typer.Option("--example", help="use a small real head shipped with the package")]
ExampleName = Annotated[str, typer.Option(help=f"which of the shipped heads: {', '.join(EXAMPLES)}")]
Scale = Annotated[
    float | None, typer.Option(help="factor of the logits; default: the file's, else 1/sqrt(d)")
]
KeyBias = Annotated[
    Path | None, typer.Option(help=".npy of one number per key, added to the logits; -inf masks")
]
Causal = Annotated[
    bool | None, typer.Option("--causal/--no-causal", help="default: the file's, else not causal")
]
Offset = Annotated[
    int | None, typer.Option(help="key j is allowed for row i iff j <= i + offset (causal only)")
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout instead of the line")]
Threads = Annotated[int | None, typer.Option(min=1, help="threads of the checker; default: all processors")]
Gemm = Annotated[str, typer.Option(help="matrix products: blas (spot-checked) or portable (own loops)")]
Exact = Annotated[
    bool, typer.Option("--exact", help="decide by ball arithmetic alone (needs python-flint; slow)")
]
ExactRows = Annotated[
    int, typer.Option(min=0, metavar="K", help="also enclose the K worst and K random rows in balls")
]
Eps = Annotated[float | None, typer.Option(help="tolerance on the worst row's l1 error")]


@app.command()
def certify(
    inputs: Inputs = None,
    eps: Annotated[
        float | None, typer.Option(help="tolerance on the worst row's l1 error (0.1 with --example)")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="auto, or one construction: exact, taylor, minimax, anisotropic, chebyshev, harmonic, cells, "
            "compose, pivots, splitting, recompress, subspace, svd"
        ),
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="save the certificate here and prove it again from the file")
    ] = None,
    effort: Annotated[
        str, typer.Option(help="how long to search for a smaller rank: fast, balanced, high, max")
    ] = "balanced",
    seed: Annotated[int, typer.Option(min=0, help="of the search's random starts")] = 0,
    memory: Annotated[float, typer.Option(help="GiB a construction may use")] = 4.0,
    rank: Annotated[
        int | None, typer.Option(min=0, help="instead of --eps: the smallest bound at this rank")
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="instead of --eps: the rank at tolerances from 0.8 to 0.01")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="draw the curve here (.png or .svg; needs matplotlib)")
    ] = None,
    layer: Layer = None,
    head: HeadIndex = None,
    example: Example = False,
    example_name: ExampleName = EXAMPLES[0],
    scale: Scale = None,
    key_bias: KeyBias = None,
    causal: Causal = None,
    offset: Offset = None,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """Find a factorization of small rank and prove it within eps."""
    import rankcert

    asked = [eps is not None, rank is not None, curve]
    if sum(asked) > 1 or not (any(asked) or example):
        raise typer.BadParameter("say which tolerance you need, or a rank, or --curve", param_hint="--eps")
    if plot is not None and not curve:
        raise typer.BadParameter("only a --curve is drawn", param_hint="--plot")
    if curve and out is not None:
        raise typer.BadParameter("a curve is many certificates: save them one by one", param_hint="--out")
    if rank is not None and method != "auto":
        raise typer.BadParameter("a fixed rank has a method of its own", param_hint="--method")
    given = _read_head(inputs, example, example_name, layer, head)
    options = _options(given, scale, key_bias, causal, offset)
    options |= {"effort": effort, "seed": seed, "memory": _bytes(memory), "threads": threads}
    if curve:
        with _Progress() as progress:
            points = rankcert.rank_curve(given.q, given.k, method=method, progress=progress.stage, **options)
        return _print_curve(points, given.origin, plot, json_)
    if out is None and example:
        out = Path(f"rankcert-example-{example_name}.safetensors")
    if out is not None and out.resolve() in [path.resolve() for path in inputs or []]:
        raise typer.BadParameter("this would overwrite the head", param_hint="--out")
    with _Progress() as progress:
        options["progress"] = progress.stage
        if rank is not None:
            certificate = rankcert.best_eps(given.q, given.k, rank=rank, **options)
        else:
            target = 0.1 if eps is None else eps
            certificate = rankcert.certify(given.q, given.k, eps=target, method=method, **options)
        verdict = certificate.verdict
        if out is not None:
            try:
                certificate.save(out)
            except OSError as error:
                raise InvalidInput(f"cannot write {out}: {error.strerror or error}") from None
            verdict = rankcert.verify(
                out,
                given.q,
                given.k,
                threads=threads,
                progress=progress.stage("verifying the saved file"),
                **_options(given, scale, key_bias, causal, offset),
            )
    _print_candidates("constructions", certificate)
    _print_verdict(verdict, given.origin)
    saved = f", saved to {out} and proved again from the file" if out is not None else ""
    _answer(
        verdict,
        json_,
        f" by {certificate.method}{saved}",
        {
            "method": certificate.method,
            "details": certificate.details,
            "cancellation": certificate.cancellation,
            "file": None if out is None else str(out),
            "candidates": [
                vars(c) | {"bound": c.bound if c.bound is not None and isfinite(c.bound) else None}
                for c in certificate.candidates
            ],
        },
    )


@app.command()
def verify(
    certificate: Annotated[
        Path, typer.Argument(help="the file: a certificate, a lower bound or a bracket", show_default=False)
    ],
    inputs: Inputs = None,
    eps: Annotated[
        float | None, typer.Option(help="the tolerance you rely on; refused if the file's differs")
    ] = None,
    layer: Layer = None,
    head: HeadIndex = None,
    example: Example = False,
    example_name: ExampleName = EXAMPLES[0],
    scale: Scale = None,
    key_bias: KeyBias = None,
    causal: Causal = None,
    offset: Offset = None,
    gemm: Gemm = "blas",
    exact: Exact = False,
    exact_rows: ExactRows = 0,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """Prove a saved certificate, lower bound or bracket again, from your own copy of the head."""
    from rankcert import checker

    given = _read_head(inputs, example, example_name, layer, head)
    options = _options(given, scale, key_bias, causal, offset)
    options |= {"eps": eps, "gemm": gemm, "exact": exact, "threads": threads}
    with _Progress() as progress:
        options["progress"] = progress.stage("verifying")
        try:
            verdict = _verify(certificate, given, exact_rows, options)
        except OSError as error:
            raise InvalidInput(f"cannot read {certificate}: {error.strerror or error}") from None
    if isinstance(verdict, checker.Verdict):
        _print_verdict(verdict, given.origin)
        _answer(verdict, json_)
    if isinstance(verdict, checker.BracketVerdict):
        _print_verdict(verdict.upper, given.origin)
    _print_lower_verdict(getattr(verdict, "lower", verdict))
    _answer_lower(verdict, json_)


def _verify(path: Path, given: Head, exact_rows: int, options: dict):
    """The verdict of the one verifier that knows the file's format."""
    from rankcert import checker

    verifiers = (
        lambda: checker.verify(path, given.q, given.k, exact_rows=exact_rows, **options),
        lambda: checker.verify_lower(path, given.q, given.k, **options),
        lambda: checker.verify_bracket(path, given.q, given.k, **options),
    )
    for verifier in verifiers:
        try:
            return verifier()
        except MalformedCertificate as error:
            if error.reason != "format":
                raise
            refused = error
    raise refused


@app.command()
def audit(
    inputs: Inputs = None,
    factors: Annotated[
        Path | None, typer.Option(help=".npz or .safetensors with arrays left and right")
    ] = None,
    left: Annotated[Path | None, typer.Option(help=".npy of the left factor, (n, r)")] = None,
    right: Annotated[Path | None, typer.Option(help=".npy of the right factor, (m, r)")] = None,
    eps: Eps = None,
    layer: Layer = None,
    head: HeadIndex = None,
    example: Example = False,
    example_name: ExampleName = EXAMPLES[0],
    scale: Scale = None,
    key_bias: KeyBias = None,
    causal: Causal = None,
    offset: Offset = None,
    gemm: Gemm = "blas",
    exact: Exact = False,
    exact_rows: ExactRows = 0,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """Prove how wrong anybody's factors are: the worst row's l1 error of left @ right.T."""
    from rankcert import checker

    given = _read_head(inputs, example, example_name, layer, head)
    options = _options(given, scale, key_bias, causal, offset)
    u, v = _read_factors(factors, left, right)
    with _Progress() as progress:
        verdict = checker.audit(
            given.q,
            given.k,
            u,
            v,
            eps=eps,
            gemm=gemm,
            exact=exact,
            exact_rows=exact_rows,
            threads=threads,
            progress=progress.stage("auditing"),
            **options,
        )
    _print_verdict(verdict, given.origin)
    _answer(verdict, json_)


@app.command()
def bracket(
    inputs: Inputs = None,
    eps: Annotated[
        float | None, typer.Option(help="tolerance on the worst row's l1 error (0.1 with --example)")
    ] = None,
    beta: Annotated[
        list[float] | None,
        typer.Option(help="repeatable: a bracket at each of these scales of the logits", show_default=False),
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="instead of --eps: brackets at tolerances from 0.8 to 0.01")
    ] = False,
    method: Annotated[
        str, typer.Option(help="of the upper end: auto, or one construction, as in certify")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="save both proofs here and prove them again from the file")
    ] = None,
    effort: Annotated[
        str, typer.Option(help="how long to search from both sides: fast, balanced, high, max")
    ] = "balanced",
    seed: Annotated[int, typer.Option(min=0, help="of the searches' random choices")] = 0,
    memory: Annotated[float, typer.Option(help="GiB a search may use")] = 4.0,
    plot: Annotated[
        Path | None,
        typer.Option(help="draw the brackets of --curve or --beta here (.png or .svg; needs matplotlib)"),
    ] = None,
    layer: Layer = None,
    head: HeadIndex = None,
    example: Example = False,
    example_name: ExampleName = EXAMPLES[0],
    scale: Scale = None,
    key_bias: KeyBias = None,
    causal: Causal = None,
    offset: Offset = None,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """The rank a head needs, from both sides: a proved lower bound and a proved factorization."""
    import rankcert

    if (eps is not None) == curve and not (example and eps is None):
        raise typer.BadParameter("say which tolerance you need, or --curve", param_hint="--eps")
    if beta and (curve or scale is not None):
        raise typer.BadParameter("give --beta, or --curve or --scale, not both", param_hint="--beta")
    if plot is not None and not (curve or beta):
        raise typer.BadParameter(
            "only the brackets of a --curve or of several --beta are drawn", param_hint="--plot"
        )
    if out is not None and (curve or beta):
        raise typer.BadParameter("these are many brackets: save them one by one", param_hint="--out")
    if plot is not None:
        from rankcert.plots import plot_brackets, refuse_plot

        refuse_plot(plot)
    given = _read_head(inputs, example, example_name, layer, head)
    if out is not None and out.resolve() in [path.resolve() for path in inputs or []]:
        raise typer.BadParameter("this would overwrite the head", param_hint="--out")
    plain = _options(given, scale, key_bias, causal, offset)
    with _Progress() as progress:
        options = plain | {"method": method, "effort": effort, "seed": seed, "memory": _bytes(memory)}
        options |= {"threads": threads, "progress": progress.stage}
        target = 0.1 if eps is None else eps
        if curve:
            found = rankcert.bracket_curve(given.q, given.k, **options)
        else:
            scales = sorted(set(beta)) if beta else [plain.get("scale")]
            each = [options | ({} if value is None else {"scale": value}) for value in scales]
            found = tuple(rankcert.bracket(given.q, given.k, eps=target, **how) for how in each)
        verdicts = [point.verdict for point in found]
        if out is not None:
            try:
                found[0].save(out)
            except OSError as error:
                raise InvalidInput(f"cannot write {out}: {error.strerror or error}") from None
            stage = progress.stage("verifying the saved file")
            verdicts = [
                rankcert.verify_bracket(out, given.q, given.k, threads=threads, progress=stage, **plain)
            ]
    if plot is not None:
        plot_brackets(found, plot)
    _table(
        f"brackets of {given.origin}",
        ["eps", "scale", "lower", "upper", "proved bound", "lower by", "upper by"],
        [
            [
                f"{point.eps:g}",
                f"{point.certificate.scale:.4g}",
                str(point.lower),
                str(point.upper),
                _up(point.certificate.bound),
                point.lower_bound.method,
                point.certificate.method,
            ]
            for point in found
        ],
    )
    if curve or beta:
        if json_:
            print(json.dumps([verdict.to_dict() for verdict in verdicts], allow_nan=False))
        else:
            names = [f"{point.certificate.scale:g}" if beta else f"{point.eps:g}" for point in found]
            pairs = zip(names, found, strict=True)
            print(" ".join(f"{name}:[{point.lower},{point.upper}]" for name, point in pairs))
        raise typer.Exit(0 if all(verdicts) else 1)
    _print_candidates("constructions", found[0].certificate)
    _print_candidates("witnesses", found[0].lower_bound)
    saved = f", saved to {out} and proved again from the file" if out is not None else ""
    _answer_lower(verdicts[0], json_, saved)


@app.command()
def dimension(
    inputs: Inputs = None,
    tol: Annotated[
        list[float] | None,
        typer.Option(help="tolerances, repeatable; default: 0 0.01 0.1 0.5", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw the singular values here (.png or .svg; needs matplotlib)")
    ] = None,
    layer: Layer = None,
    head: HeadIndex = None,
    example: Example = False,
    example_name: ExampleName = EXAMPLES[0],
    scale: Scale = None,
    key_bias: KeyBias = None,
    causal: Causal = None,
    offset: Offset = None,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """The geometry of a head: how many dimensions its logits need, with the proved residual; supports and ranges."""
    import rankcert

    given = _read_head(inputs, example, example_name, layer, head)
    options = _options(given, scale, key_bias, causal, offset)
    with _Progress() as progress:
        report = rankcert.geometry_report(
            given.q,
            given.k,
            tolerances=tol or [0.0, 0.01, 0.1, 0.5],
            threads=threads,
            progress=progress.stage("scanning dimensions"),
            **options,
        )
    if plot is not None:
        from rankcert.plots import plot_singular_values

        plot_singular_values(report, plot)
    _table(
        f"interaction dimension of {given.origin} (d = {report.d})",
        ["tol", "dimension", "proved bound on the softmax change"],
        [[f"{row.tol:g}", str(row.dimension), _up(row.bound)] for row in report.dimensions],
    )
    facts = {
        "distinct_queries": report.distinct_queries,
        "distinct_keys": report.distinct_keys,
        "query_radius": report.query_radius,
        "query_spread": report.query_spread,
        "key_radius": report.key_radius,
        "key_spread": report.key_spread,
        "half_range_max": report.half_range_max,
        "half_range_median": report.half_range_median,
    }
    shown = {name.replace("_", " "): f"{value:.6g}" for name, value in facts.items()}
    _table("supports and ranges (spread 0: on a sphere)", ["", ""], [[*pair] for pair in shown.items()])
    if json_:
        rows = [row._asdict() for row in report.dimensions]
        values = report.singular_values.tolist()
        print(
            json.dumps(
                {"d": report.d, "dimensions": rows, **facts, "singular_values": values}, allow_nan=False
            )
        )
    else:
        print(" ".join(f"{row.tol:g}:{row.dimension}" for row in report.dimensions))


@app.command()
def heads(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="the heads: one .npz or .safetensors holding Q and K, or two .npy files (queries, keys)",
            show_default=False,
        ),
    ] = None,
    eps: Annotated[
        list[float] | None,
        typer.Option(
            help="tolerance on the worst row's l1 error, repeatable (0.1 with --example)", show_default=False
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            help="logits are the file's divided by this, repeatable; default: 1", show_default=False
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="auto, or one construction, as in certify")] = "auto",
    effort: Annotated[
        str, typer.Option(help="how long to search for a smaller rank: fast, balanced, high, max")
    ] = "balanced",
    seed: Annotated[int, typer.Option(min=0, help="of the search's random starts")] = 0,
    tau: Annotated[float, typer.Option(help="tolerance of r_tau, the interaction dimension")] = 0.5,
    every: Annotated[int, typer.Option(min=1, help="take only every N-th head", metavar="N")] = 1,
    brackets: Annotated[
        bool, typer.Option("--bracket", help="also prove a lower bound on every rank")
    ] = False,
    memory: Annotated[float, typer.Option(help="GiB a construction may use, in each process")] = 4.0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes; default: all processors", show_default=False)
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="address of a Dask scheduler whose workers do it instead")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="folder of finished heads: read when there, kept up to date")
    ] = None,
    certificates: Annotated[
        Path | None,
        typer.Option(
            help="folder for every certificate, or with --bracket bracket; with --resume they are proved again"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write the table here: .csv, .json or .parquet")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="draw the ranks, layers by heads, here (.png or .svg; needs matplotlib)"),
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="use the real heads shipped with the package")
    ] = False,
    scale: Scale = None,
    causal: Causal = None,
    offset: Offset = None,
    json_: Json = False,
) -> None:
    """Certify every head of a file, in parallel; a table of SVD ranks, certified ranks and dimensions."""
    if example and inputs:
        raise typer.BadParameter("give files or --example, not both", param_hint="inputs")
    if not eps and not example:
        raise typer.BadParameter("say which tolerances you need", param_hint="--eps")
    if workers is not None and scheduler is not None:
        raise typer.BadParameter("give --workers or --scheduler, not both", param_hint="--workers")
    if example:
        given = {(0, number): example_head(name) for number, name in enumerate(EXAMPLES)}
    else:
        given = read_heads(inputs or [])
    plain = dict.fromkeys(("scale", "causal", "offset"))
    given = {
        place: replace(head, **(plain | _options(head, scale, None, causal, offset)))
        for place, head in given.items()
    }
    from rankcert.survey import refuse_table, survey_heads

    if out is not None:
        refuse_table(out)
    if plot is not None:
        from rankcert.plots import plot_heads, refuse_plot

        refuse_plot(plot)
    finished = total = 0
    with _Progress() as progress:
        bar = progress.stage("certifying heads")

        def count(done: int, of: int) -> None:
            nonlocal finished, total
            finished, total = done, of
            if bar is not None:
                bar(done, of)

        try:
            survey = survey_heads(
                given,
                eps=eps or [0.1],
                temperatures=temperature or [1.0],
                method=method,
                effort=effort,
                seed=seed,
                tau=tau,
                every=every,
                brackets=brackets,
                memory=_bytes(memory),
                workers=workers,
                scheduler=scheduler,
                resume=resume,
                certificates=certificates,
                progress=count,
            )
        except KeyboardInterrupt:
            kept = (
                "without --resume none is kept"
                if resume is None
                else f"the same command goes on from {resume}"
            )
            print(f"rankcert: interrupted with {finished} of {total} finished; {kept}", file=sys.stderr)
            raise typer.Exit(130) from None
    if out is not None:
        survey.save(out)
    if plot is not None:
        plot_heads(survey, plot)
    _table("heads", *survey.row_table())
    _table("summary", *survey.summary_table())
    groups = survey.summary()
    proved = sum(group.proved for group in groups)
    if json_:
        print(json.dumps(survey.to_dict(), allow_nan=False))
    else:
        ratios = " ".join(
            f"T={group.temperature:g},eps={group.eps:g}:"
            + ("-" if group.rank_over_svd is None else f"{group.rank_over_svd:.3f}")
            for group in groups
        )
        print(f"PROVED {proved} of {len(survey.rows)}; certified rank / SVD rank {ratios}")
    raise typer.Exit(0 if proved == len(survey.rows) else 1)


@app.command()
def laws(
    family: Annotated[
        list[str] | None, typer.Option(help="repeatable; default: every family", show_default=False)
    ] = None,
    eps: Annotated[float, typer.Option(help="tolerance on the worst row's l1 error, below 1")] = 0.1,
    beta: Annotated[
        list[float] | None,
        typer.Option(help="repeatable; default: 2^0, 2^(1/2), .., 2^10", show_default=False),
    ] = None,
    n: Annotated[int | None, typer.Option(help="points; default: each family's own number")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer points: a minute, not half an hour")] = False,
    lower: Annotated[
        bool, typer.Option("--lower", help="both sides: also prove lower bounds, on at most 2048 points")
    ] = False,
    effort: Annotated[
        str, typer.Option(help="of the search for lower bounds: fast, balanced, high, max")
    ] = "balanced",
    resume: Annotated[
        Path | None, typer.Option(help="JSON of finished points: read when there, kept up to date")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write points and slopes here as JSON")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw the laws here (.png or .svg; needs matplotlib)")
    ] = None,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """The laws: how proved ranks grow with the scale of the logits on spheres, balls and fixed heads."""
    from rankcert.laws import run_laws

    with _Progress() as progress:
        report = run_laws(
            family,
            eps=eps,
            betas=beta,
            n=n,
            quick=quick,
            lower=lower,
            effort=effort,
            resume=resume,
            threads=threads,
            progress=progress.stage,
        )
    if plot is not None:
        from rankcert.plots import plot_laws

        plot_laws(report, plot)
    text = json.dumps(report.to_dict(), allow_nan=False)
    if out is not None:
        try:
            out.write_text(text + "\n", "utf-8")
        except OSError as error:
            raise InvalidInput(f"cannot write {out}: {error.strerror or error}") from None
    _table("points", *report.point_rows())
    _table("slopes", *report.family_rows())
    fits = {family.name: report.fit(family) for family in report.families}
    line = " ".join(
        f"{name}:{'-' if fit.slope is None else f'{fit.slope:.3f}'}" for name, fit in fits.items()
    )
    print(text if json_ else line)
    missed = any(False in (report.met(family), report.met_lower(family)) for family in report.families)
    raise typer.Exit(
        1 if missed and not quick else 0
    )  # a quick run is too small to hold anything against a law


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status of a refusal; every other end is a SystemExit."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        app(argv)
    except MalformedCertificate as error:
        return _fail(argv, error.reason, f"malformed certificate: {error}", 3)
    except InvalidInput as error:
        return _fail(argv, "invalid-input", str(error), 2)
    except CannotCertify as error:
        return _fail(argv, "cannot-certify", str(error), 1)
    except RankcertError as error:
        return _fail(argv, type(error).__name__, str(error), 1)
    except MemoryError:
        return _fail(argv, "out-of-memory", "not enough memory for this problem", 1)
    return 0


def _fail(argv: list[str], reason: str, message: str, status: int) -> int:
    if "--json" in argv:
        print(json.dumps({"error": reason, "message": message}))
    print(f"rankcert: {message}", file=sys.stderr)
    return status


def _read_head(inputs, example: bool, name: str, layer: int | None, head: int | None) -> Head:
    if example and inputs:
        raise typer.BadParameter("give files or --example, not both", param_hint="inputs")
    if example:
        return example_head(name)
    return read_head(inputs or [], layer, head)


def _options(given: Head, scale, key_bias: Path | None, causal, offset) -> dict:
    options = given.options()
    if causal is False:
        options.pop("offset", None)  # the file's offset belongs to the mask that was just declined
    options |= {
        name: value
        for name, value in (("scale", scale), ("causal", causal), ("offset", offset))
        if value is not None
    }
    if key_bias is not None:
        options["key_bias"] = read_npy(key_bias)
    return options


def _bytes(gib: float) -> int:
    if not 0 < gib < float("inf"):
        raise typer.BadParameter(f"must be a positive number of GiB, got {gib}", param_hint="--memory")
    return max(1, int(gib * 2**30))


def _read_factors(
    factors: Path | None, left: Path | None, right: Path | None
) -> tuple[np.ndarray, np.ndarray]:
    if factors is not None and left is None and right is None:
        arrays = read_arrays(factors)
        missing = {"left", "right"} - set(arrays)
        if missing:
            raise InvalidInput(f"{factors} must hold arrays left and right; it holds {sorted(arrays)}")
        return arrays["left"], arrays["right"]
    if factors is None and left is not None and right is not None:
        return read_npy(left), read_npy(right)
    raise typer.BadParameter("give --factors FILE, or --left FILE and --right FILE", param_hint="factors")


class _Progress:
    """Progress on stderr when it is a terminal; silent otherwise. Shown only for work that lasts."""

    def __enter__(self):
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import MofNCompleteColumn, Progress

            columns = (*Progress.get_default_columns(), MofNCompleteColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *error):
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str):
        if self._bar is None:
            return None
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        task = self._bar.add_task(name, total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    for column in table.columns:
        column.overflow = "fold"
    # what stands in brackets in a path or a reason is text, no markup
    Console(stderr=True, markup=False, emoji=False, highlight=False).print(table)


def _print_candidates(title: str, certificate) -> None:
    rows = [
        [
            c.method,
            c.status,
            _count(c.rank),
            "" if c.bound is None else _up(c.bound),
            f"{c.seconds:.2f}",
            f"{c.check_seconds:.2f}",
            c.note,
        ]
        for c in certificate.candidates
    ]
    _table(title, ["method", "status", "rank", "proved bound", "seconds", "check", "note"], rows)


def _print_verdict(verdict, origin: str) -> None:
    n, m, d = verdict.shape
    rows = [
        ["head", origin],
        [
            "problem",
            f"n = {n}, m = {m}, d = {d}, scale = {verdict.scale!r}, "
            + (f"causal with offset {verdict.offset}" if verdict.causal else "not causal"),
        ],
        ["inputs SHA-256", verdict.digests["inputs_sha256"]],
        [verdict.notion, str(verdict.rank)],
        ["eps", "none" if verdict.eps is None else repr(verdict.eps)],
        ["bound", _up(verdict.bound)],
        *([["worst row", str(verdict.worst_row)]] if verdict.worst_row is not None else []),
        *([f"  {name}", _up(value)] for name, value in verdict.breakdown.items()),
        ["computed by", verdict.engine],
        ["verdict", f"{verdict.status}: {verdict.reason}"],
    ]
    _table("verdict", ["", ""], rows)


def _answer(verdict, as_json: bool, tail: str = "", extra: dict | None = None) -> NoReturn:
    if as_json:
        print(json.dumps(verdict.to_dict() | (extra or {}), allow_nan=False))
    elif verdict.status in ("PROVED", "MEASURED"):
        print(f"{verdict.status} {verdict.notion} {verdict.rank} bound {_up(verdict.bound)}{tail}")
    else:
        print(f"{verdict.status} {verdict.reason}")
    raise typer.Exit(0 if verdict.status in ("PROVED", "MEASURED") else 1)


def _print_lower_verdict(verdict) -> None:
    rows = [
        [f"{verdict.notion}, at least", str(verdict.rank)],
        ["eps", repr(verdict.eps)],
        ["proved for eps below", f"{verdict.eps_below:.6g}"],
        *([f"  {name}", f"{value:.6g}"] for name, value in verdict.breakdown.items()),
        ["computed by", verdict.engine],
        ["verdict", f"{verdict.status}: {verdict.reason}"],
    ]
    _table("lower bound", ["", ""], rows)


def _answer_lower(verdict, as_json: bool, tail: str = "") -> NoReturn:
    """The answer of a lower bound or of a bracket."""
    if as_json:
        print(json.dumps(verdict.to_dict(), allow_nan=False))
    else:
        print(f"{verdict.status} {verdict.reason}{tail}")
    raise typer.Exit(0 if verdict else 1)


def _print_curve(points, origin: str, plot: Path | None, as_json: bool) -> None:
    if plot is not None:
        from rankcert.plots import plot_curve

        plot_curve(points, plot)
    rows = [[f"{c.eps:g}", str(c.rank), _up(c.bound), c.method] for c in points]
    _table(f"rank against bound, {origin}", ["eps", "rank", "proved bound", "method"], rows)
    if as_json:
        fields = ("eps", "rank", "bound", "method")
        print(json.dumps([{name: getattr(c, name) for name in fields} for c in points], allow_nan=False))
    else:
        print(" ".join(f"{_up(c.bound, 3)}:{c.rank}" for c in points))


def _count(rank: int | None) -> str:
    if rank is None:
        return ""
    return str(rank) if rank < 10**9 else f"{Decimal(rank):.2e}"


def _up(value: float, digits: int = 6) -> str:
    """A bound in few digits, rounded up so that what is printed holds too."""
    if not 0 < value < float("inf"):
        return f"{value:g}"
    exact = Decimal(value)
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(step, rounding=ROUND_CEILING)):.{digits}g}"


if __name__ == "__main__":
    sys.exit(main())
