"""GGUF: each architecture that the gguf package names, and damaged files."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest

from phasor import ConfigError, PhasorWarning
from phasor.axes import InterleavedSections, Sectioned
from phasor.files.reading import load
from phasor.files.translation import TranslationError, translate
from phasor.scaling import NTK, Linear, PerPair, Yarn

from ...each import each
from ..refusals import refused
from .config_files import gguf

# llama.cpp's llama_model_rope_type, written down from its switch: NORM turns neighbours
SWITCH = {
    "NORM": """
    arcee arctic baichuan bailingmoe chameleon chatglm cohere2 command-r deci deepseek deepseek2
    ernie4_5 ernie4_5-moe glm-dsa glm4 granite granitehybrid granitemoe internlm2 llada llama
    llama-embed llama4 maincoder minicpm mistral3 mistral4 neo-bert olmo plm smollm3 xverse""",
    "NEOX": """
    afmoe apertus bailingmoe2 bitnet codeshell cogvlm dbrx deepseek2-ocr dots1 dream eurobert exaone
    exaone-moe exaone4 falcon falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n gemma4 glm4moe
    gpt-oss gptneox grok grovemoe hunyuan-dense hunyuan-moe hunyuan_vl jais2 jina-bert-v3 lfm2
    lfm2moe llada-moe mimo2 minicpm3 minimax-m2 modern-bert nemotron nomic-bert nomic-bert-moe olmo2
    olmoe openelm orion pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 qwen qwen2 qwen2moe
    qwen3 qwen3moe qwen3next rnd1 seed_oss smallthinker stablelm starcoder2 step35""",
}
NORM, NEOX = (SWITCH[rope_type].split() for rope_type in ("NORM", "NEOX"))
MROPE = ["paddleocr", "qwen2vl"]
IMROPE = ["qwen35", "qwen35moe", "qwen3vl", "qwen3vlmoe"]
# what its graphs do not turn, and what they have instead of it
NOTHING = {
    **dict.fromkeys(["bert", "gpt2", "starcoder", "mpt"], "learned absolute"),
    **dict.fromkeys(["bloom", "jais", "jina-bert-v2", "refact"], "ALiBi"),
    **dict.fromkeys(["t5", "t5encoder"], "bucketed relative position"),
    **dict.fromkeys(["jamba", "nemotron_h", "nemotron_h_moe"], "Mamba"),
    **dict.fromkeys(["mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"], "recurrent"),
    "kimi-linear": "linear attention",
    "wavtokenizer-dec": "convolutions",
}
REFUSED = {"clip": "a tower for images or sound (mmproj)", "gptj": "no code"}
# what the files of an architecture have besides the sizes of any
SIZES: dict[str, dict[str, Any]] = {
    "baichuan": {"block_count": 32},
    "cogvlm": {"rope__freq_base": 10000.0},
    "deepseek2-ocr": {"rope__freq_base": 10000.0},
    **{
        name: {"attention__sliding_window_pattern": [1, 1, 1, 0]}
        for name in ("gemma4", "mimo2", "step35")
    },
    **{
        name: {"rope__dimension_count": 64}
        for name in ("deepseek2", "glm-dsa", "minicpm3", "mistral4", "plm")
    },
    **{name: {"rope__dimension_sections": [16, 24, 24, 0]} for name in MROPE},
    **{name: {"rope__dimension_sections": [24, 20, 20, 0]} for name in IMROPE},
}
DIVISORS = {"rope_freqs.weight": [1.0] * 64}


def small(architecture: str, **more: Any) -> dict[str, Any]:
    """Metadata of a small model with what files of its architecture need."""
    tensors = DIVISORS if architecture == "gemma4" else {}
    return gguf(architecture, **SIZES.get(architecture, {}) | more) | tensors


def test_every_architecture_of_the_gguf_package_is_here() -> None:
    """As one that llama.cpp turns, or does not, or of which a sentence says why it is refused."""
    assert {*NORM, *NEOX, *MROPE, *IMROPE, *NOTHING, *REFUSED} == {
        *package.MODEL_ARCH_NAMES.values()
    }


@each("architecture", [*NORM, *NEOX, *MROPE, *IMROPE])
def test_an_architecture_that_rotates(architecture: str) -> None:
    """Turns the pairs of llama.cpp's switch, with its axes."""
    ropes = load(small(architecture)).ropes
    assert {rope.pairing for rope in ropes} == {"interleaved" if architecture in NORM else "half"}
    dealt = [InterleavedSections((24, 20, 20))] if architecture in IMROPE else []
    expected = [Sectioned((16, 24, 24))] if architecture in MROPE else dealt
    assert not expected or [rope.axes for rope in ropes] == expected


def test_pairs_that_llama_cpp_leaves_still_are_said() -> None:
    """The rope is the model's, whose 62nd and 63rd pair turn by width and height."""
    for sections, pairs in (([24, 20, 20, 0], ["pairs 61 and 62 stand still"]), ([22, 21, 21], [])):
        ropes = load(gguf("qwen3vl", rope__dimension_sections=sections))
        found = [note for note in ropes.notes if "stand still" in note]
        assert len(found) == len(pairs)
        assert all(words in note for note, words in zip(found, pairs, strict=True))


@pytest.mark.parametrize("architecture", NOTHING)
def test_an_architecture_that_does_not_rotate(architecture: str) -> None:
    """Says what it has instead; its files may count no heads, and no coordinates that turn."""
    heads = {"attention__head_count": 0, "attention__head_count_kv": 0}
    ropes = load(gguf(architecture, **heads, rope__freq_base=None, rope__dimension_count=0))
    assert [*ropes] == [None] * 4
    assert NOTHING[architecture] in ropes.notes[0]


# keys that turn something, in files of architectures that turn nothing
LIVE_KEYS = {
    "rope__freq_base": 500000.0,
    "rope__dimension_count": 64,
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__freq_base_swa": 10000.0,
}
# that converters write for these all the same
UNUSED = {
    name: {"rope__freq_base", "rope__dimension_count"}
    for name in ("kimi-linear", "nemotron_h", "nemotron_h_moe")
}


@each("key", LIVE_KEYS)
@each("architecture", NOTHING)
def test_a_rope_key_of_an_architecture_that_does_not_rotate(architecture: str, key: str) -> None:
    """Is refused by its name, unless the files are known to have it: then it is noted."""
    metadata = gguf(architecture, **{"rope__freq_base": None, key: LIVE_KEYS[key]})
    name = f"{architecture}.{key.replace('__', '.')}"
    if key in UNUSED.get(architecture, ()):
        assert f"Nothing depends on {name}: nothing rotates." in load(metadata).notes
        return
    with refused("unread: strict=False", key=name):
        load(metadata)
    with pytest.warns(PhasorWarning, match=name):
        lenient = load(metadata, strict=False)
    assert [*lenient] == [None] * 4
    assert lenient.notes[-1].startswith(f"Left aside: {name}")


@pytest.mark.parametrize("architecture", REFUSED)
def test_an_architecture_that_cannot_be_read(architecture: str) -> None:
    """Says why, and what to load in its place."""
    with refused(f"architecture_refused: {REFUSED[architecture]}", name=architecture):
        load({"general.architecture": architecture})


WINDOW = {"attention__sliding_window": 128}
OWN_BASE = {"rope__freq_base_swa": 77777.0}
LISTED = {"attention__sliding_window_pattern": [True, False, True, False] * 2}
# of eight layers: s with a sliding window, f with full attention, - without rope
WINDOWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "afmoe": ("afmoe", WINDOW, "sss-sss-"),
    "afmoe without windows": ("afmoe", {}, "sss-sss-"),
    "exaone-moe": ("exaone-moe", WINDOW, "sss-sss-"),
    "exaone-moe with a list, which llama.cpp passes over": ("exaone-moe", LISTED, "sss-sss-"),
    "exaone-moe with a number": (
        "exaone-moe",
        {"attention__sliding_window_pattern": 2},
        "s-s-s-s-",
    ),
    "smallthinker": ("smallthinker", WINDOW, "-sss-sss"),
    "smallthinker without windows": ("smallthinker", {}, "ffffffff"),
    "gemma3": ("gemma3", WINDOW, "sssssfss"),
    "gemma3 without windows": ("gemma3", {"attention__sliding_window": 0}, "ffffffff"),
    "gemma3n": ("gemma3n", WINDOW, "ssssfsss"),
    "gemma4": ("gemma4", LISTED, "sfsfsfsf"),
    "mimo2": ("mimo2", LISTED, "sfsfsfsf"),
    "step35": ("step35", LISTED, "sfsfsfsf"),
    "modern-bert": ("modern-bert", WINDOW, "fssfssfs"),
    "olmo2": ("olmo2", WINDOW, "sssfsssf"),
    "olmo2 without windows": ("olmo2", {}, "ffffffff"),
    "plamo3": ("plamo3", WINDOW, "sssssssf"),
    "gpt-oss": ("gpt-oss", WINDOW, "sfsfsfsf"),
    "gemma2": ("gemma2", {}, "sfsfsfsf"),
    "cohere2": ("cohere2", WINDOW, "sss-sss-"),
    "llama4": ("llama4", {}, "sss-sss-"),
    "llama4 without windows": ("llama4", {"attention__sliding_window": 0}, "ffffffff"),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_layers_with_a_sliding_window(name: str) -> None:
    """Turn by rope.freq_base_swa where the file has it, and only they do."""
    architecture, keys, expected = WINDOWS[name]
    own_base = OWN_BASE if "s" in expected else {}
    ropes = load(small(architecture, block_count=8, **keys, **own_base))
    letters = {None: "-", 500000.0: "f", 77777.0: "s"}
    assert "".join(letters[rope and rope.base] for rope in ropes) == expected


# hparams.rope_freq_base_train_swa is copied from rope.freq_base in some, and 10000 in others
BASES = {
    **dict.fromkeys(["afmoe", "exaone-moe", "smallthinker", "olmo2", "cohere2"], 500000.0),
    **dict.fromkeys(["gemma3", "gemma3n", "gemma4", "modern-bert", "plamo3", "mimo2"], 10000.0),
    "step35": 10000.0,
}


@pytest.mark.parametrize("architecture", BASES)
def test_the_base_of_layers_with_a_sliding_window_in_files_without_it(architecture: str) -> None:
    """Is rope.freq_base or 10000, as llama.cpp has it for the architecture."""
    metadata = small(architecture, block_count=4, **WINDOW)
    rope = load(metadata).kinds["sliding_attention"]
    assert rope is not None
    assert rope.base == BASES[architecture]


# hparams.rope_freq_scale_train_swa is copied from the file's in some, and 1 in others
@pytest.mark.parametrize(
    "architecture", ["gemma3", "gemma3n", "mimo2", "modern-bert", "olmo2", "plamo3"]
)
def test_scaling_that_layers_with_a_sliding_window_ignore(architecture: str) -> None:
    """Is that of the other layers alone."""
    metadata = small(architecture, block_count=8, rope__scaling__factor=8.0, **WINDOW)
    metadata |= (
        {f"{architecture}.attention.sliding_window_pattern": [1, 0] * 4}
        if architecture == "mimo2"
        else {}
    )
    ropes = load(metadata)
    laws = {kind: rope and rope.scaling for kind, rope in ropes.kinds.items()}
    assert laws == {"sliding_attention": None, "full_attention": Linear(factor=8.0)}


def test_a_base_that_no_layer_has_is_refused() -> None:
    """Qwen 2 has no layers with a sliding window; the number of all layers says nothing new."""
    with refused("unread", key="qwen2.rope.freq_base_swa"):
        load(gguf("qwen2", **OWN_BASE))
    assert load(gguf("qwen2", rope__freq_base_swa=500000.0)).ropes[0].base == 500000.0


def test_gemma_4_has_two_widths_and_divisors_for_the_wider() -> None:
    """A full layer's last pairs are divided by 1e30; a dictionary without divisors is refused."""
    keys = {
        "attention__sliding_window_pattern": [True, True, True, False],
        "attention__key_length": 512,
        "attention__key_length_swa": 256,
        "rope__dimension_count": 512,
        "rope__dimension_count_swa": 256,
        "rope__freq_base_swa": 10000.0,
    }
    divisors = [1.0] * 64 + [1e30] * 192
    kinds = load(gguf("gemma4", **keys) | {"rope_freqs.weight": divisors}).kinds
    sliding, full = kinds["sliding_attention"], kinds["full_attention"]
    assert sliding is not None
    assert full is not None
    assert (sliding.head_dim, sliding.rotary_dim, sliding.scaling) == (256, 256, None)
    assert (full.head_dim, full.rotary_dim) == (512, 512)
    assert full.inv_freq[63] == pytest.approx(500000.0 ** (-126 / 512))
    assert full.inv_freq[64] < 1e-30
    with refused("gguf_divisors", path="gemma4", tensor="rope_freqs.weight"):
        load(gguf("gemma4", **keys))


def test_step_35_turns_half_of_its_full_layers() -> None:
    """And takes the first of the divisors for them; the others turn whole, undivided."""
    divisors = np.linspace(1, 8, 64).tolist()
    keys = {"attention__sliding_window_pattern": [1, 1, 1, 0], "rope__freq_base_swa": 10000.0}
    kinds = load(gguf("step35", **keys) | {"rope_freqs.weight": divisors}).kinds
    sliding, full = kinds["sliding_attention"], kinds["full_attention"]
    assert sliding is not None
    assert full is not None
    assert (sliding.head_dim, sliding.rotary_dim, sliding.scaling) == (128, 128, None)
    assert (full.head_dim, full.rotary_dim) == (128, 64)
    assert full.scaling == PerPair(factors=tuple(divisors[:32]))


def test_hunyuans_alpha_raises_the_base() -> None:
    """By alpha ** (d / (d - 2)); its four sections are four axes."""
    sections = [16, 16, 16, 16]
    keys = {"rope__scaling__alpha": 1000.0, "rope__scaling__type": "none"}
    (rope,) = load(gguf("hunyuan_vl", **keys, rope__dimension_sections=sections)).ropes
    assert (rope.scaling, rope.axes) == (NTK(factor=1000.0), Sectioned((16, 16, 16, 16)))
    raised = 500000.0 * 1000.0 ** (128 / 126)
    assert rope.inv_freq[-1] == pytest.approx(raised ** (-126 / 128))
    with refused("value", key="hunyuan-dense.rope.scaling.alpha"):
        load(gguf("hunyuan-dense", rope__scaling__alpha=2.0, rope__scaling__factor=2.0))
    with refused("unread", key="qwen2.rope.scaling.alpha"):
        load(gguf("qwen2", rope__scaling__alpha=2.0))


def test_groks_yarn() -> None:
    """Begins its ramp at 8 turns where the file does not say, and cannot be mixed in by a share."""
    yarn = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 16.0,
        "rope__scaling__yarn_ext_factor": 1.0,
        "rope__scaling__yarn_attn_factor": 1.0,
    }
    (rope,) = load(gguf("grok", **yarn)).ropes
    assert rope.scaling == Yarn(factor=16.0, original_max_positions=8192, beta_fast=8.0)
    assert rope.attention_factor == pytest.approx(1 + 0.1 * math.log(16))
    (rope,) = load(gguf("grok", **yarn, rope__scaling__yarn_beta_fast=30.0)).ropes
    assert rope.scaling == Yarn(factor=16.0, original_max_positions=8192, beta_fast=30.0)
    with refused("value", key="grok.rope.scaling.yarn_ext_factor"):
        load(gguf("grok", **yarn | {"rope__scaling__yarn_ext_factor": 0.5}))


@pytest.mark.parametrize("architecture", ["cogvlm", "deepseek2-ocr"])
def test_an_architecture_whose_rope_is_in_its_code(architecture: str) -> None:
    """Turns whole heads by powers of 10000; a file that asks for something else is refused."""
    (rope,) = load(gguf(architecture, rope__freq_base=None, rope__dimension_count=0)).ropes
    assert (rope.base, rope.rotary_dim, rope.scaling) == (10000.0, 128, None)
    for keys in ({}, {"rope__freq_base": 1e4, "rope__scaling__factor": 2.0}):
        with refused("gguf_fixed", path=architecture, usual=10_000.0):
            load(gguf(architecture, **keys))


@pytest.mark.parametrize("architecture", ["granite", "granitehybrid", "granitemoe"])
def test_granite_turns_unless_its_file_says_that_it_does_not(architecture: str) -> None:
    """Which rope.scaling.finetuned does, whatever its name says."""
    assert load(gguf(architecture)).ropes
    ropes = load(gguf(architecture, rope__scaling__finetuned=False, rope__dimension_count=128))
    assert [*ropes] == [None] * 4
    assert ropes.notes[0].endswith("instead: its attention has no position embeddings.")


@pytest.mark.parametrize(
    ("architecture", "plain"),
    [("glm4", "interleaved"), ("glm4moe", "half"), ("hunyuan_vl", "half")],
)
def test_sections_make_half_pairs_of_several_axes(architecture: str, plain: str) -> None:
    """Where an architecture also has files without any."""
    assert load(gguf(architecture)).ropes[0].pairing == plain
    (rope,) = load(gguf(architecture, rope__dimension_sections=[16, 24, 24, 0])).ropes
    assert (rope.pairing, rope.axes) == ("half", Sectioned((16, 24, 24)))


def test_baichuan_rotates_with_32_layers() -> None:
    """With 40 it has ALiBi, and with others llama.cpp does neither."""
    assert load(gguf("baichuan", block_count=32)).ropes
    alibi = load(gguf("baichuan", block_count=40, rope__freq_base=None))
    assert "ALiBi" in alibi.notes[0]
    with refused("architecture_refused: or 40", name="baichuan"):
        load(gguf("baichuan"))


def test_mpt_has_alibi_where_its_file_has_a_bias() -> None:
    """And learned positions where it has none."""
    ropes = load(gguf("mpt", rope__freq_base=None, attention__max_alibi_bias=8.0))
    assert "ALiBi" in ropes.notes[0]


def test_a_list_of_windows_has_one_for_each_layer() -> None:
    """Of true and false, and files that need one have it."""
    for pattern in ([True] * 3, [True, 2, True, True], [[True]] * 4, 4):
        with refused("value", key="mimo2.attention.sliding_window_pattern"):
            load(gguf("mimo2", attention__sliding_window_pattern=pattern))
    with refused("no_value", key="mimo2.attention.sliding_window_pattern"):
        load(gguf("mimo2"))


def write(path: Path) -> bytes:
    """A small file: each type of value that metadata may have, a weight and divisors."""
    writer = package.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(16)
    writer.add_head_count(2)
    writer.add_rope_freq_base(500000.0)
    writer.add_array("llama.attention.head_count_kv", [2, 0])
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_bool("llama.attention.causal", True)
    writer.add_float64("llama.other", 0.5)
    writer.add_tensor("token_embd.weight", np.ones((2, 16), np.float16))
    writer.add_tensor("rope_freqs.weight", np.arange(1, 5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_file_is_read_with_its_divisors(tmp_path: Path) -> None:
    """Metadata of each type, and the divisors among its tensors."""
    write(tmp_path / "a.gguf")
    rope, nope = load(tmp_path / "a.gguf")
    assert rope is not None
    assert (rope.base, rope.scaling) == (500000.0, PerPair(factors=(1.0, 2.0, 3.0, 4.0)))
    assert nope is None


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """It is said to be damaged, and what to do; only the padding at its end may be missing."""
    whole = write(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    divisors = whole.rindex(np.arange(1, 5, dtype=np.float32).tobytes())
    for length in range(4, divisors + 16):
        cut.write_bytes(whole[:length])
        with refused("gguf_damaged"):
            load(cut)
    cut.write_bytes(whole[: divisors + 16])
    assert load(cut).ropes


@pytest.mark.slow
def test_a_file_with_any_byte_wrong_is_read_or_refused(tmp_path: Path) -> None:
    """Each byte of the header replaced by extremes: ropes or a ConfigError, nothing else."""
    whole = write(tmp_path / "whole.gguf")
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for at in range(4, whole.rindex(b"rope_freqs.weight") + 40):
        for byte in (0x00, 0x7F, 0x80, 0xFF):
            damaged.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            try:
                assert len(load(damaged)) > 0
            except ConfigError:
                refused += 1
    assert refused


def key(name: str, kind: int, value: bytes) -> bytes:
    """A key of metadata, its type and its value."""
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def header(num_tensors: int, num_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    """A file that announces so many tensors and keys."""
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


UINT8, UINT32, STRING, ARRAY = 0, 4, 8, 9
LARGE = (2**40, 2**63, 2**64 - 1)
HOSTILE = {
    "four bytes": b"GGUF",
    "a version that there is not": header(0, 0, version=1),
    "the other byte order": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "a type that there is not": header(0, 1, key("a", 13, b"")),
    "a list of lists": header(0, 1, key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 1000)),
    "a key twice": header(0, 2, key("a", UINT8, b"\0") * 2),
    "an alignment of 0": header(0, 1, key("general.alignment", UINT32, b"\0\0\0\0")),
    "a tensor beyond the end": header(1, 0, struct.pack("<Q1sIQIQ", 1, b"a", 1, 1, 0, 2**40)),
    **{
        f"{what} of {n}": data
        for n in LARGE
        for what, data in {
            "a number of keys": header(0, n),
            "a number of tensors": header(n, 0),
            "a name": header(0, 1, struct.pack("<Q", n)),
            "a text": header(0, 1, key("a", STRING, struct.pack("<Q", n))),
            "a list of numbers": header(0, 1, key("a", ARRAY, struct.pack("<IQ", UINT8, n))),
            "a list of texts": header(0, 1, key("a", ARRAY, struct.pack("<IQ", STRING, n))),
            "divisors": header(1, 0, struct.pack("<Q6sIQIQ", 6, b"rope_a", 1, n, 0, 0)),
            "an offset": header(1, 0, struct.pack("<Q6sIQIQ", 6, b"rope_a", 1, 4, 0, n)),
        }.items()
    },
}
# enough for phasor, and for nothing that a file announces
MEMORY = 2 * 2**30


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_announces_too_much_is_refused(name: str, tmp_path: Path) -> None:
    """Before anything is read or kept."""
    (tmp_path / "a.gguf").write_bytes(HOSTILE[name])
    with refused("gguf_damaged"):
        load(tmp_path / "a.gguf")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "refused"), [(UINT8, "damaged GGUF file"), (STRING, "more than any config has")]
)
def test_a_header_that_is_as_long_as_it_announces_is_bounded(
    kind: int, refused: str, tmp_path: Path
) -> None:
    """A file with a hole of a terabyte: it is refused within a memory of 2 GiB."""
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.write(header(0, 1, key("a", ARRAY, struct.pack("<IQ", kind, 2**36))))
        file.truncate(2**40)
    # set in the child: a fork would be told of the threads of whatever was imported here
    code = f"""import resource, sys, phasor
resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY}, {MEMORY}))
try:
    phasor.load(sys.argv[1])
except phasor.ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    assert refused in done.stdout


def test_a_ramp_that_llama_cpp_computes_otherwise_is_noted_and_not_written() -> None:
    """In a head of two pairs it would end before it begins."""
    law = {"type": "yarn", "factor": 4.0, "original_context_length": 4096}
    keys = {f"rope__scaling__{key}": value for key, value in law.items()}
    narrow = load(gguf(embedding_length=16, rope__freq_base=2.0, **keys))
    assert any("llama.cpp's YaRN ramp" in note for note in narrow.notes)
    with pytest.raises(TranslationError) as error:
        translate(narrow, "llama.cpp")
    assert "llama.cpp's YaRN ramp" in str(error.value)
    assert not any("ramp" in note for note in load(gguf(**keys)).notes)


def test_without_the_package_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the other extras."""
    missing: Any = None
    monkeypatch.setitem(sys.modules, "gguf", missing)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with refused("gguf_package: pip install 'phasor-rope[gguf]'"):
        load(tmp_path / "a.gguf")
