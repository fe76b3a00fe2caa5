"""``phasor translate``: what it prints, as text and as JSON, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import phasor
from phasor import Rope
from phasor.files.translation import TARGETS, translate

from .running import run_phasor


def test_without_a_model_it_lists_the_programs() -> None:
    """With what each is given and how that is checked."""
    done = run_phasor("translate", COLUMNS="200")
    assert done.returncode == 0
    for name, target in TARGETS.items():
        lines = done.stdout.splitlines()
        row = lines[lines.index(f"--to {name}") + 1]
        assert target.program in row
        assert ("not proved" in row) == (target.checked == "description")


def test_a_target_without_a_model_is_an_error() -> None:
    """One line says what is missing."""
    done = run_phasor("translate", "--to", "mlx")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--to needs a MODEL" in done.stderr


def test_without_a_target_it_answers_for_every_program() -> None:
    """Which can, and why the others cannot."""
    done = run_phasor("translate", "gpt-oss-20b")
    assert done.returncode == 0
    able, _, refused = done.stdout.partition("\nno:\n")
    names = [name for line in able.splitlines()[1:] for name in line.split(": ")[1].split(", ")]
    reasons = dict(line.strip().split(": ", 1) for line in refused.splitlines())
    assert sorted([*names, *reasons]) == sorted(TARGETS)
    assert "vllm" in names
    assert reasons["torchtune"] == "the law Yarn (the closest is off by 557 radians)"
    plain = json.loads(run_phasor("translate", "gpt-oss-20b", "--json").stdout)
    assert {name for name, one in plain.items() if one["can"]} == set(names)


def test_the_programs_as_json() -> None:
    """The same facts as in the list."""
    listed = json.loads(run_phasor("translate", "--json").stdout)
    assert [row["name"] for row in listed] == sorted(TARGETS)
    for row in listed:
        target = TARGETS[row["name"]]
        facts = {"program": target.program, "source": target.source, "checked": target.checked}
        assert row == {"name": target.name, **facts}


@pytest.mark.parametrize(
    ("word", "name"),
    [("Llama-CPP", "llama.cpp"), ("MLX", "mlx"), ("flash attn", "flash-attn"), ("vLLM", "vllm")],
)
def test_a_program_is_found_in_any_capitals_and_punctuation(word: str, name: str) -> None:
    """As the model's name is."""
    done = run_phasor("translate", "llama-2-7b", "--to", word)
    assert done.stdout.startswith(f"llama-2-7b for {name}: ")
    assert phasor.translate(phasor.preset("llama-2-7b"), word, context=64).target.name == name


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("llamacpp", "did you mean 'llama.cpp'"),
        ("flashattn", "did you mean 'flash-attn'"),
        ("hf", "did you mean 'transformers'"),
        ("Hugging-Face", "did you mean 'transformers'"),
        ("ollama", "did you mean 'gguf'"),
        ("lmstudio", "did you mean 'gguf'"),
        ("zzz", "`phasor translate` lists them all"),
    ],
)
def test_an_unknown_program_is_an_error_with_what_is_near(word: str, hint: str) -> None:
    """Or with the command that lists them."""
    done = run_phasor("translate", "llama-2-7b", "--to", word)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"target must be a known program, got {word!r}; {hint}" in done.stderr
    with pytest.raises(phasor.SpecError, match=hint):
        phasor.translate(phasor.preset("llama-2-7b"), word)


def test_settings_are_printed_as_the_code_names_them() -> None:
    """Arrays with every number, and then the call: what is printed can be pasted."""
    lines = run_phasor("translate", "llama-3.1-8b", "--to", "mlx").stdout.splitlines()
    assert lines[0] == f"llama-3.1-8b for mlx: {TARGETS['mlx'].program}"
    assert lines[1] == f"{TARGETS['mlx'].source}; phasor's tests run its own code"
    assert lines[3:7] == ["rope layers", "dims = 128", "traditional = False", "base = None"]
    (printed,) = [line for line in lines if line.startswith("freqs = ")]
    (part,) = translate(phasor.preset("llama-3.1-8b"), "mlx").parts
    assert eval(printed.removeprefix("freqs = ")) == part.settings["freqs"].tolist()
    assert lines[-2].startswith("mx.fast.rope(x, dims, ")


def test_a_rope_of_a_preset_is_printed_by_its_name() -> None:
    """One that is reordered first, or read from a file, as JSON that reads back."""
    printed = run_phasor("translate", "llama-3.1-8b", "--to", "liger").stdout
    assert "rope = phasor.preset('llama-3.1-8b').kinds['rope']\n" in printed
    printed = run_phasor("translate", "gpt-j-6b", "--to", "liger").stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("rope = ")]
    rope = eval(line.removeprefix("rope = "), {"phasor": phasor})
    assert (rope.pairing, rope.rotary_dim) == ("half", 64)
    assert "! liger turns half pairs: reorder the weights first" in printed


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_json_is_the_translation(target: str) -> None:
    """With every number."""
    done = run_phasor("translate", "llama-2-7b", "--to", target, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == translate(phasor.preset("llama-2-7b"), target).as_plain()


def test_a_refusal_is_one_line_with_the_nearest() -> None:
    """On stderr, with the status of input that phasor refuses."""
    done = run_phasor("translate", "gpt-oss-20b", "--to", "torchtune")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("phasor: torchtune cannot express the law Yarn; the nearest")
    assert len(done.stderr.splitlines()) == 1


def test_flags_that_cannot_say_a_law_send_to_the_file_that_can() -> None:
    """Before the nearest; of gpt-oss neither can."""
    done = run_phasor("translate", "Llama 3.1 8B", "--to", "llama.cpp")
    assert done.stderr.startswith("phasor: llama.cpp cannot express the law Llama3 ")
    assert " (use --to gguf); the nearest" in done.stderr
    done = run_phasor("translate", "gpt-oss-20b", "--to", "llama.cpp")
    assert done.stderr.startswith("phasor: llama.cpp cannot express the law Yarn")
    assert "--to gguf" not in done.stderr


def test_a_rule_takes_a_length() -> None:
    """The error names the option; with it the law of that length is translated."""
    refused = run_phasor("translate", "phi-4-mini", "--to", "mlx")
    assert refused.returncode == 2
    assert "--seq-len TOKENS" in refused.stderr
    done = run_phasor("translate", "phi-4-mini", "--to", "mlx", "--seq-len", "8192", "--json")
    (part,) = json.loads(done.stdout)["parts"]
    rope = phasor.preset("phi-4-mini").ropes[0].at(8192)
    assert Rope.from_dict(part["ropes"]["rope"]) == rope


def test_a_config_file_is_translated_for_its_own_context(tmp_path: Path) -> None:
    """Or for the one that is given."""
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), "utf-8")
    for given, context in (([], 2048), (["--context", "512"], 512)):
        done = run_phasor("translate", path, "--to", "flash-attn", "--json", *given)
        plain = json.loads(done.stdout)
        assert plain["context"] == plain["parts"][0]["settings"]["max_positions"] == context
