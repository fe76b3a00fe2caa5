"""Every hint of a refused conversion is followed, and gives the rows of the other pairing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from phasor import CheckpointError, Rope
from phasor.files.checkpoint import ConversionPlan, Patterns, plan_conversion, write
from phasor.pairings import Pairing

from ..refusals import refused, sentences
from .checkpoints import (
    Tensors,
    header_of,
    in_file,
    llama,
    llama_tensors,
    load,
    save,
    save_folder,
    tensor,
    two_shards,
)

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # interleaved rows from halves, of a head of 8
BACK = [0, 2, 4, 6, 1, 3, 5, 7]
ROPE = Rope(head_dim=8, pairing="half")
QUERY = "model.layers.0.self_attn.q_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
INDEX = "model.safetensors.index.json"
#: What happens to a checkpoint in a folder, and the plan that is made of it then.
_Plan = Callable[[Path], ConversionPlan]


class Hint(NamedTuple):
    """What is refused, words of the hint, and the plan that follows it."""

    refused: _Plan
    advice: str
    followed: _Plan
    name: str = QUERY
    order: list[int] = ORDER


def planned(path: Path, to: Pairing = "interleaved", **options: Any) -> ConversionPlan:
    """The conversion, of halves to interleaved pairs."""
    return plan_conversion(path, to, **options)


def of_folder(opened: str = "", *, config: Any = None, more: Any = None, **options: Any) -> _Plan:
    """A plan for a Llama's folder, with other keys in its config and other tensors."""

    def plan(tmp_path: Path) -> ConversionPlan:
        tensors = {n: t for n, t in (llama_tensors() | (more or {})).items() if t is not None}
        folder = save_folder(_new(tmp_path), llama() | (config or {}), tensors)
        return planned(folder / opened, **options)

    return plan


def of_shards(
    spoil: Callable[[Path], object] = lambda _: None, opened: str = "", **options: Any
) -> _Plan:
    """A plan for two shards and their index, after something happened to them."""

    def plan(tmp_path: Path) -> ConversionPlan:
        folder = two_shards(_new(tmp_path, made=True))
        spoil(folder)
        return planned(folder / opened, **options)

    return plan


def of_file(content: Tensors | bytes, **options: Any) -> _Plan:
    """A plan for a single file without a config."""

    def plan(tmp_path: Path) -> ConversionPlan:
        path = _new(tmp_path, made=True) / "a.safetensors"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            save(path, content)
        return planned(path, **options)

    return plan


def _new(tmp_path: Path, *, made: bool = False) -> Path:
    folder = tmp_path / f"{len([*tmp_path.iterdir()])}"
    if made:
        folder.mkdir()
    return folder


def _rows(*shape: int) -> tuple[str, list[int], bytes]:
    return tensor(np.random.default_rng(1).standard_normal(shape))


def _twice(folder: Path) -> None:
    one, two = (folder / f"model-{i}-of-2.safetensors" for i in (1, 2))
    two.write_bytes(one.read_bytes())


WHOLE = in_file(header_of(llama_tensors()), b"".join(t[2] for t in llama_tensors().values()))
MINE: Tensors = {"mine": _rows(8, 2)}
QUANTISED: Tensors = {"mine.weight": _rows(8, 2), "mine.SCB": _rows(8)}
FUSED: Tensors = {"mine": _rows(24, 2)}
LORA: Tensors = {"q.lora_A": _rows(2, 16), "q.lora_B": _rows(16, 2)}
QKV: Tensors = {"model.layers.0.self_attn.qkv_proj.weight": _rows(64, 32)}
QKV |= {f"model.layers.0.self_attn.{n}_proj.{s}": None for n in "qkv" for s in ("weight", "bias")}
BESIDE: Tensors = {"model.layers.0.self_attn.indexer.wk.weight": _rows(8, 32)}
GEMMA = {"model_type": "gemma3_text", "head_dim": 8, "rope_local_base_freq": 10.0}
GEMMA |= {"layer_types": ["full_attention", "sliding_attention"]}
BEYOND = {n.replace("layers.1", "layers.2"): t for n, t in llama_tensors().items() if ".1." in n}
BOTH = Patterns(query=(r".*\.q_proj\..*",), key=(r".*\.k_proj\..*",))

HINTS: dict[str, Hint] = {
    "damaged": Hint(
        of_file(WHOLE[:-8], model=llama()), "get it again", of_file(WHOLE, model=llama())
    ),
    "foreign": Hint(
        of_file(b"PK\x03\x04" + bytes(range(1, 60)), model=llama()),
        "write its tensors with the safetensors library first",
        of_file(WHOLE, model=llama()),
    ),
    "absent": Hint(
        of_folder("model"), "pass a safetensors file or", of_folder("model.safetensors")
    ),
    "absent: a folder": Hint(of_folder("model"), "or its folder", of_folder()),
    "is_index": Hint(of_shards(opened=INDEX), "pass its folder", of_shards()),
    "indexes": Hint(
        of_shards(lambda a: (a / "b.safetensors.index.json").write_text("{}")),
        "keep one",
        of_shards(),
    ),
    "no_index": Hint(of_shards(lambda a: (a / INDEX).unlink()), "or add the index", of_shards()),
    "no_index: one file": Hint(
        of_shards(lambda a: (a / INDEX).unlink()),
        "pass one file",
        of_shards(
            lambda a: (a / INDEX).unlink(),
            "model-1-of-2.safetensors",
            patterns=Patterns(query=(r".*q_proj\.\w+",)),
        ),
    ),
    "no_weights": Hint(
        of_shards(lambda a: [p.unlink() for p in a.glob("*.safetensors*")]),
        "write the tensors with the safetensors library first",
        of_shards(),
    ),
    "no_weights: others": Hint(
        of_shards(lambda a: [p.rename(p.with_suffix(".bin")) for p in a.glob("*.safetensors*")]),
        "write the tensors with the safetensors library first",
        of_shards(),
    ),
    "twice": Hint(of_shards(_twice), "keep one", of_shards()),
    "auxiliary_rope": Hint(
        of_folder(more=BESIDE, model=ROPE),
        r"or patterns for all tensors to convert \(--query, --key\)",
        of_folder(more=BESIDE, model=ROPE, patterns=BOTH),
    ),
    "nothing": Hint(
        of_file(MINE, model=ROPE),
        r"Pass patterns for queries and keys \(--query, --key\)",
        of_file(MINE, model=ROPE, patterns=Patterns(query=("mine",))),
        "mine",
    ),
    "other_layer": Hint(
        of_folder(config=GEMMA, more=BEYOND),
        "convert it separately, with a Rope and patterns",
        of_file(
            BEYOND,
            model=ROPE,
            patterns=Patterns(query=(r".*q_proj\.\w+",), key=(r".*k_proj\.\w+",)),
        ),
        "model.layers.2.self_attn.q_proj.weight",
    ),
    "no_config": Hint(
        of_file(llama_tensors()),
        "pass the model's config",
        of_file(llama_tensors(), model=llama()),
    ),
    "no_config: a Rope": Hint(
        of_file(llama_tensors()), "or a Rope", of_file(llama_tensors(), model=ROPE)
    ),
    "same_pairing": Hint(
        of_folder(to="half"),
        r"state the source as interleaved \(--from\)",
        of_folder(to="half", source="interleaved"),
        order=BACK,
    ),
    "qkv": Hint(
        of_folder(more=QKV),
        "--qkv-blocks",
        of_folder(more=QKV, patterns=Patterns(blocks=(r".*qkv_proj\.weight",))),
        "model.layers.0.self_attn.qkv_proj.weight",
    ),
    "qkv: groups": Hint(
        of_folder(more=QKV),
        "or --qkv-groups",
        of_folder(more=QKV, patterns=Patterns(groups=(r".*qkv_proj\.weight",))),
        "model.layers.0.self_attn.qkv_proj.weight",
    ),
    "lora": Hint(
        of_file(LORA, model=ROPE, patterns=Patterns(query=("q.*",))),
        "match only lora_B",
        of_file(LORA, model=ROPE, patterns=Patterns(query=(r"q\.lora_B",))),
        "q.lora_B",
    ),
    "num_heads": Hint(
        of_file(FUSED, model=ROPE, patterns=Patterns(blocks=("mine",))),
        "pass a config that has it",
        of_file(
            FUSED,
            model=llama(num_attention_heads=1, num_key_value_heads=1, head_dim=8),
            patterns=Patterns(blocks=("mine",)),
        ),
        "mine",
    ),
    "rows": Hint(
        of_folder(more={QUERY.replace("weight", "weight_scales"): _rows(32, 1)}),
        "convert the checkpoint before it is quantised",
        of_folder(),
    ),
    "packed": Hint(
        of_folder(more={QUERY.replace("weight", "qweight"): _rows(4, 32)}),
        "convert the checkpoint before it is quantised",
        of_folder(),
    ),
    "four_bit": Hint(
        of_folder(more={QUERY: _rows(512, 1), f"{QUERY}.absmax": _rows(16)}),
        "convert the checkpoint before it is quantised",
        of_folder(),
    ),
    "tiled": Hint(
        of_folder(
            more={
                QUERY.replace("weight", "SCB"): _rows(32),
                QUERY.replace("weight", "weight_format"): tensor(np.uint8(2)),
            }
        ),
        "convert the checkpoint before it is quantised",
        of_folder(),
    ),
    "companion": Hint(
        of_file(QUANTISED, model=ROPE, patterns=Patterns(query=(r"mine\.weight",))),
        "match both with patterns",
        of_file(QUANTISED, model=ROPE, patterns=Patterns(query=(r"mine\..*",))),
        "mine.weight",
    ),
    "shared_values": Hint(
        of_folder(more={QUERY.replace("q_proj", "v_proj"): None}),
        "needs a separate v_proj",
        of_folder(),
    ),
    "one_role": Hint(
        of_folder(more={QUERY.replace("q_proj", "k_proj"): None}),
        "must hold queries and keys",
        of_folder(),
    ),
    "unmatched": Hint(
        of_file(MINE, model=ROPE, patterns=Patterns(query=("min",))),
        "must match a whole name",
        of_file(MINE, model=ROPE, patterns=Patterns(query=("mine",))),
        "mine",
    ),
}


@pytest.mark.parametrize("case", HINTS)
def test_a_hint_that_is_followed_leads_to_the_other_pairing(case: str, tmp_path: Path) -> None:
    """The first head of the tensor has its rows in the other order, written out here."""
    hint = HINTS[case]
    with pytest.raises(CheckpointError, match=hint.advice) as caught:
        hint.refused(tmp_path)
    assert caught.value.reason == case.partition(":")[0]
    plan = hint.followed(tmp_path)
    source, out = plan.path, tmp_path / "converted"
    write(plan, out, verified=True)
    before, after = (_first_head(path, hint.name) for path in (source, out))
    assert np.array_equal(after, before[hint.order])
    assert not np.array_equal(after, before)


def _first_head(path: Path, name: str) -> np.ndarray:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return next(load(file)[name][:8] for file in files if name in load(file))


def test_a_result_gets_another_name_and_a_folder(tmp_path: Path) -> None:
    """As the hints say where it exists, or its folder does not."""
    plan = of_folder()(tmp_path)
    with refused("exists"):
        write(plan, plan.path)
    inside = tmp_path / "new" / "converted"
    with refused("no_parent"):
        write(plan, inside)
    inside.parent.mkdir()
    write(plan, inside, verified=True)


#: Reasons that say only what must be, and those whose hint is followed where what they need is.
WITHOUT_HINT = {
    *("entry", "index_size", "no_file", "no_pairing", "not_compared", "not_in_shard"),
    *("not_written", "other_kind", "outside", "regex", "rotary_value", "shard_missing"),
    *("two_roles", "type_refused", "unreadable", "weight_map"),
}
ELSEWHERE = {
    "test_disk.py": {"changed"},
    "test_files.py": {"no_safetensors"},
    "test_gguf_files.py": {"gguf_pairing", "gguf_split"},
    "test_from_gguf.py": {
        *("gguf_class", "gguf_keys", "gguf_kind", "gguf_overflow", "gguf_program", "gguf_tensors")
    },
    "the test before": {"exists", "no_parent"},
    # each spoils a folder that is converted without that
    "test_programs.py": {
        *("consolidated", "copies_differ", "dense", "floats", "missing", "no_folder", "no_sizes"),
        *("no_tensor", "no_tensors", "no_torch", "pickle", "rank_missing", "rank_names"),
        *("ranks_differ", "shape", "split_heads", "unknown"),
    },
    "tests/torch/live/test_learned.py": {"learned"},
}


def test_every_reason_has_its_hint_followed() -> None:
    """A new one is put into the table."""
    followed = {case.partition(":")[0] for case in HINTS}
    assert followed.union(WITHOUT_HINT, *ELSEWHERE.values()) == sentences(CheckpointError).keys()
