"""What is written for a program, read back from that program's own file: the same rope.

To the precision of the file, 2**-24; what is lost on the way stands in the translation's notes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from phasor import LayerRopes, PhasorWarning, Rope
from phasor.axes import InterleavedSections, OneAxis, Sectioned
from phasor.errors import ConfigError, SpecError
from phasor.files.configs.facts import table
from phasor.files.presets import preset, preset_names
from phasor.files.reading import load
from phasor.files.texts import parse_arguments, parse_yaml
from phasor.files.translation import ProgramSettings, TranslationError, translate
from phasor.scaling import Linear, Llama3, LongRope, Yarn

from ...strategies import ropes as random_ropes
from ..refusals import refused

CONTEXT, HEADS = 65536, 2
PRECISION = 2.0**-24  # of float32: half a step, relative


@cache
def class_with(pairing: str, axes: str | None, n_axes: int, part_only: bool) -> str:
    """A model type that rotates so, and takes the rest from its file."""
    for name, facts in table().huggingface.items():
        own = (
            facts.other_positions,
            facts.refused,
            facts.fixed,
            facts.latent,
            facts.turns,
            facts.layers,
        )
        own += (facts.nested, facts.variants, facts.positions, facts.laws, facts.kinds, facts.names)
        layout = facts.axes and facts.axes.layout
        fits = (facts.pairing, layout) == (pairing, axes)
        fits = fits and (facts.partial if part_only else not (facts.fraction or facts.rotary_dim))
        known = not facts.rewrite
        sections = layout is None or len(facts.axes.sections) in (0, n_axes)
        softmax = facts.softmax or facts.pairing_out
        if fits and known and sections and not softmax and not any(own[:-1]):
            return name
    raise NoClassError


class NoClassError(Exception):
    """No class that phasor knows rotates so."""


def huggingface(part: ProgramSettings, rope: Rope) -> dict[str, Any]:
    """A config.json of a class with the pairing and the axes, which no key says."""
    words = {OneAxis: None, Sectioned: "sectioned", InterleavedSections: "interleaved"}
    word = words.get(type(rope.axes), "alternating")
    part_only = rope.rotary_dim < rope.head_dim
    model_type = class_with(rope.pairing, word, rope.axes.n_axes, part_only)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    widths = {"hidden_size": HEADS * rope.head_dim, "head_dim": rope.head_dim}
    file: dict[str, Any] = {"model_type": model_type, "max_position_embeddings": CONTEXT}
    return file | sizes | widths | dict(part.settings)


def mlx_lm(part: ProgramSettings, rope: Rope) -> dict[str, Any]:
    """The same, of a class that reads ``rope_traditional``."""
    # its class takes the slice of a head that turns
    width = rope.head_dim - rope.rotary_start
    return huggingface(part, replace(rope, pairing="half", head_dim=width, rotary_start=0))


def meta(part: ProgramSettings, rope: Rope) -> dict[str, Any]:
    """A params.json."""
    sizes = {"dim": HEADS * rope.head_dim, "n_layers": 1, "n_heads": HEADS, "multiple_of": 256}
    return sizes | dict(part.settings)


def gguf(part: ProgramSettings, rope: Rope) -> dict[str, Any]:
    """Metadata with tensors, of an architecture with the pairing and the axes."""
    arch = "llama" if rope.pairing == "interleaved" else "qwen2"
    if any("deepseek2" in note for note in part.notes):
        arch = "deepseek2"
    arch = "phi3" if isinstance(rope.scaling, LongRope) else arch
    arch = {Sectioned: "qwen2vl", InterleavedSections: "qwen3vl"}.get(type(rope.axes), arch)
    sizes = {"block_count": 1, "context_length": CONTEXT, "attention.head_count": HEADS}
    sizes |= {"embedding_length": HEADS * rope.head_dim, "attention.key_length": rope.head_dim}
    file: dict[str, Any] = {"general.architecture": arch}
    file |= {f"{arch}.{key}": value for key, value in sizes.items()}
    return file | {
        key.replace("{arch}", arch): np.float32(value).astype(float).tolist()
        if isinstance(value, np.ndarray)
        else value
        for key, value in part.settings.items()
    }


def megatron(part: ProgramSettings, rope: Rope) -> dict[str, Any]:
    """The command that is printed, in a launch script."""
    sizes = f"--num-layers 1 --hidden-size {HEADS * rope.head_dim} --num-attention-heads {HEADS}"
    script = f"ARGS=(\n  {sizes}\n  --bf16\n)\npretrain {part.code} \\\n  --swiglu\n"
    return parse_arguments(script, "train.sh")


def litgpt(part: ProgramSettings, rope: Rope) -> dict[str, Any]:
    """The printed lines of a model_config.yaml."""
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": HEADS, "norm_class_name": "RMSNorm"}
    sizes |= {"n_embd": HEADS * rope.head_dim, "head_size": rope.head_dim, "block_size": CONTEXT}
    lines = "".join(f"{key}: {value}\n" for key, value in sizes.items())
    return parse_yaml((lines + part.code).encode(), "model_config.yaml")


def tensorrt_llm(part: ProgramSettings, rope: Rope) -> dict[str, Any]:
    """A checkpoint's config.json; DeepSeek's attention turns a slice with a width of its own."""
    sizes = {"architecture": "LlamaForCausalLM", "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": HEADS, "hidden_size": HEADS * rope.head_dim}
    if any("DeepSeek" in note for note in part.notes) and rope.pairing == "interleaved":
        sizes |= {"architecture": "DeepseekV2ForCausalLM", "qk_rope_head_dim": rope.head_dim}
    return sizes | dict(part.settings)


def maxtext(part: ProgramSettings, rope: Rope) -> dict[str, Any]:
    """A configuration with the printed lines, in a block that the notes name or that is plain."""
    named = re.findall(r"decoder_block has to be (one of )?(\w+)", " ".join(part.notes))
    words = {"Qwen": "qwen3"}
    blocks = [words.get(word, word) for _, word in named]
    block = f"model_name: default\ndecoder_block: {(*blocks, 'llama2')[0]}\n"
    sizes: dict[str, Any] = {"base_num_decoder_layers": 1, "head_dim": rope.head_dim}
    sizes |= {"qk_rope_head_dim": rope.rotary_dim, "compress_ratios": [0]}
    lines = "".join(f"{key}: {value}\n" for key, value in sizes.items())
    return parse_yaml((block + lines + part.code).encode(), "model.yml")


FILES: Mapping[str, Callable[[ProgramSettings, Rope], dict[str, Any]]] = {
    "transformers": huggingface,
    "meta": meta,
    "gguf": gguf,
    "megatron": megatron,
    "mlx-lm": mlx_lm,
    "litgpt": litgpt,
    "maxtext": maxtext,
    "tensorrt-llm": tensorrt_llm,
}
#: Programs whose file does not say which coordinates turn together, but for the notes.
NO_PAIRING = ("transformers",)


def lost(target: str, rope: Rope) -> str | None:
    """What the file does not give back and no note says; None if nothing, or if it is refused."""
    try:
        (part,) = translate(rope, target, context=CONTEXT).parts
    except (TranslationError, SpecError):
        return None
    (performed,) = part.ropes.values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)
        try:
            back = load(FILES[target](part, performed))[0]
        except NoClassError:
            return None
        except ConfigError as error:
            says = str(error).split(" ")[0].rpartition(".")[2]
            return None if f"{says} gives" in " ".join(part.notes) else f"{error}; {part.settings}"
    if back is None:
        return "it does not rotate"
    notes = " ".join(part.notes)
    unsaid = [word for word in differences(performed, back, target) if word not in notes]
    # what the translation changed itself
    unsaid += [word for word in differences(rope, performed, target) if word not in notes]
    return f"{unsaid} of {back} for {performed}; {part.settings}" if unsaid else None


def differences(rope: Rope, other: Rope, target: str) -> list[str]:
    """A word of the notes for each way in which two ropes differ."""
    found: list[str] = []
    if rope.pairing != other.pairing and target not in NO_PAIRING:
        found.append("pairs")
    if rope.output_pairing != other.output_pairing and target not in NO_PAIRING:
        found.append("pairs")
    if (rope.head_dim, rope.rotary_start) != (other.head_dim, other.rotary_start):
        found.append("coordinate")
    if rope.direction != other.direction:
        found.append("clockwise")
    # frequencies that are rounded themselves, and then their divisors
    precision = PRECISION * (2 if rope.inv_freq_dtype == "float32" else 1)
    for length in (2, CONTEXT):
        a, b = rope.at(length), other.at(length)
        # pairs that stand still may be left out of the rotated part
        few, many = sorted((a, b), key=lambda one: one.num_pairs)
        rest = many.inv_freq[few.num_pairs :]
        if rest.any() or not np.allclose(
            few.inv_freq, many.inv_freq[: few.num_pairs], rtol=precision, atol=PRECISION**3
        ):
            found.append("frequencies")
        if not np.isclose(a.attention_factor, b.attention_factor, rtol=PRECISION, atol=0):
            found.append("cos and sin")
        if not np.isclose(a.softmax_factor, b.softmax_factor, rtol=PRECISION, atol=0):
            found.append("softmax")
        pairs = few.num_pairs
        if few.axes.axis_of_pair(pairs) != many.axes.axis_of_pair(many.num_pairs)[:pairs]:
            found.append("axes")
    return list(dict.fromkeys(found))


def of_presets() -> list[Rope]:
    """Every different rope of the presets."""
    models: list[LayerRopes] = [preset(name) for name in preset_names()]
    ropes = dict.fromkeys(rope for model in models for rope in model.ropes)
    return list(dict.fromkeys(form for rope in ropes for form in (rope, rope.at(CONTEXT))))


def forms(rope: Rope) -> list[Rope]:
    """The rope, by a rule also at a length, and nearer ones that more programs can be given."""
    plain = replace(rope, rotary_start=0, direction=1, inv_freq_dtype="exact", pairing_out=None)
    found = [rope, rope.at(CONTEXT), plain]
    if rope.base is not None:
        whole = replace(plain, base=float(max(2, round(rope.base))))
        found += [whole, replace(whole, scaling=None)]
        bare = replace(whole, scaling=None, axes=OneAxis(), head_dim=rope.rotary_dim)
        number = round(rope.base) % 64 + 2
        for law in (
            Linear(factor=number),
            Llama3(factor=number, original_max_positions=8192),
            Yarn(factor=number, original_max_positions=4096, truncate=number % 2 == 0),
            Yarn(factor=number, original_max_positions=4096, mscale=0.7, mscale_all_dim=1.0),
        ):
            found.append(replace(bare, scaling=law))
    return list(dict.fromkeys(found))


def losses(target: str, ropes: list[Rope]) -> list[str]:
    """What is lost of each."""
    return [what for rope in ropes if (what := lost(target, rope)) is not None]


@pytest.mark.parametrize("target", FILES)
def test_what_is_written_for_a_few_presets_is_read_back(target: str) -> None:
    """A dozen of them, every day."""
    assert losses(target, of_presets()[::12]) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", FILES)
def test_what_is_written_for_every_preset_is_read_back(target: str) -> None:
    """Or the loss stands in the notes."""
    assert losses(target, of_presets()) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", FILES)
def test_what_is_written_for_any_rope_is_read_back(target: str) -> None:
    """Random ropes, of every law, axes and pairing, thrice as many as of other properties."""
    number = 3 * settings.default.max_examples

    @settings(max_examples=number, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(random_ropes())
    def holds(rope: Rope) -> None:
        assert losses(target, forms(rope)) == []

    holds()


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2", "glm-5.1"])
def test_latent_attention_is_written_as_tensorrt_llm_reads_it(name: str) -> None:
    """The width of the slice that turns, with YaRN always: its class has the rest in code."""
    model = preset(name)
    (part,) = translate(model, "tensorrt-llm").parts
    keys = {"qk_rope_head_dim", "rotary_base", "max_position_embeddings", "rotary_scaling"}
    assert part.settings.keys() == keys
    assert any("supports only YaRN;" in note for note in part.notes) == (name == "glm-5.1")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": HEADS, "head_size": 192}
    back = load({"architecture": "DeepseekV2ForCausalLM", **sizes, **part.settings})
    rope = back[0]
    assert rope is not None
    assert differences(part.ropes["rope"], rope, "tensorrt-llm") == []
    assert back.num_kv_heads == 1


@pytest.mark.parametrize("target", FILES)
def test_the_round_trip_is_made_of_ropes_that_are_expressed(target: str) -> None:
    """Not of refusals alone; and another number is seen."""
    (part,) = translate(preset("llama-3.1-8b"), target).parts
    (rope,) = part.ropes.values()
    file = FILES[target](part, rope)
    back = load(file)[0]
    assert back is not None
    assert differences(rope, back, target) == []
    assert differences(rope, replace(back, base=400000.0), target) == ["frequencies"]


@pytest.mark.parametrize(
    "factors",
    [
        {"mscale": 0.7},
        {"mscale": 0.0},
        {"mscale": 0.0, "mscale_all_dim": 0.8},
        {"attention_factor": 0.7},
    ],
)
def test_transformers_reads_the_factor_that_mlx_lm_is_given(factors: dict[str, float]) -> None:
    """From mscale, also alone and below 0, mlx-lm computes what attention_factor is beside it."""
    law = Yarn(factor=5.2, original_max_positions=32768, **factors)
    assert lost("mlx-lm", Rope(head_dim=80, pairing="half", base=1e6, scaling=law)) is None


@pytest.mark.parametrize("target", ["litgpt", "tensorrt-llm"])
@pytest.mark.parametrize("name", ["gemma-3-1b", "gemma-3n-e4b"])
def test_two_bases_are_read_back_in_the_same_layers(name: str, target: str) -> None:
    """Local layers and those between them, by the file alone."""
    model = preset(name)
    (part,) = translate(model, target).parts
    layers = {"n_layer": len(model), "num_hidden_layers": len(model)}
    file = FILES[target](part, model.ropes[0])
    back = load(file | {key: count for key, count in layers.items() if key in file})
    assert [rope and rope.base for rope in back] == [rope and rope.base for rope in model]
    said = any("has to be Gemma 3's" in note for note in part.notes)
    assert said == (target == "tensorrt-llm")


@pytest.mark.parametrize("name", ["modernbert-base", "mimo-v2-flash"])
def test_tensorrt_llm_has_local_layers_between_every_nth(name: str) -> None:
    """Those of other models, which begin with a global one, it cannot say; litgpt lists them."""
    model = preset(name)
    main = max(model.ropes, key=lambda rope: rope.base or 0)
    assert model[0] == main
    with refused("ropes"):
        translate(model, "tensorrt-llm")
    assert translate(model, "litgpt").parts[0].settings["rope_indices"][0] == 0


def test_maxtext_says_that_its_class_picks_the_local_layers() -> None:
    """Its keys have a base for them, and no key says which they are."""
    (part,) = translate(preset("modernbert-base"), "maxtext").parts
    assert "local_rope_max_timescale" in part.settings
    assert any("decides which layers are local" in note for note in part.notes)


def test_maxtext_is_told_every_nth_layer_that_does_not_rotate() -> None:
    """By the key of Llama 4's block, without which all layers rotate; other orders have no key."""
    for name, interval in (("llama-4-maverick", 4), ("lfm2-1.2b", None), ("llama-2-7b", None)):
        model = preset(name)
        (part,) = translate(model, "maxtext").parts
        assert part.settings.get("nope_layer_interval") == interval
        if interval:
            turns = [rope is not None for rope in model]
            assert turns == [(i + 1) % interval != 0 for i in range(len(model))]
            assert any("reads nope_layer_interval" in note for note in part.notes)
