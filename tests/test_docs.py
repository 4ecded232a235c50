"""Every example in a docstring and in README.md runs and says the truth."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import rankcert

README = Path(__file__).parents[1] / "README.md"
MODULES = sorted(module.name for module in pkgutil.walk_packages(rankcert.__path__, "rankcert."))
# Of examples the reader is shown, these must exist.
SHOWN = ("rankcert.certification", "rankcert.checker.verification", "rankcert.heads")


def run_examples(text: str, name: str, namespace: dict) -> int:
    """Run the >>> examples of a text in `namespace`; returns how many there were."""
    test = doctest.DocTestParser().get_doctest(text, namespace, name, name, 0)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(
        test, out=report.append, clear_globs=False
    )
    assert result.failed == 0, "".join(report)
    return result.attempted


def python_blocks(markdown: str) -> list[str]:
    return re.findall(r"^```(?:python|py|pycon)\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, tmp_path, monkeypatch):
    """Examples of public names run as a reader types them, with nothing imported; others see their module."""
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    attempted = 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        public = set(test.name.split(".")) & set(rankcert.__all__)
        attempted += run_examples(test.docstring, test.name, {} if public else dict(vars(module)))
    assert attempted or name not in SHOWN


def test_readme_blocks(tmp_path, monkeypatch):
    """Blocks share one namespace, as a reader types them in one session."""
    text = README.read_text("utf-8")
    blocks = python_blocks(text)
    assert blocks or not text.strip(), "README.md shows no Python"
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "readme"}
    for number, block in enumerate(blocks, 1):
        if ">>>" in block:
            assert run_examples(block, f"README.md, block {number}", namespace)
        else:
            exec(compile(block, f"README.md, block {number}", "exec"), namespace)


def test_a_wrong_example_is_found():
    (block,) = python_blocks("text\n```python\n>>> 1 + 1\n3\n```\n```\n>>> not python\n```\n")
    with pytest.raises(AssertionError, match="Expected"):
        run_examples(block, "planted", {})
    assert run_examples(">>> x = 1\n>>> x\n1\n", "planted", {}) == 2
