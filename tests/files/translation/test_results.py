"""What `phasor.translate` returns: parts by kind of layer, plain values, text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phasor
from phasor import LayerRopes, QueryFactor, Rope, load, preset
from phasor.axes import Sectioned
from phasor.errors import SpecError
from phasor.files.translation import TARGETS, TranslationError, translate
from phasor.scaling import Linear, Proportional, Yarn

from ... import oracle
from ...each import each
from ...strategies import resolved_ropes
from ..refusals import refused

ROPE = Rope(head_dim=64, pairing="half")
GRID = Rope(head_dim=64, pairing="half", axes=Sectioned((16, 8, 8)))
KINDS = {"full": ROPE, "nope": None, "sliding": Rope(head_dim=64, pairing="half", base=1e6)}


def layers(kinds: dict[str, Rope | None], **rest: Any) -> LayerRopes:
    """A model with a layer of each kind."""
    return LayerRopes(name="toy", layer_kinds=tuple(kinds), kinds=kinds, context=4096, **rest)


def read_back(value: Any, like: Any) -> Any:
    """A value from JSON, as it was in the settings."""
    if isinstance(like, np.ndarray):
        return np.array([float(x) for x in value], dtype=like.dtype)
    return Rope.from_dict(value) if isinstance(like, Rope) else value


def equal(a: Any, b: Any) -> bool:
    """Whether two settings are the same, to the last bit."""
    if isinstance(a, np.ndarray):
        return a.tolist() == b.tolist()
    return a == b


@given(resolved_ropes(), st.sampled_from(sorted(TARGETS)), st.integers(2, 4096))
@settings(max_examples=60)
def test_a_translation_is_json_and_reads_back(rope: Rope, target: str, context: int) -> None:
    """Into the same settings; and its rope turns as the one that was given."""
    try:
        translated = translate(rope, target, context=context)
    except TranslationError:
        return
    plain = json.loads(json.dumps(translated.as_plain(), allow_nan=False))
    assert (plain["target"], plain["context"]) == (target, context)
    assert plain["source"].startswith("https://")
    for part, described in zip(translated.parts, plain["parts"], strict=True):
        assert list(described["ropes"]) == ["rope"]
        performed = Rope.from_dict(described["ropes"]["rope"])
        assert performed == part.ropes["rope"]
        assert described["settings"].keys() == part.settings.keys()
        for name, value in part.settings.items():
            assert equal(read_back(described["settings"][name], value), value), name
        pairs = zip(oracle.frequencies(performed), oracle.frequencies(rope), strict=True)
        # a frequency of float32 is off by 2**-24, one made from a divisor by 2**-52
        assert all(math.isclose(f, g, rel_tol=2.0**-23, abs_tol=1e-300) for f, g in pairs)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_kind_of_layer_that_rotates_is_in_one_part(target: str) -> None:
    """A kind without rotation is in none."""
    try:
        parts = translate(layers(KINDS), target).parts
    except TranslationError:
        # a program with one rope for all layers
        return
    assert [kind for part in parts for kind in part.ropes] == ["full", "sliding"]


@pytest.mark.parametrize("law", [Linear(factor=4.0), Yarn(factor=4.0, original_max_positions=64)])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_weights_are_reordered_in_all_layers_or_in_none(
    target: str, pairing: Any, law: Linear | Yarn
) -> None:
    """A program that has a law for the other pairs alone is given them in every layer."""
    full = replace(ROPE, pairing=pairing, scaling=law)
    ropes = layers({"full": full, "sliding": replace(full, scaling=None)})
    try:
        parts = translate(ropes, target, context=256).parts
    except TranslationError:
        return
    assert len({rope.pairing for part in parts for rope in part.ropes.values()}) == 1
    assert len({any("reorder the weights" in note for note in part.notes) for part in parts}) == 1


def test_kinds_with_one_rope_share_a_part() -> None:
    """A function that rotates is given it once."""
    (part,) = translate(layers({"full": ROPE, "nope": None, "wide": ROPE}), "mlx").parts
    assert part.ropes == {"full": ROPE, "wide": ROPE}


def test_a_translation_in_words() -> None:
    """The model, the program, then each part by its layers with its notes."""
    scaled = Rope(head_dim=64, pairing="half", scaling=Linear(factor=4.0))
    assert str(translate(layers({"full": scaled}), "torchtune")) == (
        "toy for torchtune: the class and arguments of attention's pos_embeddings\n"
        "\n"
        "full layers:\n"
        "dim = 64\n"
        "max_seq_len = 4096\n"
        "base = 10000.0\n"
        "scale_factor = 4.0\n"
        "low_freq_factor = 1.0\n"
        "high_freq_factor = 4.0\n"
        "old_context_len = 1\n"
        "from torchtune.models.llama3_1 import Llama3ScaledRoPE\n"
        "\n"
        "rotary = Llama3ScaledRoPE(\n"
        "    dim=dim,\n"
        "    max_seq_len=max_seq_len,\n"
        "    base=base,\n"
        "    scale_factor=scale_factor,\n"
        "    low_freq_factor=low_freq_factor,\n"
        "    high_freq_factor=high_freq_factor,\n"
        "    old_context_len=old_context_len,\n"
        ")\n"
        "# x [batch, seq, heads, head_dim]; positions [batch, seq]\n"
        "rotary(x, input_pos=positions)\n"
        "# torchtune turns interleaved pairs: reorder the weights first "
        "(phasor convert FOLDER OUT --to interleaved)."
    )


STILL = Rope(head_dim=8, pairing="interleaved", scaling=Proportional(fraction=0.5))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_printed_variables_can_be_pasted(target: str) -> None:
    """Each is set to its setting, whole arrays and infinities too."""
    try:
        translated = translate(STILL, target, context=64)
    except TranslationError:
        return
    for part in translated.parts:
        scope: dict[str, Any] = {}
        exec("\n".join(translated.variables(part)), scope)
        if part.as_variables:
            for name, value in part.settings.items():
                assert equal(np.asarray(scope[name]) if isinstance(value, np.ndarray) else
                             scope[name], value)  # fmt: skip


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_linear_law_of_1_is_none(target: str) -> None:
    """Written like the rope without it, which every program can be given."""
    divided = replace(ROPE, scaling=Linear(factor=1.0))
    both = [translate(rope, target, context=64).as_plain() for rope in (divided, ROPE)]
    assert both[0] == both[1]


def test_a_shell_does_not_expand_the_list_of_layers() -> None:
    """Brackets are a pattern of file names to it."""
    (part,) = translate(layers({"full": ROPE, "nope": None}), "megatron").parts
    assert "--no-rope-freq '[0,1]'" in part.code
    assert part.settings["--no-rope-freq"] == "[0,1]"


@pytest.mark.parametrize("target", ["flashinfer", "liger"])
def test_kernels_that_read_behind_their_tables_have_a_note(target: str) -> None:
    """An error would say it otherwise."""
    (part,) = translate(phasor.preset("gpt-oss-20b"), target).parts
    assert any("the kernel does not check" in note for note in part.notes)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "gpt-oss-20b"])
def test_flashinfer_is_said_to_take_numbers_of_16_bits(name: str) -> None:
    """Whichever of its functions is called."""
    (part,) = translate(phasor.preset(name), "flashinfer").parts
    assert "q and k have to be float16 or bfloat16." in part.notes


def test_llama_cpp_is_told_how_to_take_the_longer_context() -> None:
    """Its server caps a scaled context at the one that the file says."""
    scaled = Rope(head_dim=64, pairing="half", scaling=Linear(factor=4.0))
    for rope, told in ((scaled, True), (ROPE, False)):
        (part,) = translate(rope, "llama.cpp", context=8192).parts
        assert any("ARCH.context_length=int:8192," in note for note in part.notes) == told


@pytest.mark.parametrize("target", ["sglang", "transformers", "vllm"])
def test_classes_that_scale_the_softmax_themselves_are_named(target: str) -> None:
    """Who multiplied besides would do it twice."""
    (part,) = translate(phasor.preset("deepseek-v3"), target).parts
    (note,) = [note for note in part.notes if "softmax" in note]
    assert "the classes of DeepSeek models do that themselves" in note


@pytest.mark.parametrize("target", ["sglang", "vllm"])
def test_classes_that_read_the_base_alone_are_given_it(target: str) -> None:
    """A changed base would not reach them in a block; a law never does, which a note says."""
    (part,) = translate(phasor.preset("internlm2.5-7b"), target, seq_len=65_536).parts
    override = part.settings["override"]
    assert override["rope_theta"] == override["rope_parameters"]["rope_theta"] > 3e6
    assert f'"rope_theta": {override["rope_theta"]!r}, "rope_parameters"' in part.code
    assert any("some read rope_theta alone, which is given too." in note for note in part.notes)
    # layers with bases of their own have none in common
    (part,) = translate(layers(KINDS), target).parts
    assert "rope_theta" not in part.settings["override"]
    assert any(note.endswith("some read rope_theta alone.") for note in part.notes)


@pytest.mark.parametrize("target", ["sglang", "vllm"])
def test_a_call_of_a_factory_imports_it(target: str) -> None:
    """Where the class of the model reads no config."""
    (part,) = translate(phasor.preset("gpt-j-6b"), target).parts
    assert ".rotary_embedding import get_rope\n\nget_rope(**{" in part.code


def test_notes_say_what_is_besides_cos_and_sin() -> None:
    """The softmax factor, another pairing of the result, and where the slice begins."""
    rope = Rope(
        head_dim=96,
        rotary_dim=64,
        rotary_start=32,
        pairing="interleaved",
        pairing_out="half",
        scaling=Yarn(factor=4.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0),
    )
    (part,) = translate(rope, "mlx", context=64).parts
    begins = ("x is the slice of a head", "The model writes half pairs", "Multiply the softmax")
    assert all(map(str.startswith, part.notes, begins))
    assert len(part.notes) == 3
    assert repr(rope.softmax_factor) in part.notes[2]


@each("name, other", [("deepseek-v3.2", True), ("deepseek-v3", False)])
def test_a_rotation_beside_attention_has_a_note_where_code_is_written(
    name: str, other: bool
) -> None:
    """A class makes it of its config itself."""
    for target, written in (("mlx", True), ("transformers", False)):
        notes = translate(preset(name), target).parts[0].notes
        said = "The indexer has a rotation of its own, which is not written here."
        assert (said in notes) == (other and written)


def test_the_context_is_the_models_unless_given() -> None:
    """It is the length of tables."""
    ropes = phasor.preset("llama-3.1-8b")
    assert translate(ropes, "flash-attn").context == ropes.context == 131_072
    translated = translate(ropes, "flash-attn", context=8192)
    assert translated.context == translated.parts[0].settings["max_positions"] == 8192


def test_a_context_below_the_length_is_not_printed() -> None:
    """A server that is told the model's own would forbid that length."""
    ropes = phasor.preset("internlm2.5-7b")  # 32768 tokens
    for at, context in ((65_536, 65_536), (1000, 32_768)):
        assert translate(ropes, "flash-attn", seq_len=at).context == context
        for target, printed in (
            ("vllm", f"--max-model-len {context} "),
            ("sglang", f"--context-length {context} "),
            ("transformers", f'"max_position_embeddings": {context},'),
        ):
            assert printed in translate(ropes, target, seq_len=at).parts[0].code
    assert translate(ropes, "flash-attn", seq_len=65_536, context=4096).context == 4096


def test_llama_cpp_is_started_for_the_context() -> None:
    """Otherwise it takes that of the file, which is not the extended one."""
    (part,) = translate(ROPE, "llama.cpp", context=8192).parts
    assert part.code.startswith("llama-server -m FILE -c 8192 --rope-freq-base ")


EXPLICIT = Rope(head_dim=64, pairing="half", explicit_inv_freq=(0.5,) * 32)


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("rope", [ROPE, EXPLICIT, GRID], ids=["plain", "explicit", "grid"])
def test_a_context_is_asked_for_only_where_it_is_printed(rope: Rope, target: str) -> None:
    """Two contexts then give two codes or settings."""
    try:
        short, long = (translate(rope, target, context=n).as_plain() for n in (64, 128))
    except TranslationError:
        return
    if short["parts"] != long["parts"]:
        with pytest.raises(SpecError, match=f"context must be given for {target}"):
            translate(rope, target)
    else:
        assert translate(rope, target).context is None


def test_a_refusal_without_a_context_says_the_distance_of_one_token() -> None:
    """The radians at any other position are as many times more."""
    with refused("base") as caught:
        translate(EXPLICIT, "megatron")
    assert "radians at position 1: base=" in str(caught.value)


def test_a_rope_is_a_model_of_one_layer() -> None:
    """It has no context of its own."""
    with pytest.raises(SpecError, match="context must be given for flash-attn"):
        translate(ROPE, "flash-attn")
    assert translate(ROPE, "mlx", context=64).model == "rope"


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_target_says_what_it_does_with_the_factor_on_queries(target: str) -> None:
    """Also of layers that do not rotate, which have no part; another model has no such note."""
    plain = layers({"full": ROPE, "nope": None})
    factors = {"nope": QueryFactor(strength=0.1, length=64)}
    try:
        translate(plain, target)
    except TranslationError:
        plain, factors = layers({"full": ROPE}), {"full": factors["nope"]}
    (kind,) = factors
    notes = [part.notes for part in translate(replace(plain, query_factors=factors), target).parts]
    said = f"Queries of {kind} layers are multiplied by 1 + 0.1 ln(1 + floor(p / 64)); "
    its_code = ("gguf", "llama.cpp", "mlx-lm", "sglang", "transformers", "vllm")
    done = "has code for such models that does so" if target in its_code else "leaves that to you"
    assert f"{said}{target} {done}." in notes[0]
    assert not any("Queries" in n for part in translate(plain, target).parts for n in part.notes)


@each("target, strength, form, does", [
    ("gguf", 0.1, "steps", True), ("gguf", 0.2, "steps", False), ("llama.cpp", 0.2, "steps", False),
    ("maxtext", 0.1, "steps", True), ("maxtext", 0.2, "steps", False),
    ("meta", 0.2, "steps", True), ("meta", 0.1, "log", False),
    ("vllm", 0.2, "steps", True), ("vllm", 0.1, "log", False),
    ("transformers", 0.1, "log", True),
])  # fmt: skip
def test_a_program_with_other_numbers_leaves_queries_to_the_user(
    target: str, strength: float, form: Any, does: bool
) -> None:
    """Some have those of Llama 4 as constants, or no code of that form."""
    factor = QueryFactor(strength=strength, length=8192, first=1, form=form)
    model = replace(preset("llama-4-maverick"), query_factors={"nope": factor})
    (part,) = translate(model, target, context=8192).parts
    done = "has code for such models that does so" if does else "leaves that to you"
    assert f"Queries of nope layers are multiplied by {factor}; {target} {done}." in part.notes
    if target == "maxtext":  # off unless it is said
        assert part.settings.get("temperature_tuning", False) is does


@each("name, does", [
    ("ministral-3-8b", True), ("mistral-small-4-119b", True), ("llama-4-scout", False),
])  # fmt: skip
def test_exllamav3_multiplies_queries_where_its_yarn_says_by_what(name: str, does: bool) -> None:
    """Its code of other laws reads no factor, and that of YaRN takes its length from the law."""
    model = preset(name)
    ((kind, factor),) = model.query_factors.items()
    rope = model.kinds[kind]
    plain = model if rope is None else replace(model, kinds={kind: replace(rope, scaling=None)})
    longer = replace(model, query_factors={kind: replace(factor, length=2 * factor.length)})
    for ropes, its_code in ((model, does), (plain, False), (longer, False)):
        (note,) = [n for n in translate(ropes, "exllamav3").parts[0].notes if "Queries" in n]
        assert note.endswith("does so.") == its_code


def test_the_factor_on_queries_is_among_the_keys_of_those_who_read_it() -> None:
    """Ministral's class fails without it, and Meta's code leaves the factor out."""
    (part,) = translate(preset("ministral-3-8b"), "transformers").parts
    block = part.settings["rope_parameters"]
    assert block["llama_4_scaling_beta"] == 0.1
    assert block["original_max_position_embeddings"] == 16384
    file = {"model_type": "ministral3", "num_hidden_layers": 2, "hidden_size": 64,
            "num_attention_heads": 2, "head_dim": 128, **part.settings}  # fmt: skip
    assert load(file).query_factor(1) == preset("ministral-3-8b").query_factor(1)
    maverick = preset("llama-4-maverick")
    (part,) = translate(maverick, "meta").parts
    keys = {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1}
    assert keys.items() <= part.settings.items()
    params = {"dim": 5120, "n_layers": 48, "n_heads": 40, "moe_args": {}, **part.settings}
    assert load(params).query_factors == maverick.query_factors


#: Without a law, and of which no other key says where the factor begins.
MINISTRAL = {"model_type": "ministral3", "num_hidden_layers": 2, "hidden_size": 64,
             "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 200}  # fmt: skip
STEPS = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 50}
MINISTRAL_STEPS = MINISTRAL | {"rope_parameters": {"rope_type": "default", **STEPS}}


@each("target", ["transformers", "vllm", "sglang", "mlx-lm"])
def test_the_length_of_that_factor_is_kept_where_no_law_has_one(target: str) -> None:
    """The keys put over those of the file leave what the model's class reads."""
    (part,) = translate(load(MINISTRAL_STEPS), target).parts
    block = {**part.settings, **part.settings.get("override", {})}["rope_parameters"]
    assert block["llama_4_scaling_beta"] == 0.3
    assert block["original_max_position_embeddings"] == 50


@each("target", ["transformers", "vllm", "sglang", "mlx-lm"])
def test_a_law_of_another_length_than_the_factors_is_refused(target: str) -> None:
    """Both read one key."""
    model = load(MINISTRAL_STEPS)
    (kind,) = model.kinds
    law = Yarn(factor=4.0, original_max_positions=200)
    longer = replace(model, kinds={kind: replace(model[0], scaling=law)})
    with refused("query_length: floor(p / 50)"):
        translate(longer, target)


def test_exllamav3_is_given_no_factor_that_it_would_take_otherwise() -> None:
    """Its code of YaRN would take the law's length."""
    model = preset("ministral-3-8b")
    ((kind, factor),) = model.query_factors.items()
    longer = replace(model, query_factors={kind: replace(factor, length=2 * factor.length)})
    for ropes, is_given in ((model, True), (longer, False)):
        (part,) = translate(ropes, "exllamav3").parts
        assert ("llama_4_scaling_beta" in part.settings["rope_parameters"]) == is_given


@each("target", ["transformers", "vllm", "sglang", "mlx-lm"])
def test_llama_4s_factor_is_among_the_keys_where_its_file_is_another_programs(target: str) -> None:
    """The classes have other numbers by default."""
    meta = {"dim": 512, "n_layers": 4, "n_heads": 4, "rope_theta": 5e5, "multiple_of": 256}
    tuned = {"nope_layer_interval": 2, "attn_temperature_tuning": True, "floor_scale": 90.0}
    ropes = load(meta | tuned)
    (part,) = translate(ropes, target, context=100).parts
    keys = {**part.settings, **part.settings.get("override", {})}
    file = {"model_type": "llama4_text", "num_hidden_layers": 4, "hidden_size": 512,
            "num_attention_heads": 4, "no_rope_layers": [1, 0, 1, 0]}  # fmt: skip
    read = [key for key in keys if key.startswith(("attn_", "floor_"))]
    assert load(file | {key: keys[key] for key in read}).query_factors == ropes.query_factors


@each("arch, more", [
    ("mistral3", {}), ("deepseek2", {"attention.kv_lora_rank": 512, "attention.key_length": 192}),
])  # fmt: skip
def test_the_factor_on_queries_is_in_the_metadata_of_a_gguf_file(
    arch: str, more: dict[str, int]
) -> None:
    """Without which llama.cpp leaves it out."""
    name = "ministral-3-8b" if arch == "mistral3" else "mistral-small-4-119b"
    model = preset(name)
    (part,) = translate(model, "gguf").parts
    keys = {"block_count": 2, "embedding_length": 4096, "attention.head_count": 32, **more}
    file = {f"{arch}.{key}": value for key, value in keys.items()}
    file |= {key.format(arch=arch): value for key, value in part.settings.items()}
    read = load({"general.architecture": arch, **file})
    assert read.query_factor(0) == model.query_factor(0)
    assert "arch}.attention.temperature_scale" in part.code
    ((kind, factor),) = model.query_factors.items()
    longer = replace(model, query_factors={kind: replace(factor, length=2 * factor.length)})
    (part,) = translate(longer, "gguf").parts
    assert "temperature" not in part.code
    assert part.notes[-1].endswith("gguf leaves that to you.")
