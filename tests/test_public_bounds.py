"""Whatever the package calls a bound was returned by the checker.

The package's source outside rankcert/checker is read, not run. A name is *bound-like* when one of its words is bound
or bounds (`bound`, `row_bounds`), or if it is `eps_below`, unless it ends in `_est` or is the flag `return_bound` or
the record `lower_bound`, whose number is a rank and comes from its verdict (test_brackets.py). Every value that a
bound-like name receives - a variable, an attribute, a keyword, a dictionary key, a parameter filled by
position, the result of a function - must be passed along: None, something bound-like, a choice between such things, or
a local variable that only ever receives them. Arithmetic, calls, numbers and everything else is a violation, and so is
making a Verdict outside the checker.

So by induction over who made what, a bound-like value outside the checker is one the checker returned.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankcert

ROOT = Path(rankcert.__file__).parent
NO_BOUNDS = ("return_bound", "lower_bound")  # a flag; a record and the function that makes it
CHECKER_ONLY = (  # would make a bound behind this file's back
    *("Verdict", "LowerVerdict", "BracketVerdict"),
    *("conclude", "conclude_lower", "conclude_leakage"),
    *("setattr", "__setattr__"),
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
Signatures = dict[
    str, list[list[str]]
]  # by bare name, the positional parameters of every function and record so named


def is_bound_like(name: object) -> bool:
    return (
        isinstance(name, str)
        and (bool({"bound", "bounds"} & set(name.split("_"))) or name == "eps_below")
        and not name.endswith("_est")
        and name not in NO_BOUNDS
    )


def read_sources() -> dict[str, str]:
    """{path: source} of the package outside the checker."""
    paths = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] != "checker"]
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


def read_signatures(sources: dict[str, str]) -> Signatures:
    """How positional arguments are named; of a class, those of its fields, inherited ones not counted."""
    found: Signatures = {}
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Function):
                names = [a.arg for a in [*node.args.posonlyargs, *node.args.args]]
                found.setdefault(node.name, []).append(
                    names[1:] if names[:1] in (["self"], ["cls"]) else names
                )
            elif isinstance(node, ast.ClassDef):
                fields = [
                    ast.unparse(field.target) for field in node.body if isinstance(field, ast.AnnAssign)
                ]
                found.setdefault(node.name, []).append(fields)
    return found


def bindings(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, value) for every name, attribute or constant key that `target = value` gives something to."""
    if isinstance(target, (ast.Tuple, ast.List)):
        together = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
        for index, element in enumerate(target.elts):
            yield from bindings(element, value.elts[index] if together else None)
    elif isinstance(target, ast.Starred):
        yield from bindings(target.value, None)
    elif isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Attribute):
        yield target.attr, value
    elif isinstance(target, ast.Subscript):
        # x["bound"] = v names the bound by its key, x.bounds[i] = v by the array
        named = target.slice.value if isinstance(target.slice, ast.Constant) else None
        yield (
            (
                named
                if is_bound_like(named)
                else getattr(target.value, "attr", getattr(target.value, "id", ""))
            ),
            value,
        )


def received(node: ast.AST, signatures: Signatures) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, value) for everything this one syntax node binds; the value is None when it cannot be followed."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from bindings(target, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from bindings(node.target, node.value)
    elif isinstance(node, ast.AugAssign):
        yield from bindings(node.target, None)
    elif isinstance(node, ast.NamedExpr):
        yield from bindings(node.target, node.value)
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield from bindings(node.target, None)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from bindings(node.optional_vars, None)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant):
                yield key.value, value
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in CHECKER_ONLY:
            yield "bound", None
        for keyword in node.keywords:
            yield keyword.arg or "", keyword.value
        starred = [index for index, value in enumerate(node.args) if isinstance(value, ast.Starred)]
        followed = node.args[: starred[0]] if starred else node.args
        for parameters in signatures.get(name, []):
            yield from zip(parameters, followed, strict=False)
            if starred:
                yield from ((parameter, None) for parameter in parameters[len(followed) :])
    elif isinstance(node, (Function, ast.Lambda)):
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        for argument, default in zip(positional[::-1], arguments.defaults[::-1], strict=False):
            yield argument.arg, default
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if default is not None:
                yield argument.arg, default


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope; functions within it are nodes, their bodies are scopes of their own."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, Function):
            yield from own_nodes(child)


def check_source(source: str, where: str, signatures: Signatures) -> tuple[list[str], int]:
    """(violations, how many bound-like bindings were looked at) of one file."""
    tree = ast.parse(source)
    violations, looked_at = [], 0
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, Function))]:
        nodes = list(own_nodes(scope))
        arguments = ast.walk(scope.args) if isinstance(scope, Function) else ()
        local: dict[str, list[ast.expr | None]] = {
            node.arg: [None] for node in arguments if isinstance(node, ast.arg)
        }
        for node in nodes:
            for name, value in received(node, {}):
                if not isinstance(node, (ast.Call, ast.Dict, Function, ast.Lambda)):
                    local.setdefault(name, []).append(value)

        def passed_along(value: ast.expr | None, asking: frozenset = frozenset(), local=local) -> bool:
            if isinstance(value, ast.Constant):
                return value.value is None
            if isinstance(value, ast.Attribute):
                return is_bound_like(value.attr)
            if isinstance(value, ast.Name):
                if is_bound_like(value.id) or value.id in asking:
                    return True  # looked at where it is bound
                values = local.get(value.id, [None])
                return all(passed_along(one, asking | {value.id}) for one in values)
            if isinstance(value, ast.Subscript):
                return not isinstance(value.slice, ast.Constant) and passed_along(value.value, asking)
            if isinstance(value, ast.IfExp):
                return passed_along(value.body, asking) and passed_along(value.orelse, asking)
            if isinstance(value, ast.Call):
                return is_bound_like(getattr(value.func, "id", getattr(value.func, "attr", "")))
            return False

        results = [node.value for node in nodes if isinstance(node, (ast.Return, ast.Yield))]
        given = [(scope.name, value) for value in results] if isinstance(scope, Function) else []
        for node in nodes:
            given += received(node, signatures)
        for name, value in given:
            if is_bound_like(name):
                looked_at += 1
                if not passed_along(value):
                    shown = "something that cannot be followed" if value is None else ast.unparse(value)
                    violations.append(f"{where}: {name} receives {shown}")
    return violations, looked_at


SOURCES = read_sources()
SIGNATURES = read_signatures(SOURCES)


def check_planted(source: str) -> list[str]:
    """Violations of a file that would join the package."""
    return check_source(source, "planted.py", SIGNATURES | read_signatures({"planted.py": source}))[0]


def test_bounds_come_from_the_checker():
    found = {where: check_source(source, where, SIGNATURES) for where, source in SOURCES.items()}
    assert [violation for violations, _ in found.values() for violation in violations] == []
    looked_at = {where: count for where, (_, count) in found.items()}
    # It did look: at the records, at what fills them, at the error that carries one.
    for where in ("certificates.py", "certification.py", "geometry.py", "errors.py", "cli.py", "survey.py"):
        assert looked_at[where] > 0, f"nothing bound-like was found in {where}"
    assert sum(looked_at.values()) >= 15


PLANTED = [
    "bound = 0.5",
    "bound = verdict.bound * 1.01",
    "bound = max(a.bound, b.bound)",
    "bound = float(error)",
    "bound += 1.0",
    "row_bounds = errors",
    "rank, bound = 3, error",
    "rank, bound = find()",
    "error = compute()\nbound = error",
    "error = a.bound\nerror = error + 1\nbound = error",
    "error = a.bound\nerror += 1\nbound = error",
    "for bound in errors: pass",
    "x = [bound for bound in errors]",
    "if (bound := compute()): pass",
    "with open(path) as bound: pass",
    "record.bound = error",
    "record['bound'] = error",
    "record.row_bounds[3] = 0.0",
    "bound: float = error",
    "bound = table['bound']",
    "make(bound=error)",
    "make(upper_bound=1e-3)",
    "CannotCertify('no', bound=estimate)",
    "Candidate('x', 'proved', 3, error, 0.0, '')",
    "Candidate('x', 'proved', *rest)",
    "Dimension(0.1, 3, error)",
    "fields = {'bound': error}",
    "fields = {'bound': 0.0}",
    "def bound(self): return self.error",
    "class R:\n    @property\n    def bound(self):\n        return 0.0",
    "def _residual_bound(problem): return problem.residual",
    "def row_bounds(problem):\n    yield problem.residual",
    "def f(bound=0.5): pass",
    "def f(*, bound=0.5): pass",
    "def f(x): bound = x",
    "def f(x=None): bound = x",
    "def f(*x): bound = x",
    "def f():\n    x = a.bound\n    def g(x):\n        bound = x",
    "def f(x):\n    def g(y):\n        bound = y\n    return g",
    "Verdict(status='PROVED')",
    "LowerVerdict(status='PROVED', rank=9)",
    "BracketVerdict('PROVED', '', lower, upper)",
    "conclude_lower(inputs, 'bernstein', 9, 0.1, 0.2, engine='mine')",
    "eps_below = witness.eps_est",
    "conclude(inputs, 3, 0.1, upper, lower, engine='mine')",
    "object.__setattr__(verdict, 'b' + 'ound', 0.0)",
    "setattr(verdict, name, 0.0)",
]
HARMLESS = [
    "bound = verdict.bound",
    "bound = None if verdict is None else verdict.bound",
    "bound_est = compute()",
    "boundary = 3.0",
    "lower_bound = search(problem)",
    "def query(q, *, return_bound=False): pass",
    "floor = verdict.bound\nallowed = floor + 1.0\nbound = floor",
    "best = a.bound\nbest = b.bound\nrank, bound = 3, best",
    "bound = check_rows(inputs, left, right).bound",
    "bound = verdict.row_bounds[i]",
    "Candidate('x', 'proved', 3, verdict.bound, 0.0, '')",
    "print(_up(verdict.bound))",
    "def f(x):\n    error = x.bound\n    return error\ndef g(x):\n    error = compute()\n    bound = x.bound",
]


@pytest.mark.parametrize("line", PLANTED)
def test_a_planted_bound_is_found(line):
    assert check_planted(line)


@pytest.mark.parametrize("line", HARMLESS)
def test_passing_along_is_no_violation(line):
    assert check_planted(line) == []


@pytest.mark.parametrize(
    "where, pattern, replacement",
    [
        ("geometry.py", r"return logit_residual\((.*)\)\.bound", r"return 0.9 * logit_residual(\1).bound"),
        ("certificates.py", r"self\.verdict\.bound", "self.verdict.bound / 2"),
        ("certification.py", r"\bclosest\.bound if", "closest.seconds if"),
        ("errors.py", r"self\.bound = bound", "self.bound = 0.0"),
        ("survey.py", r"else certificate\.bound", "else task.eps"),
        ("survey.py", r"bound=verdict\.bound", "bound=verdict.eps"),
    ],
)
def test_a_change_of_the_real_source_is_found(where, pattern, replacement):
    changed, count = re.subn(pattern, replacement, SOURCES[where])
    assert count, f"{pattern} is not in {where} any more: choose another line to break"
    assert check_source(changed, where, SIGNATURES)[0]
