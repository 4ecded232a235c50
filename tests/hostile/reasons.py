"""The reasons for refusing a file, as they stand in the source of the reader."""

import ast
from pathlib import Path

from rankcert.checker import claim


def reasons_in_the_source() -> set[str]:
    """Every reason claim.py can give: the second argument of require, the first of MalformedCertificate."""
    tree = ast.parse(Path(claim.__file__).read_text("utf-8"))
    found, dynamic = set(), []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        position = {"require": 1, "MalformedCertificate": 0}.get(getattr(call.func, "id", ""))
        if position is None:
            continue
        argument = call.args[position]
        for choice in [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]:
            if isinstance(choice, ast.Constant):
                found.add(choice.value)
            else:
                dynamic.append(ast.unparse(choice))
    assert sorted(dynamic) == ["name", "reason"]  # a field's own name, and require passing its argument on
    return found | set(claim.FIELDS)
