"""A longer context on the command line: the laws compared, and blocks that read back exactly."""

import copy
import functools
import json

import numpy as np
import pytest

from phasor import Rope, load, preset
from phasor.cli.extend import print_plan
from phasor.configs import REPLACED, REPLACED_OF_KINDS, config_keys
from phasor.configs.facts import CONTEXTS, table
from phasor.errors import SpecError
from phasor.extending import plan
from phasor.report import report
from phasor.scaling import DynamicNTK, PerPair

from ..cli.running import run_phasor
from ..configs.config_files import CONFIGS, small

PLAIN = Rope(head_dim=128, pairing="half", base=500_000.0)
LAWS = ("unchanged", "linear", "ntk", "dynamic_ntk", "yarn", "llama3")


# a file for each thing a block can say, and for each law that a published model has
FILES = {
    "plain": small(),
    "partial": small(
        model_type="gpt_neox", rotary_pct=0.25, max_position_embeddings=2048, rope_theta=10000.0
    ),
    "linear": small(rope_scaling={"type": "linear", "factor": 2.0}),
    "dynamic": small(rope_scaling={"type": "dynamic", "factor": 2.0}),
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


def extend(*arguments):
    """`phasor extend` with these arguments."""
    return run_phasor("extend", *arguments)


def with_keys(config, keys):
    """The file as a user leaves it: what is replaced goes, what is printed comes."""
    changed = copy.deepcopy(config)
    inner = changed.get("text_config", changed)
    for key in (*REPLACED, *REPLACED_OF_KINDS):
        inner.pop(key, None)
    return changed | {"text_config": inner | keys} if "text_config" in changed else inner | keys


@pytest.mark.parametrize("name", FILES)
def test_every_block_reads_back_as_its_rope(name):
    """The file with the block of any law offered is exactly the rope that was compared."""
    ropes = load(FILES[name])
    planned = plan(ropes, None, None, 4 * ropes.context)
    assert len(planned.ways) > 1
    for way in planned.ways.values():
        assert way.config is not None, way.refused
        keys = json.loads(json.dumps(way.config))
        again = load(with_keys(FILES[name], keys))[0]
        law = way.rope.scaling
        if isinstance(law, PerPair):  # a longrope block whose lists are the law's at every length
            assert {again.at(n) for n in (1, 10**6)} == {way.rope}
        else:
            assert again == way.rope


@pytest.mark.parametrize("name", FILES)
def test_the_stated_rope_turns_as_the_compared_one(name):
    """A raised base and a dynamic rule give the frequencies that the table is about."""
    ropes = load(FILES[name])
    to = 4 * ropes.context
    for way in plan(ropes, None, None, to).ways.values():
        if way.extension.name == "unchanged":
            continue
        stated = way.rope.at(to)
        # a base rounded to a float moves each frequency by half a rounding at most
        assert np.allclose(stated.inv_freq, way.extension.rope.inv_freq, rtol=2.0**-51, atol=0)
        assert stated.attention_factor == way.extension.attention_factor


def test_every_other_name_of_the_base_and_of_the_context_is_replaced():
    """One left beside the new keys would contradict them."""
    facts = [one for one in table().huggingface.values() if not one.positions]
    units = {one.base_unit for one in facts if one.base_unit is not None}
    of_kinds = {kind.base_key for one in facts for kind in one.kinds.values() if kind.base_key}
    bases = {"rope_theta"} | {name for one in facts for name in one.names.get("rope_theta", ())}
    flat = {name.partition(".")[0] for name in bases if not name.startswith("attn_config")}
    assert {*flat, *CONTEXTS, *units} <= {*REPLACED, "max_position_embeddings"}
    assert of_kinds <= {*REPLACED, *REPLACED_OF_KINDS}


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
    planned = plan(load(config), None, None, 32768)
    for key in planned.replaced:
        config.pop(key, None)
    way = planned.way("ntk")
    assert load(config | way.config)[0] == way.rope


@pytest.mark.parametrize("key", CONTEXTS)
def test_the_context_may_have_had_another_name(key):
    """The file with the printed keys says one context, the new one."""
    config = small()
    config[key] = config.pop("max_position_embeddings")
    planned = plan(load(config), None, None, 32768)
    for old in planned.replaced:
        config.pop(old, None)
    assert load(config | planned.way("yarn").config).context == 32768


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
    inner = small()
    config = functools.reduce(
        lambda one, key: {"model_type": "llava", key: one}, levels[::-1], inner
    )
    planned = plan(load(config), None, None, 32768)
    print_plan(planned, None)
    assert f"\n{said}, and remove" in capsys.readouterr().out
    assert planned.as_plain(None)["inside"] == ".".join(levels)
    place = f"<code>{'.'.join(levels)}</code> of " if levels else ""
    page = report(load(config), to=32768)
    assert f"In {place}a Hugging Face <code>config.json</code> set these keys" in page
    del inner["rope_theta"]
    inner.update(planned.way(None).config)
    assert load(config)[0] == planned.way(None).rope


def test_dynamic_scaling_keeps_the_context_of_training_beside_it():
    """Readers of dynamic NTK take max_position_embeddings for the original context."""
    law = DynamicNTK(factor=4.0, original_max_positions=512)
    rope = Rope(head_dim=64, pairing="half", scaling=law)
    assert config_keys(rope, 512, 2048)["max_position_embeddings"] == 512
    assert config_keys(PLAIN, 512, 2048)["max_position_embeddings"] == 2048


def test_the_table_counts_what_a_loop_counts():
    """Pairs of new phases, slowest turns and the change of sign, from 8192 to 131072 tokens."""
    plain = json.loads(extend("llama-3-8b", "--to", 131072, "--json").stdout)
    assert [way["law"] for way in plain["ways"]] == list(LAWS)
    found = {way["law"]: way for way in plain["ways"]}
    steps = [500_000.0 ** (-k / 64) for k in range(64)]
    never = sum(8192 * step < 2 * np.pi for step in steps)
    assert (found["unchanged"]["pairs_affected"], found["linear"]["pairs_affected"]) == (never, 0)
    assert found["unchanged"]["slowest_turns"] == pytest.approx(131072 * steps[-1] / (2 * np.pi))
    assert found["yarn"]["attention_factor"] == pytest.approx(0.1 * np.log(16) + 1, rel=1e-15)
    sign = found["unchanged"]["sign_change"]
    sums = [np.cos(r * np.array(steps)).sum() for r in range(sign - 2000, sign + 1)]
    assert min(sums[:-1]) >= 0 > sums[-1]


def test_the_recommended_block_is_printed_and_any_other_on_request():
    """The JSON at the end of the text is the config's, of the law asked for."""
    for arguments, law in (([], "llama3"), (["--law", "yarn"], "yarn")):
        done = extend("llama-3-8b", "--to", 131072, *arguments)
        assert done.returncode == 0, done.stderr
        keys = json.loads(done.stdout[done.stdout.index("\n{") :])
        assert keys["max_position_embeddings"] == 131072
        assert keys["rope_parameters"]["rope_type"] == law
        assert "Recommended without training: llama3" in done.stdout


def test_json_holds_the_rope_that_the_block_reads_back_as():
    """`rope` in the JSON is the config's rope."""
    plain = json.loads(extend("llama-3-8b", "--to", 32768, "--law", "ntk", "--json").stdout)
    again = load(with_keys(FILES["plain"], plain["config"]))[0]
    assert Rope.from_dict(plain["rope"]) == again
    assert again.base == pytest.approx(500_000.0 * 4 ** (64 / 63), rel=1e-15)


def test_a_model_of_several_kinds_asks_for_one():
    """And says where its block stands."""
    asked = extend("gemma-3-4b", "--to", 262144)
    assert asked.returncode == 2
    assert "kind must be given" in asked.stderr
    done = extend("gemma-3-4b", "--to", 262144, "--kind", "full")
    assert done.returncode == 0, done.stderr
    assert "'full_attention' is the block of these layers" in done.stdout
    keys = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert list(keys["rope_parameters"]) == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama-3-8b"], "--to"),
        (["llama-3-8b", "--to", "8192"], "to must be"),
        (["llama-3-8b", "--to", "16384", "--law", "yarm"], "law must be one of"),
        (["llama-3-8b", "--to", "16384", "--kind", "full"], "kind must be one of rope"),
        (["glm-4-9b", "--to", "16384"], "context must be given"),
    ],
    ids=["no length", "no longer", "unknown law", "unknown kind", "unknown context"],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said):
    """Nothing on stdout, no traceback."""
    done = extend(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_a_model_without_rope_has_nothing_to_extend():
    """A sentence, and no search for a kind."""
    bloom = small(model_type="esm", position_embedding_type="absolute")
    with pytest.raises(SpecError, match="no layer of esm has a rotary embedding"):
        plan(load(bloom), None, 1024, 2048)


@pytest.mark.parametrize("name", ["gpt-j-6b", "codegen-350m", "roformer-chinese-base", None])
def test_a_class_without_laws_is_shown_them_and_given_no_block(name):
    """One would change nothing, whatever law is asked for."""
    ropes = load(small(model_type="gptj", rope_theta=1e4)) if name is None else preset(name)
    for way in plan(ropes, None, None, 4 * ropes.context).ways.values():
        assert way.config is None
        assert "takes no law and no base from its config" in way.refused


def test_a_config_is_extended_from_its_own_context(tmp_path):
    """A path does what a preset does, and --context overrules the file."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FILES["plain"]), "utf-8")
    plain = json.loads(extend(path, "--to", 16384, "--json").stdout)
    assert (plain["context"], plain["to"]) == (8192, 16384)
    told = json.loads(extend(path, "--to", 16384, "--context", 4096, "--json").stdout)
    assert told["ways"][1]["resolution"] == pytest.approx(0.25)
