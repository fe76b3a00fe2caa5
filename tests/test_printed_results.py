"""What `print` and the prompt show of a result: a few lines, and one short line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import phasor
from phasor import Rope, preset
from phasor.extending import plan_extension
from phasor.files.checkpoint import plan_conversion
from phasor.numpy import rotate
from phasor.scaling import Linear

from .files.checkpoint.checkpoints import save, tensor

ROPE = Rope(head_dim=64, pairing="half")


def conversion(folder: Any) -> Any:
    """The plan for a layer of Meta's names."""
    zeros = np.zeros((128, 4), np.float32)
    path = folder / "meta.safetensors"
    save(path, {f"layers.0.attention.w{c}.weight": tensor(zeros) for c in "qkv"})
    return plan_conversion(path, "interleaved", model=ROPE)


def patched(_: Any) -> Any:
    """What `patch` says of a small model."""
    pytest.importorskip("transformers")
    from tools.tiny_models import tiny_model

    from phasor.torch.live import patch

    return patch(tiny_model("llama"))


#: By what they are called in the documentation, results and a word that their text has.
RESULTS = {
    "load": (lambda _: preset("gemma-3-4b"), "gemma-3-4b: 34 layers"),
    "identify": (
        lambda _: phasor.identify(lambda x, p: rotate(x, p + 1, ROPE), 64),
        "Positions are off by +1",
    ),
    "diff": (
        lambda _: phasor.diff(ROPE, Rope(head_dim=64, pairing="interleaved", base=1e5)),
        "pairing: half and interleaved",
    ),
    "no diff": (lambda _: phasor.diff(ROPE, ROPE), "They agree"),
    "diff of models": (
        lambda _: phasor.diff(preset("gemma-3-4b"), preset("llama-3-8b"), context=8192),
        "gemma-3-4b and llama-3-8b",
    ),
    "diff of a function": (
        lambda _: phasor.diff(ROPE, lambda x, p: rotate(x, p + 1, ROPE)),
        "They differ at position 0",
    ),
    "extension plan": (
        lambda _: plan_extension(preset("qwen3-8b"), 131072),
        "The release of qwen3-8b documents YaRN",
    ),
    "coverage": (
        lambda _: plan_extension(preset("qwen3-8b"), 131072).options["linear"].coverage,
        "0 of 64 pairs show new phases",
    ),
    "translation": (lambda _: phasor.translate(preset("llama-3-8b"), "mlx"), "mx.fast.rope"),
    "conversion plan": (conversion, "half to interleaved, 2 of 3 tensors change"),
    "patch": (patched, "cos and sin of model.rotary_emb"),
}


@pytest.mark.transformers
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_a_few_lines_and_its_repr_is_one(name: str, tmp_path: Any) -> None:
    """The text says what was found; the repr fits a line or two of a terminal."""
    make, says = RESULTS[name]
    result = make(tmp_path)
    assert says in str(result)
    assert len(str(result).splitlines()) <= 15
    assert "\n" not in repr(result)
    assert len(repr(result)) <= 500


def test_a_difference_counts_its_pairs_in_the_right_number() -> None:
    """One pair differs, two pairs differ."""
    one, two = (Rope(head_dim=2 * n, pairing="half", scaling=Linear(factor=2.0)) for n in (1, 2))
    plain = [Rope(head_dim=rope.head_dim, pairing="half") for rope in (one, two)]
    assert "1 pair differs within" in str(phasor.diff(one, plain[0]))
    assert "2 pairs differ within" in str(phasor.diff(two, plain[1]))
