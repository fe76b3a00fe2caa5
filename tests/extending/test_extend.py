"""A longer context on the command line: the laws compared, and blocks that read back exactly."""

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from phasor import Rope, load, preset
from phasor.charts import report
from phasor.cli.extend import print_plan
from phasor.errors import SpecError
from phasor.extending import plan_extension
from phasor.files.configs.facts import table
from phasor.files.dialects.blocks import config_keys
from phasor.files.presets import documented_extension
from phasor.scaling import DynamicNTK, LongRope, PerPair, Yarn

from ..cli.running import run_phasor
from ..files.configs.config_files import CONFIGS, small

PLAIN = Rope(head_dim=128, pairing="half", base=500_000.0)
LAWS = ("unchanged", "linear", "ntk", "dynamic_ntk", "yarn", "llama3")


# a file for each thing a block can say, and for each law that a published model has
FILES = {
    "plain": small(),
    "partial": small(
        model_type="gpt_neox", rotary_pct=0.25, max_position_embeddings=2048, rope_theta=10000.0
    ),
    "linear": small(rope_scaling={"type": "linear", "factor": 2.0}),
    "dynamic": small(
        rope_scaling={"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8192}
    ),
    "constant ntk": small(
        model_type="hunyuan_v1_dense",
        head_dim=128,
        rope_scaling={"type": "dynamic", "alpha": 1000.0},
    ),
    "sections dealt out": small(
        model_type="qwen3_vl_text",
        head_dim=128,
        rope_scaling={
            "rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True
        },
    ),
    "axes in turn": small(
        model_type="ernie4_5_vl_moe_text",
        rope_scaling={"rope_type": "default", "mrope_section": [22, 22, 20]},
    ),
} | {
    name: json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    for name in ("llama_3_1_v4", "deepseek_v3", "gpt_oss", "phi_3", "qwen2_vl")
}  # fmt: skip


KEYS = table().files
# what Qwen3-8B's own file says, of which the release documents YaRN 4 from 32768
QWEN3 = small(
    model_type="qwen3",
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    hidden_size=4096,
    head_dim=128,
    max_position_embeddings=40960,
    rope_theta=1000000.0,
)


def extend(*arguments):
    """`phasor extend` with these arguments."""
    return run_phasor("extend", *arguments)


def with_keys(config, keys):
    """The file as a user leaves it: what is replaced goes, what is printed comes."""
    changed = copy.deepcopy(config)
    inner = changed.get("text_config", changed)
    for key in (*KEYS["replaced"], *KEYS["replaced_by_kind"]):
        inner.pop(key, None)
    return changed | {"text_config": inner | keys} if "text_config" in changed else inner | keys


# a law that is unchanged is one of a shorter context
@pytest.mark.filterwarnings("ignore:.* is used, which extends .* although:phasor.PhasorWarning")
@pytest.mark.parametrize("name", FILES)
def test_every_block_reads_back_as_its_rope(name):
    """The file with the block of any law offered is exactly the rope that was compared."""
    ropes = load(FILES[name])
    planned = plan_extension(ropes, 4 * ropes.context)
    assert len(planned.options) > 1
    for way in planned.options.values():
        assert way.config is not None, way.refused
        keys = json.loads(json.dumps(way.config))
        again = load(with_keys(FILES[name], keys))[0]
        law = way.config_rope.scaling
        if isinstance(law, PerPair):  # a longrope block whose lists are the law's at every length
            assert {again.at(n) for n in (1, 10**6)} == {way.config_rope}
        else:
            assert again == way.config_rope


@pytest.mark.parametrize("name", FILES)
def test_the_stated_rope_turns_as_the_compared_one(name):
    """A raised base and a dynamic rule give the frequencies that the table is about."""
    ropes = load(FILES[name])
    to = 4 * ropes.context
    for way in plan_extension(ropes, to).options.values():
        if way.name == "unchanged":
            continue
        stated = way.config_rope.at(to)
        # a base rounded to a float moves each frequency by half a rounding at most
        assert np.allclose(stated.inv_freq, way.rope.inv_freq, rtol=2.0**-51, atol=0)
        assert stated.attention_factor == way.rope.attention_factor


def test_every_other_name_of_the_base_and_of_the_context_is_replaced():
    """One left beside the new keys would contradict them."""
    facts = [one for one in table().huggingface.values() if not one.positions]
    of_kinds = {kind.base_key for one in facts for kind in one.kinds.values() if kind.base_key}
    bases = {"rope_theta"} | {name for one in facts for name in one.names.get("rope_theta", ())}
    flat = {name for name in bases if "." not in name}
    assert {*flat, *KEYS["contexts"], "rope_ratio"} <= {
        *KEYS["replaced"],
        "max_position_embeddings",
    }
    assert of_kinds <= {*KEYS["replaced"], *KEYS["replaced_by_kind"]}


@pytest.mark.parametrize(
    "said",
    [
        {"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000},
        {"model_type": "phi3small", "rope_embedding_base": 10000},
        {"model_type": "chatglm", "rope_ratio": 50, "kv_channels": 128},
    ],
    ids=lambda said: said["model_type"],
)
def test_a_block_with_another_base_replaces_the_bases_other_names(said):
    """NTK-aware scaling is another base, and the file had one under its own name."""
    config = small(**said)
    del config["rope_theta"]
    planned = plan_extension(load(config), 32768)
    assert load(planned.config_with(config, "ntk"))[0] == planned.option("ntk").config_rope


@pytest.mark.parametrize("key", KEYS["contexts"])
def test_the_context_may_have_had_another_name(key):
    """The file with the printed keys says one context, the new one."""
    config = small()
    config[key] = config.pop("max_position_embeddings")
    planned = plan_extension(load(config), 32768)
    assert load(planned.config_with(config, "yarn")).context == 32768


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([], "  Set these keys"),
        (["text_config"], "  In text_config set these keys"),
        (["thinker_config", "text_config"], "  In thinker_config.text_config set these keys"),
    ],
    ids=["none", "one", "two"],
)
@pytest.mark.report
def test_the_keys_go_where_the_language_model_is_described(levels, said, capsys):
    """At the top of a larger model's file they would contradict the config inside."""
    config = functools.reduce(
        lambda one, key: {"model_type": "llava", key: one}, levels[::-1], dict(QWEN3)
    )
    planned = plan_extension(load(config), 131072)
    print_plan(planned, None)
    assert f"\n{said}:\n" in capsys.readouterr().out
    assert planned.as_plain(None)["inside"] == ".".join(levels)
    place = f"<code>{'.'.join(levels)}</code> of " if levels else ""
    page = report(load(config), to=131072)
    says = f"In {place}a Hugging Face <code>config.json</code> set the keys of one law"
    assert f"{says}:" in page
    changed = planned.config_with(config, None)
    assert load(changed)[0] == planned.option(None).config_rope
    assert "rope_theta" in str(config), "the file that was given stays"


def test_dynamic_scaling_keeps_the_context_of_training_beside_it():
    """Readers of dynamic NTK take max_position_embeddings for the original context."""
    law = DynamicNTK(factor=4.0, original_max_positions=512)
    rope = Rope(head_dim=64, pairing="half", scaling=law)
    assert config_keys(rope, 512, 2048)["max_position_embeddings"] == 512
    assert config_keys(PLAIN, 512, 2048)["max_position_embeddings"] == 2048


def test_the_table_counts_what_a_loop_counts():
    """Pairs of new phases, slowest turns and the change of sign, from 8192 to 131072 tokens."""
    plain = json.loads(extend("llama-3-8b", "--to", 131072, "--json").stdout)
    assert [way["law"] for way in plain["options"]] == list(LAWS)
    found = {way["law"]: way for way in plain["options"]}
    steps = [500_000.0 ** (-k / 64) for k in range(64)]
    never = sum(8192 * step < 2 * np.pi for step in steps)
    assert (
        found["unchanged"]["pairs_with_new_phases"],
        found["linear"]["pairs_with_new_phases"],
    ) == (never, 0)
    assert found["unchanged"]["slowest_turns"] == pytest.approx(131072 * steps[-1] / (2 * np.pi))
    assert found["yarn"]["attention_factor"] == pytest.approx(0.1 * np.log(16) + 1, rel=1e-15)
    sign = found["unchanged"]["sign_change"]
    sums = [np.cos(r * np.array(steps)).sum() for r in range(sign - 2000, sign + 1)]
    assert min(sums[:-1]) >= 0 > sums[-1]


@pytest.mark.parametrize("law", [None, "documented", "yarn", "llama3"])
def test_the_documented_block_is_printed_and_any_other_on_request(law):
    """The JSON at the end of the text is the config's, of the law asked for."""
    process = extend("qwen3-8b", "--to", "128k", *([] if law is None else ["--law", law]))
    assert process.returncode == 0, process.stderr
    keys = json.loads(process.stdout[process.stdout.index("\n{") :])
    assert keys["max_position_embeddings"] == 131072
    assert keys["rope_parameters"]["rope_type"] == ("llama3" if law == "llama3" else "yarn")
    said = (4.0, 32768) if law in (None, "documented") else (3.2, 40960)
    block = keys["rope_parameters"]
    assert (block["factor"], block["original_max_position_embeddings"]) == said
    before, _, table = process.stdout.partition("new phases")
    assert "The release of qwen3-8b documents YaRN with factor 4 from 32768 tokens" in before
    assert "Source: Qwen3's model cards" in before
    assert "Recommended: this setting" in before
    assert "2309.00071, Table 1" in table


@pytest.mark.parametrize(
    ("model", "to"),
    [
        ("llama-3-8b", "128k"),
        pytest.param("qwen3-8b", "131073", marks=pytest.mark.slow),
        pytest.param("qwen3-4b-2507", "1M", marks=pytest.mark.slow),
    ],
)
def test_without_evidence_nothing_is_recommended(model, to):
    """What to measure is said in its place, and no block is printed until a law is named."""
    process = extend(model, "--to", to)
    assert process.returncode == 0, process.stderr
    assert "Recommended" not in process.stdout
    assert "{" not in process.stdout
    assert "no law is recommended" in process.stdout.lower()
    assert "perplexity at the full length" in process.stdout
    plain = json.loads(extend(model, "--to", to, "--json").stdout)
    assert plain["recommended"] is plain["law"] is plain["config"] is None
    with pytest.raises(SpecError, match="law must be given, because none is recommended"):
        plan_extension(preset(model), plain["to"]).option(None)


@pytest.mark.parametrize(
    "name", ["qwen3-8b", "qwen3-30b-a3b", "qwen2.5-7b-instruct", "qwen2.5-72b-instruct"]
)
def test_what_a_release_documents_reaches_its_length(name):
    """YaRN's factor times the original context, 131072 for both families of Qwen."""
    ropes = preset(name)
    known = documented_extension(ropes)
    assert (known.model, known.reach) == (name, 131072)
    assert len(ropes.ropes) == 1
    assert ropes[0].scaling is None
    assert known.law.original_max_positions <= ropes.context < known.reach


def test_a_preset_has_what_its_own_release_documents():
    """Qwen2 has the layers of Qwen2.5, and its base model's card documents nothing."""
    assert list(preset("qwen2-7b")) == list(preset("qwen2.5-7b-instruct"))
    assert documented_extension(preset("qwen2-7b")) is None


def test_a_config_file_of_a_release_is_known_by_its_layers():
    """And one with another base or context is not."""
    assert documented_extension(load(QWEN3)).model == "qwen3-8b"
    judged = plan_extension(load(QWEN3), 131072).judgement
    assert judged[0].startswith("Its layers are as in qwen3-8b, which documents YaRN with factor 4")
    assert documented_extension(load(QWEN3 | {"rope_theta": 1e4})) is None
    assert documented_extension(load(QWEN3 | {"max_position_embeddings": 32768})) is None


def test_only_keys_that_the_file_has_are_to_be_removed():
    """Of a preset no file was read, and a law in the place of another removes nothing."""

    def removed(model, law):
        return plan_extension(model, 16384).option(law).file_keys.to_remove

    scaled = load(
        small(
            rope_scaling={"type": "dynamic", "alpha": 1000.0},
            model_type="hunyuan_v1_dense",
            head_dim=128,
        )
    )
    assert removed(scaled, "ntk") == ("rope_scaling",)
    assert removed(load(small()), "yarn") == removed(preset("llama-3-8b"), "ntk") == ()


def test_write_makes_a_config_that_reads_back(tmp_path):
    """The rest of the file is as it was, and the given one is not touched."""
    source = tmp_path / "config.json"
    config = QWEN3 | {"rope_scaling": None, "vocab_size": 151936, "title": "größer"}
    source.write_text(json.dumps(config), "utf-8")
    before = source.read_bytes()
    process = extend(source, "--to", "128k", "--write", tmp_path / "longer")
    assert process.returncode == 0, process.stderr
    assert "for 131072 tokens by documented.\n" in process.stdout
    said = " ".join(process.stdout.split())
    assert f"The folder has no weights: copy or link those of {tmp_path}" in said
    assert f"phasor translate {tmp_path / 'longer'} --to vllm" in said
    written = json.loads((tmp_path / "longer" / "config.json").read_text("utf-8"))
    assert source.read_bytes() == before
    assert written.keys() == config.keys(), "a file of transformers 4 stays one"
    assert all(written[key] == config[key] for key in ("vocab_size", "title", "model_type"))
    expected = Yarn(factor=4.0, original_max_positions=32768)
    assert load(tmp_path / "longer")[0] == replace(load(QWEN3)[0], scaling=expected)
    assert load(tmp_path / "longer").context == 131072
    again = extend(source, "--to", "128k", "--write", tmp_path / "longer", "--json")
    assert again.returncode == 2
    assert "exists already" in json.loads(again.stdout)["error"]
    assert [path.name for path in (tmp_path / "longer").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("qwen3-8b", [], "give its path"),
        ("-", [], "give its path"),
        ("params.json", ["--law", "yarn"], "give its path"),
        ("config.json", [], "law must be given"),
        ("gptj.json", ["--law", "yarn"], "ignores laws and bases"),
    ],
    ids=["preset", "standard input", "another format", "no law", "a class without laws"],
)
def test_write_refuses_what_it_cannot_change(tmp_path, model, arguments, said):
    """With one line, and no folder is made."""
    files = {
        "config.json": small(),
        "gptj.json": small(model_type="gptj", rope_theta=1e4),
        "params.json": {"dim": 64, "n_layers": 1, "n_heads": 1, "multiple_of": 256},
    }
    for name, config in files.items():
        (tmp_path / name).write_text(json.dumps(config), "utf-8")
    process = run_phasor(
        *("extend", tmp_path / model if model in files else model, "--to", "128k"),
        *("--context", 8192, "--write", tmp_path / "out", *arguments),
        stdin=json.dumps(QWEN3).encode(),
    )
    assert (process.returncode, process.stderr.count("\n")) == (2, 1), process.stderr
    assert said in process.stderr
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    """Neither a part of it nor the folder that was made for it."""
    source = tmp_path / "config.json"
    source.write_text(json.dumps(QWEN3), "utf-8")
    failing = mock.patch.object(Path, "replace", side_effect=OSError(28, "No space left"))
    with failing:
        process = extend(source, "--to", "128k", "--write", tmp_path / "out")
    assert process.returncode == 2
    assert "No space left" in process.stderr
    assert not (tmp_path / "out").exists()


def test_longrope_takes_the_factors_of_a_search(tmp_path):
    """As a rule that is plain within the trained length; without them the error says what to do."""
    refused = extend("llama-3-8b", "--to", "16k", "--law", "longrope")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--factors FILE" in refused.stderr
    file = tmp_path / "factors.json"
    file.write_text(json.dumps({"long_factor": [1.0] * 40 + [2.0] * 24}), "utf-8")
    way = ["extend", "llama-3-8b", "--to", "16k", "--law", "longrope", "--factors", file]
    plain = json.loads(run_phasor(*way, "--json").stdout)
    again = load(with_keys(FILES["plain"], plain["config"]))[0]
    expected = LongRope(
        short_factors=(1.0,) * 64,
        long_factors=(1.0,) * 40 + (2.0,) * 24,
        original_max_positions=8192,
        factor=2.0,
    )
    assert again.scaling == Rope.from_dict(plain["rope"]).scaling == expected
    for text in ("[1.0]", '{"long_factor": 2}', '{"long_factor": [1.0]}', '{"long_factor": ["a"]}'):
        file.write_text(text, "utf-8")
        assert run_phasor(*way).returncode == 2


def test_set_changes_the_parameters_of_the_law():
    """The block says them, and the table is about them."""
    arguments = ["llama-3-8b", "--to", "64k", "--law", "yarn", "--json"]
    plain = json.loads(
        extend(*arguments, "--set", "beta_fast=16", "--set", "truncate=false").stdout
    )
    assert plain["config"]["rope_parameters"]["beta_fast"] == 16.0
    assert plain["config"]["rope_parameters"]["truncate"] is False
    factor = json.loads(extend(*arguments, "--set", "factor=32").stdout)
    ways = {way["law"]: way["attention_factor"] for way in factor["options"]}
    assert ways["yarn"] == pytest.approx(0.1 * np.log(32) + 1, rel=1e-15)


def test_a_model_of_several_kinds_asks_for_one():
    """And says where its block stands."""
    process = extend("gemma-3-4b", "--to", 262144)
    assert process.returncode == 2
    assert "kind must be given" in process.stderr
    process = extend("gemma-3-4b", "--to", 262144, "--kind", "full", "--law", "linear")
    assert process.returncode == 0, process.stderr
    assert "'full_attention' is the block for these layers" in process.stdout
    keys = json.loads(process.stdout[process.stdout.index("\n{") :])
    assert list(keys["rope_parameters"]) == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama-3-8b"], "--to"),
        (["llama-3-8b", "--to", "8192"], "to must be"),
        (["llama-3-8b", "--to", "16384", "--law", "yarm"], "law must be one of"),
        (["llama-3-8b", "--to", "16384", "--kind", "full"], "kind must be one of rope"),
        (["glm-4-9b", "--to", "16384"], "context must be given"),
        (["llama-3-8b", "--to", "16384", "--set", "factor=2"], "name the law with --law"),
        (["llama-3-8b", "--to", "16k", "--law", "yarn", "--set", "x=2"], "beta_fast"),
        (["llama-3-8b", "--to", "16k", "--law", "yarn", "--set", "factor"], "NAME=NUMBER"),
        (["llama-3-8b", "--to", "16k", "--law", "yarn", "--set", "factor=[1]"], "NAME=NUMBER"),
        (["llama-3-8b", "--to", "16q"], "128k (131072)"),
    ],
    ids=[
        *("no length", "no longer", "unknown law", "unknown kind", "unknown context"),
        *("no law to set", "unknown parameter", "no number", "list", "unknown unit"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said):
    """Nothing on stdout, no traceback."""
    process = extend(*arguments)
    assert (process.returncode, process.stdout, process.stderr.count("\n")) == (2, "", 1)
    assert said in process.stderr


def test_a_model_without_rope_has_nothing_to_extend():
    """A sentence, and no search for a kind."""
    bloom = small(model_type="esm", position_embedding_type="absolute")
    with pytest.raises(SpecError, match="no layer of esm has a rotary embedding"):
        plan_extension(load(bloom), 2048, context=1024)


@pytest.mark.parametrize("name", ["gpt-j-6b", "codegen-2b", "roformer-chinese-base", None])
def test_a_class_without_laws_is_shown_them_and_given_no_block(name):
    """One would change nothing, whatever law is asked for."""
    ropes = load(small(model_type="gptj", rope_theta=1e4)) if name is None else preset(name)
    for way in plan_extension(ropes, 4 * ropes.context).options.values():
        assert way.config is None
        assert "ignores laws and bases in its config" in way.refused


def test_a_config_is_extended_from_its_own_context(tmp_path):
    """A path does what a preset does, and --context overrules the file."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FILES["plain"]), "utf-8")
    plain = json.loads(extend(path, "--to", 16384, "--json").stdout)
    assert (plain["context"], plain["to"]) == (8192, 16384)
    told = json.loads(extend(path, "--to", 16384, "--context", 4096, "--json").stdout)
    assert told["options"][1]["resolution"] == pytest.approx(0.25)
