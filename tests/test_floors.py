"""The floors of the package, read off its imports: an import points down, never up, and never in a circle.

The floor of every part is what the docstring of `rankcert` says, so that the map and the territory cannot differ.
Imports inside functions count like any other. The package root is only a door: `import rankcert; rankcert.certify`
counts as an import of the module that certify lives in.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

import rankcert

ROOT = Path(rankcert.__file__).parent
CHECKER_MAY_IMPORT = sys.stdlib_module_names | {"numpy", "threadpoolctl"}
DYNAMIC = ("__import__", "import_module", "exec", "eval")


def read_floors(docstring: str) -> dict[str, int]:
    """{part of the package: floor} from lines like `    4  constructions      one method a file`."""
    floors = {}
    for number, names in re.findall(r"^ +(\d)  (\S.*?)(?:  |$)", docstring, flags=re.MULTILINE):
        floors |= {name.strip(): int(number) for name in names.split(",")}
    return floors


def read_modules(root: Path) -> dict[str, Path]:
    """{dotted name: file} of every module below the package root, the compiled kernel included."""
    modules = {}
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.pyx")]):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        modules[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return modules


def read_imports(name: str, source: str) -> set[str]:
    """Every module that module `name` imports, by dotted name; names of the package root by where they live."""
    found, aliases = set(), set()

    def add(module: str, imported: str) -> None:
        if f"{module}.{imported}" in MODULES:
            found.add(f"{module}.{imported}")
        elif module != ROOT.name:
            found.add(module)
        elif not imported.startswith("__"):
            found.add(rankcert._HOME.get(imported, f"{module}.{imported}"))

    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == ROOT.name}
            found |= {alias.name for alias in node.names if alias.name != ROOT.name}
        elif isinstance(node, ast.ImportFrom):
            depth = node.level - (MODULES[name].name == "__init__.py")
            above = name.split(".")[: -depth or None] if node.level else []
            for alias in node.names:
                add(".".join([*above, *([node.module] if node.module else [])]), alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            add(ROOT.name, node.attr)
    return found


def part(module: str) -> str:
    return module.split(".")[1]


def upward(imports: dict[str, set[str]], floors: dict[str, int]) -> list[str]:
    """Imports inside the package that point up, or at something without a floor."""
    faults = []
    for name, targets in imports.items():
        for target in targets:
            if target.split(".")[0] != ROOT.name:
                continue
            here, there = floors.get(part(name)), floors.get(part(target))
            if here is None or there is None or there > here:
                faults.append(f"{name} (floor {here}) imports {target} (floor {there})")
    return faults


def cycles(imports: dict[str, set[str]]) -> list[str]:
    """What remains of the import graph once modules whose imports are all done are taken away again and again."""
    left = {name: {t for t in targets if t in imports} for name, targets in imports.items()}
    while done := {name for name, targets in left.items() if not targets}:
        left = {name: targets - done for name, targets in left.items() if name not in done}
    return sorted(left)


def foreign_to_checker(imports: dict[str, set[str]]) -> list[str]:
    """What the checker imports beyond the standard library, NumPy, threadpoolctl, itself, and flint in exact.py."""
    faults = []
    for name, targets in imports.items():
        if part(name) != "checker":
            continue
        for target in targets:
            allowed = CHECKER_MAY_IMPORT | ({"flint"} if name == f"{ROOT.name}.checker.exact" else set())
            if target.split(".")[0] not in allowed and not f"{target}.".startswith(f"{ROOT.name}.checker."):
                faults.append(f"{name} imports {target}")
    return faults


MODULES = read_modules(ROOT)
SOURCES = {name: path.read_text("utf-8") for name, path in MODULES.items() if path.suffix == ".py"}
FLOORS = read_floors(rankcert.__doc__)
IMPORTS = {name: read_imports(name, source) for name, source in SOURCES.items() if name != ROOT.name}


def test_every_part_stands_on_one_floor():
    parts = {part(name) for name in IMPORTS}
    assert set(FLOORS) == parts, "the diagram in rankcert/__init__.py and the package differ"
    assert FLOORS["checker"] == 0 and max(FLOORS.values()) == FLOORS["cli"] == 7


def test_imports_point_down():
    assert upward(IMPORTS, FLOORS) == []


def test_imports_make_no_circle():
    assert cycles(IMPORTS) == []


def test_checker_imports_nothing_from_above_the_wall():
    assert foreign_to_checker(IMPORTS) == []
    kernel = (ROOT / "checker" / "_kernel.pyx").read_text("utf-8")
    lines = [line.strip() for line in kernel.splitlines() if re.match(r"\s*(from\s+\S+\s+)?c?import\b", line)]
    assert lines and all(re.match(r"from libc\.\w+ cimport ", line) for line in lines)
    for source in ("kernel.h", "kernel_lanes.h"):
        includes = re.findall(r'#\s*include\s*[<"]([^>"]+)', (ROOT / "checker" / source).read_text("utf-8"))
        assert set(includes) <= {"float.h", "math.h", "stddef.h", "stdint.h", "string.h", "kernel_lanes.h"}


def test_no_import_hides_from_this_file():
    for name, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            called = (
                getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            )
            assert called not in DYNAMIC or name == ROOT.name, f"{name} imports by {called}()"


def test_the_door_opens_on_existing_rooms():
    assert set(rankcert._HOME.values()) <= set(MODULES)


@pytest.mark.parametrize(
    "name, line, fault",
    [
        ("rankcert.checker.rows", "from rankcert.problem import AttentionProblem", "upward"),
        ("rankcert.checker.rows", "def f():\n    import rankcert.geometry", "upward"),
        ("rankcert.checker.rows", "import rankcert\nrankcert.certify", "upward"),
        ("rankcert.checker.rows", "from rankcert import load", "upward"),
        ("rankcert.checker.rows", "from ..certificates import load", "upward"),
        ("rankcert.constructions", "from ..heads import read_head", "upward"),
        ("rankcert.problem", "from rankcert.unheard import of", "upward"),
        ("rankcert.problem", "from rankcert import geometry", "upward"),
        ("rankcert.checker.errors", "from rankcert.checker import rows", "cycles"),
        ("rankcert.checker.errors", "from . import rows", "cycles"),
        ("rankcert.kernels.rowspread", "from rankcert.geometry import visible", "cycles"),
        ("rankcert.checker.rows", "import scipy.linalg", "foreign_to_checker"),
        ("rankcert.checker.rows", "import flint", "foreign_to_checker"),
        ("rankcert.checker.rows", "from rankcert import errors", "foreign_to_checker"),
    ],
)
def test_a_planted_import_is_found(name, line, fault):
    imports = IMPORTS | {name: read_imports(name, f"{SOURCES[name]}\n{line}\n")}
    found = upward(imports, FLOORS) if fault == "upward" else globals()[fault](imports)
    assert found, f"{line!r} in {name} went unnoticed"
