"""Programs that do not install here: functions written from their documentation."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import described, described_ggml, described_settings
from .jobs import Job, on_slice, own_block, run_code


@contextmanager
def installed(module: str, program: Any) -> Iterator[None]:
    """A context in which the module can be imported and holds the described functions."""
    sys.modules[module] = program
    try:
        yield
    finally:
        del sys.modules[module]


def flash_attn(job: Job) -> np.ndarray:
    """What ``apply_rotary_emb`` is documented to do, with the code that calls it."""
    import torch

    program = SimpleNamespace(apply_rotary_emb=described.apply_rotary_emb)

    def turn(x: np.ndarray) -> np.ndarray:
        tokens = torch.tensor(x)[None, :, None]  # [batch, seq, heads, head_dim]
        with installed("flash_attn.layers.rotary", program):
            turned = run_code(job.part, x=tokens, offset=job.offset, positions=job.positions.T)
        return turned[0, :, 0].double().numpy()

    return on_slice(job, turn)


def flashinfer(job: Job) -> np.ndarray:
    """The three functions, as they are documented."""
    import torch

    program = SimpleNamespace(
        apply_rope_pos_ids=described.apply_rope_pos_ids,
        apply_llama31_rope_pos_ids=described.apply_llama31_rope_pos_ids,
        apply_rope_with_cos_sin_cache=described.apply_rope_with_cos_sin_cache,
    )

    def turn(x: np.ndarray) -> np.ndarray:
        tokens = torch.tensor(x)[:, None]  # [seq, heads, head_dim]
        with installed("flashinfer", program):
            # [tokens], or NumPy's [tokens, axes]
            one_axis = job.positions.ndim == 1
            positions = torch.tensor(job.positions) if one_axis else job.positions.T
            q, k = run_code(job.part, q=tokens, k=tokens, positions=positions)
        assert torch.equal(q, k)
        return q.flatten(1).double().numpy()

    return on_slice(job, turn)


def transformer_engine(job: Job) -> np.ndarray:
    """The class and the function, as they are documented."""
    import torch

    program = SimpleNamespace(
        RotaryPositionEmbedding=described.RotaryPositionEmbedding,
        apply_rotary_pos_emb=described.apply_rotary_pos_emb,
    )

    def turn(x: np.ndarray) -> np.ndarray:
        with installed("transformer_engine.pytorch.attention.rope", program):
            turned = run_code(
                job.part,
                t=torch.tensor(x)[:, None, None],  # [seq, batch, heads, head_dim]
                tensor_format="sbhd",
                start_positions=torch.tensor([job.offset]),
                positions=job.positions.T,
            )
        return turned[:, 0, 0].double().numpy()

    return on_slice(job, turn)


def vllm(job: Job) -> np.ndarray:
    """``get_rope`` as it is documented, and the same block in the command."""
    if "get_rope" not in job.part.settings:
        return by_ernies_class(job, "--hf-overrides")
    arguments = job.part.settings["get_rope"][job.kind]
    assert in_command(job, "--hf-overrides") in (None, arguments["rope_parameters"])
    return by_factory(job, described.vllm_get_rope(**arguments))


def sglang(job: Job) -> np.ndarray:
    """``get_rope`` as it is documented, and the same block in the command."""
    if "get_rope" not in job.part.settings:
        return by_ernies_class(job, "--json-model-override-args")
    arguments = job.part.settings["get_rope"][job.kind]
    assert in_command(job, "--json-model-override-args") in (None, arguments["rope_scaling"])
    return by_factory(job, described.sglang_get_rope(**arguments))


def in_command(job: Job, option: str) -> Any:
    """The block of a kind of layer that the command overrides; None where it does not."""
    if job.ropes.in_config.ignores_scaling:
        assert option not in job.part.code
        return None
    words = shlex.split(job.part.code)
    override = json.loads(words[words.index(option) + 1])
    for name in filter(None, job.ropes.in_config.path.split(".")):
        override = override[name]
    assert job.offset < override["max_position_embeddings"]
    blocks = override["rope_parameters"]
    if "rope_type" in blocks:  # the base of classes that read no block
        assert override["rope_theta"] == blocks["rope_theta"]
    block = blocks if "rope_type" in blocks else blocks[job.ropes.in_config.label(job.kind)]
    # what is done to queries besides is no argument of a factory
    return block and {key: block[key] for key in block if key != "llama_4_scaling_beta"}


def by_ernies_class(job: Job, option: str) -> np.ndarray:
    """Height and width in turn, then time: the class reads the base and the pairs of time alone."""
    import torch

    block = in_command(job, option)
    assert block["rope_type"] == "default"
    assert any("Ernie 4.5 VL's class" in note for note in job.part.notes)
    override = job.part.settings["override"]
    for name in filter(None, job.ropes.in_config.path.split(".")):
        override = override[name]
    n = job.x.shape[1] // 2
    others = n - override["freq_allocation"]
    axes = [1 + k % 2 if k < others else 0 for k in range(n)]
    freqs = described.plain(2 * n, block["rope_theta"])
    angles = torch.tensor(job.positions)[axes].T.float() * freqs
    turned = described.turned(torch.tensor(job.x), angles.cos(), angles.sin(), interleaved=True)
    return turned.double().numpy()


def by_factory(job: Job, rotate: described.Rotate) -> np.ndarray:
    """The tokens turned by a module of a serving engine."""
    import torch

    def turn(x: np.ndarray) -> np.ndarray:
        return rotate(torch.tensor(job.positions), torch.tensor(x)).double().numpy()

    return on_slice(job, turn)


def exllamav3(job: Job) -> np.ndarray:
    """Its frequencies, turned in the pairing that a note says; negative ones turn clockwise."""
    import torch

    config, rope = own_block(job), job.part.ropes[job.kind]
    freqs, gain = described_settings.exllamav3(config, rope.head_dim - rope.rotary_start)
    assert any(f"must rotate {rope.pairing} pairs" in note for note in job.part.notes)
    positions = torch.tensor(job.positions)
    angles = described.angles_by_sections(positions, freqs, config["rope_parameters"])
    cos, sin, interleaved = angles.cos() * gain, angles.sin() * gain, rope.pairing == "interleaved"

    def turn(x: np.ndarray) -> np.ndarray:
        turned = described.turned(torch.tensor(x), cos, sin, interleaved=interleaved)
        return turned.double().numpy()

    return on_slice(job, turn)


def litgpt(job: Job) -> np.ndarray:
    """Its tables; interleaved pairs are put into halves before they are turned."""
    import torch

    keys, rope = job.part.settings, job.part.ropes[job.kind]
    first = job.ropes.layer_kinds.index(job.kind)
    local = bool(keys.get("rope_indices", [0] * (first + 1))[first])
    freqs, gain = described_settings.litgpt(keys, rope.head_dim, local=local)
    angles = torch.tensor(job.positions)[:, None].float() * freqs
    width = 2 * len(freqs)
    tokens = torch.tensor(job.x)
    if keys["rope_interleave"]:
        first = [*range(0, width, 2), *range(1, width, 2)]
        tokens = tokens[:, [*first, *range(width, rope.head_dim)]]
    cos, sin = gain * angles.cos(), gain * angles.sin()
    return described.turned(tokens, cos, sin, interleaved=False).double().numpy()


def maxtext(job: Job) -> np.ndarray:
    """The class that its keys pick, of a model whose name begins as a note says."""
    import torch

    keys, notes = job.part.settings, " ".join(job.part.notes)
    rope = job.part.ropes[job.kind]
    (name,) = re.findall(r"model_name has to begin with (\w+)", notes) or ["any"]
    positions = torch.tensor(job.positions)
    tokens = torch.tensor(job.x)
    given = {"model_name": name, **keys}
    if rope.rotary_start:
        assert f"deepseek4, with head_dim {rope.head_dim} and qk_rope_head_dim" in notes
        base = keys[f"{'compressed_' * ('compressed' in job.kind)}rope_max_timescale"]
        assert isinstance(base, int)
        angles = positions[:, None].float() * described.plain(rope.rotary_dim, base)
        cos, sin = angles.cos(), angles.sin()

        def turn(x: np.ndarray) -> np.ndarray:
            tokens = torch.tensor(x)
            return described.turned(tokens, cos, sin, interleaved=True).double().numpy()

        return on_slice(job, turn)
    return described_settings.maxtext(given, job.kind, tokens, positions).double().numpy()


def tensorrt_llm(job: Job) -> np.ndarray:
    """Its tables, in the pairing that the file says."""
    import torch

    keys, rope = job.part.settings, job.part.ropes[job.kind]
    assert json.loads(job.part.code) == json.loads(json.dumps(keys))
    local = "rope_local_base_freq" in keys and rope.base == keys["rope_local_base_freq"]
    end = job.offset + len(job.x)
    freqs, gain = described_settings.tensorrt_llm(keys, local=local, end=end)
    block = keys["rotary_scaling"] or {}
    angles = described.angles_by_sections(torch.tensor(job.positions), freqs, block)
    interleaved = keys.get("position_embedding_type", "rope_gptj") == "rope_gptj"
    tokens, cos, sin = torch.tensor(job.x), gain * angles.cos(), gain * angles.sin()
    return described.turned(tokens, cos, sin, interleaved=interleaved).double().numpy()


def gguf(job: Job) -> np.ndarray:
    """What ggml is documented to do with the file, in a layer of this kind."""
    keys = {key.removeprefix("{arch}."): value for key, value in job.part.settings.items()}
    return by_ggml(job, keys, {})


def llama_cpp(job: Job) -> np.ndarray:
    """What the flags are documented to do to a file without scaling."""
    rope = job.part.ropes[job.kind]
    keys: dict[str, Any] = {"rope.freq_base": 10_000.0, "rope.dimension_count": rope.rotary_dim}
    if rope.axes.n_axes > 1:
        keys["rope.dimension_sections"] = rope.axes.sections
    return by_ggml(job, keys, job.part.settings)


def by_ggml(job: Job, keys: dict[str, Any], flags: dict[str, Any]) -> np.ndarray:
    """The slice turned in the mode that a note says, with a context that ends at the last token."""
    (mode,) = {mode for note in job.part.notes for mode in re.findall(r"rope type (\w+)", note)}
    to = described_ggml.llama_rope(
        keys,
        flags,
        mode=mode,
        n_ctx=job.offset + len(job.x),
        swa="sliding" in job.kind,
        scale_swa=not any("layers alone" in note for note in job.part.notes),
    )
    positions = described_ggml.text_positions(job.offset, len(job.x))
    return on_slice(job, lambda x: described_ggml.ggml_rope(x, positions, to))
