"""Files of programs that train or serve models: litgpt's model_config.yaml.

``programs.toml`` has their names of keys, and what their code assumes for those that are absent.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from phasor.errors import ConfigError, PhasorWarning
from phasor.files.configs.facts import Architecture, read_table
from phasor.files.configs.huggingface import rotated_width
from phasor.files.configs.model_class import MOST_LAYERS
from phasor.files.configs.source import JsonObject, renamed_keys
from phasor.files.configs.unread_keys import check_unread_keys
from phasor.layers import LayerRopes
from phasor.pairings import Pairing
from phasor.rope import WIDEST, Rope
from phasor.scaling import Law, Linear, Llama3, PerPair, yarn_multiplier

Reader = Callable[[JsonObject, bool], LayerRopes]
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_BETAS = ("beta_fast", "beta_slow")
_LLAMA3_NAMES: Mapping[str, str] = {name: name for name in _LLAMA3}


def program_reader(config: JsonObject) -> Reader | None:
    """What reads a file, if it is one of these programs'."""
    return next((read for is_its, read in _PROGRAMS if is_its(config)), None)


@lru_cache(maxsize=1)
def _programs() -> Mapping[str, Mapping[str, Any]]:
    return read_table("programs.toml")


class _Model:
    """What the files of all programs say: sizes, and a rope without a law."""

    def __init__(self, program: str, config: JsonObject) -> None:
        self.facts, self.program = _programs()[program], program
        names = {key: (name,) for key, name in self.facts["names"].items()}
        self.config = JsonObject(config.values, config.path, names=names)
        self.config.ignore(*self.facts["ignored"])
        self.notes: list[str] = []
        self.layers = self.size("num_hidden_layers")
        self.latent = self.config.has("qk_rope_head_dim")

    def size(self, key: str) -> int:
        """A size of the model; where the file leaves it out, with a warning, the program's."""
        most = MOST_LAYERS if key == "num_hidden_layers" else 2**31
        value, default = self.config.whole(key, most=most), self.facts["defaults"].get(key)
        if value is None and default is not None:
            absent = f"The file has no {self.config.name(key)}"
            self.notes.append(f"{absent}; {default} is what {self.program} assumes.")
            warnings.warn(self.notes[-1], PhasorWarning, stacklevel=5)
        return self.config.require(key, default if value is None else value)

    def number(self, key: str, above: float) -> float:
        """A number of the file, or the program's with a note."""
        default, whose = self.facts["defaults"].get(key), f"what {self.program} assumes"
        value = self.config.number(key, above=above)
        return self.config.or_default(key, value, default, whose, self.notes)

    def rope(self, pairing: Pairing, pairing_out: Pairing | None = None) -> Rope:
        """The rope of a head, or of its rotated slice in latent attention."""
        config = self.config
        key = "qk_rope_head_dim" if self.latent else "head_dim"
        head_dim = config.whole(key, least=2, most=WIDEST)
        if head_dim is None:
            width, heads = self.size("hidden_size"), self.size("num_attention_heads")
            names = (config.name(key) for key in ("hidden_size", "num_attention_heads"))
            head_dim = config.head_width(key, " / ".join(names), width, heads)
        fraction = self.facts["defaults"].get("partial_rotary_factor")
        names = {"rotary_dim": ("rotary_dim",)} if "rotary_dim" in self.facts["names"] else {}
        facts = Architecture(partial=True, fraction=fraction, names=names)
        plain = JsonObject({}, config.path)
        width = head_dim if self.latent else rotated_width(config, plain, facts, head_dim)
        base = self.number("rope_theta", above=1)
        with renamed_keys(config, {"base": "rope_theta", "rotary_dim": "partial_rotary_factor"}):
            return Rope(
                head_dim=head_dim,
                pairing=pairing,
                pairing_out=pairing_out,
                base=base,
                rotary_dim=width,
            )

    def ropes(
        self,
        kinds: Mapping[str, Rope | None],
        *,
        strict: bool,
        in_order: Sequence[str] = (),
        blocks: Sequence[JsonObject] = (),
    ) -> LayerRopes:
        """The ropes of all layers, after the keys that nothing read were checked."""
        config, in_order = self.config, in_order or tuple(kinds) * self.layers
        kinds = {kind: kinds[kind] for kind in dict.fromkeys(in_order)}
        what = f"a file of {self.program}"
        self.notes += check_unread_keys(config, blocks, kinds.values(), what, strict=strict)
        return LayerRopes(
            name=config.text("name") or self.program,
            layer_kinds=tuple(in_order),
            kinds=kinds,
            context=config.whole("max_position_embeddings"),
            num_heads=config.whole("num_attention_heads"),
            # latent attention rotates one key for all heads
            num_kv_heads=1 if self.latent else config.whole("num_key_value_heads"),
            notes=tuple(dict.fromkeys(self.notes)),
        )


def _divided(rope: Rope, by: float) -> Rope:
    """The rope of positions that are divided by a number."""
    if by == 1 or rope.scaling is None:
        return rope if by == 1 else replace(rope, scaling=Linear(factor=by))
    divisors = by * replace(rope, scaling=None).inv_freq / rope.inv_freq
    factors = tuple(divisors.tolist())
    return replace(rope, scaling=PerPair(factors=factors, attention_factor=rope.attention_factor))


# litgpt's model_config.yaml, also inside the file of a training run.


def _is_litgpt(config: JsonObject) -> bool:
    if config.has("model_type") or config.has("_component_"):
        return False
    inner = config.values.get("model_config")
    block = (isinstance(inner, Mapping) and config.object("model_config")) or config
    sizes = ("n_layer", "n_head", "n_embd")
    return any(map(block.has, sizes)) and any(map(block.has, _programs()["litgpt"]["marks"]))


def _load_litgpt(top: JsonObject, strict: bool) -> LayerRopes:
    inner = None if top.has("n_layer") else top.object("model_config")
    model = _Model("litgpt", inner or top)
    config = model.config
    pairing: Pairing = "interleaved" if config.flag("rope_interleave") else "half"
    plain = model.rope(pairing, "half")
    adjusted = config.object("rope_adjustments")
    law = None if adjusted is None else _litgpt_law(adjusted, plain, model.notes)
    ratio = config.number("rope_condense_ratio", above=0) or 1.0
    kinds = {"rope": _divided(replace(plain, scaling=law), ratio)}
    in_order = ("rope",) * model.layers
    local_base = config.number("rope_local_base_freq", above=1)
    indices = config.wholes("rope_indices")
    if local_base is not None:
        # the factor on cos and sin is that of all layers
        local = _divided(replace(plain, base=local_base), ratio)
        if (gain := kinds["rope"].attention_factor) != 1:
            law = PerPair(factors=(ratio,) * local.num_pairs, attention_factor=gain)
            local = replace(local, scaling=law)
        kinds = {"global": kinds["rope"], "local": local}
        # without a list all layers are local
        indices = (1,) * model.layers if indices is None else indices[: model.layers]
        if len(indices) < model.layers or not {*indices} <= {0, 1}:
            config.refuse("rope_indices", f"a 0 or a 1 for each of the {model.layers} layers")
        in_order = tuple("local" if index else "global" for index in indices)
    elif indices is not None:
        absent, beside = map(config.name, ("rope_local_base_freq", "rope_indices"))
        raise ConfigError(f"{absent} is absent beside {beside}, the layers that it is for; add it")
    blocks = () if adjusted is None else (adjusted,)
    return model.ropes(kinds, strict=strict, in_order=in_order, blocks=blocks)


def _litgpt_law(block: JsonObject, rope: Rope, notes: list[str]) -> Law | None:
    """The law of ``rope_adjustments``, which litgpt tells by its keys."""
    mscale, all_dim = (block.number(key, least=0) for key in ("mscale", "mscale_all_dim"))
    factor = block.number("factor", above=0)
    if all_dim and factor:
        # whatever the law is
        softmax = yarn_multiplier(factor, all_dim) ** 2
        notes.append(f"The softmax scale is multiplied by {softmax!r} as well.")
    of_llama3 = [key for key in _LLAMA3[1:] if block.contains(key)]
    of_yarn = [key for key in _BETAS if block.contains(key)]
    if of_llama3 and of_yarn:
        first, second = block.name(of_llama3[0]), block.name(of_yarn[0])
        raise ConfigError(f"{first} is of Llama 3's law and {second} of YaRN; keep one of them")
    if not of_llama3 and not of_yarn:
        return None if factor is None else Linear(factor=factor)
    keys = ("factor", "original_max_seq_len", *(_LLAMA3[1:] if of_llama3 else _BETAS))
    numbers = {key: block.require(key, block.number(key, above=0)) for key in keys}
    original = block.require(keys[1], block.whole(keys[1]))
    if of_llama3:
        laws = {key: numbers[key] for key in _LLAMA3}
        with renamed_keys(block, _LLAMA3_NAMES):
            return Llama3(original_max_positions=original, **laws)
    notes.append(_programs()["litgpt"]["yarn"])
    factor, pairs = numbers["factor"], rope.num_pairs
    assert rope.base is not None, "a file of litgpt has a base"
    turns_to_pair = pairs / math.log(rope.base)
    low, high = (
        turns_to_pair * math.log(original / (numbers[beta] * 2 * math.pi)) for beta in _BETAS
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)
    gains = [yarn_multiplier(factor, coefficient or 0) for coefficient in (mscale, all_dim)]
    divisors = 1 / ((1 - ramp) / factor + ramp)
    return PerPair(
        factors=tuple(divisors.tolist()),
        attention_factor=gains[0] / gains[1] if mscale and all_dim else gains[0] * gains[1],
    )


_PROGRAMS: Sequence[tuple[Callable[[JsonObject], bool], Reader]] = ((_is_litgpt, _load_litgpt),)
