"""MaxText: a configuration, whose ``decoder_block`` and model name select what rotates."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle, islice

from phasor.axes import InterleavedSections, OneAxis
from phasor.files import refusal
from phasor.files.configs.layer_pattern import LayerPattern
from phasor.files.configs.program_model import (
    CONTEXT,
    ProgramModel,
    divided,
    read_programs,
    with_sections,
)
from phasor.files.configs.source import renamed_keys
from phasor.files.dialects.blocks import rotated_fraction
from phasor.files.dialects.by_reading import Dialect, find_settings, settings_or_refusal
from phasor.files.dialects.target import (
    LLAMA4_FACTOR,
    SOFTMAX_NOTE,
    Keys,
    ProgramSettings,
    Target,
    as_yaml,
    law_numbers,
    layers_with,
    linear_factor,
    main_and_local,
    model_family,
    rotating,
    round_base,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Llama3, Proportional, Yarn, yarn_multiplier

_BLOCK, _NAME, _TYPE = "decoder_block", "model_name", "rope_type"
_ORIGINAL, _LINEAR = "original_max_position_embeddings", "rope_linear_scaling_factor"
# time scales of the fastest pair and of a pair after the slowest; their quotient is the base
_LEAST, _MOST = "rope_min_timescale", "rope_max_timescale"
_MOST_COMPRESSED = "compressed_rope_max_timescale"
_MOST_LOCAL, _MOST_GLOBAL = "local_rope_max_timescale", "global_rope_max_timescale"


# Reading.


def read(model: ProgramModel) -> LayerRopes:
    """The rope of each layer."""
    decoder = _Decoder(model)
    config = model.config
    if decoder.block in model.facts["instead"]:
        return model.no_rotation(f"MaxText's block {decoder.block}", decoder.block)
    kinds, pattern = decoder.kinds()
    if decoder.rotation != "yarn":
        # only YaRN has a table with an end; latent attention also scales its softmax
        model.config = config.with_values({**config.values, CONTEXT: None})
        decoder.note_softmax()
    is_tuned = decoder.block == "llama4" and config.flag("temperature_tuning")
    decoder.check_unread()
    ropes = model.ropes(kinds, pattern)
    if is_tuned and "nope" in ropes.kinds:
        ropes = replace(ropes, query_factors={"nope": LLAMA4_FACTOR})
    return ropes


class _Decoder:
    """The decoder block of a configuration, with one of MaxText's classes of rotations."""

    def __init__(self, model: ProgramModel) -> None:
        config, facts = model.config, model.facts
        self.model, self.config = model, config
        self.block = config.text(_BLOCK, *facts["blocks"]) or facts["defaults"][_BLOCK]
        if not config.has(_BLOCK):
            config.notes.append(f"The file has no {_BLOCK}; {self.block} is {model.assumes}.")
        self.block_facts = facts["blocks"][self.block]
        self.name = config.text(_NAME) or ""
        self.rotation = config.text(_TYPE, "default", "llama3.1", "yarn") or "default"
        if self.block_facts.get("named") and self.rotation == "default" and not self.name:
            raise refusal("no_model_name", key=_NAME, block=self.block)
        if self.name.startswith("llama3.1"):
            self.rotation = "llama3.1"
        if self.block_facts.get("several_axes") and config.flag("use_mrope"):
            self.rotation = "mrope"
        model.latent = config.text("attention_type") == "mla"
        if self.block_facts.get("doubled"):
            values = {**config.values, "base_num_decoder_layers": 2 * config.layers()}
            self.config = model.config = config.with_values(values)
        rotates_part = self.block_facts.get("part") and self.rotation in ("default", "mrope")
        model.turns_all = not rotates_part

    def kinds(self) -> tuple[Mapping[str, Rope | None], LayerPattern]:
        """The rope of each kind of layer, and a pattern that marks the layers of the first kind."""
        config, block_facts, count = self.config, self.block_facts, self.config.layers()
        if self.block == "deepseek4":
            key = "compress_ratios"
            ratios = config.require(key, config.wholes(key))
            if len(ratios) < count:
                config.refuse(key, f"a list of one whole number for each of {count} layers")
            pattern = LayerPattern(tuple(ratio > 0 for ratio in ratios[:count]))
            keys = {"compressed_attention": _MOST_COMPRESSED, "sliding_attention": "rope_theta"}
            return {kind: self._end_rope(key) for kind, key in keys.items()}, pattern
        if "local" in block_facts:
            period = block_facts.get("models", {}).get(self.name, block_facts["local"]) + 1
            is_default = self.rotation == "default"
            read_kind = (
                self._gemma4_rope if is_default and "gemma4" in self.block else self._kind_rope
            )
            kinds = {kind: read_kind(kind) for kind in ("full_attention", "sliding_attention")}
            return kinds, LayerPattern.every(period, count)
        if "others" in block_facts:
            interval = config.whole("inhomogeneous_layer_cycle_interval") or 1
            kinds = {"full_attention": self._kind_rope(), block_facts["others"]: None}
            return kinds, LayerPattern.every(interval, count)
        interval = 0
        if self.block == "llama4" and config.value("nope_layer_interval") != -1:
            interval = config.whole("nope_layer_interval") or 0
        return {"nope": None, "rope": self._kind_rope()}, LayerPattern.every(interval, count)

    def note_softmax(self) -> None:
        """Note latent attention's factor on the softmax, where no law contains it."""
        if not self.model.latent:
            return
        factor = yarn_multiplier(self._number("rope_factor"), self._mscale()) ** 2
        if factor != 1:
            self.config.notes.append(f"The softmax scale is multiplied by {factor!r} as well.")

    def check_unread(self) -> None:
        """Refuse keys that only other classes read, or note them if the reading is not strict."""
        config = self.config
        read = config.keys_read
        for key, neutral in self.model.facts["unread"].items():
            if key in read or config.value(key) in (None, neutral):
                continue
            where = f"in a block {self.block} of the type {self.rotation}"
            if config.strict:
                config.refuse(key, f"{neutral}, as MaxText does not read it {where}")
            config.notes.append(f"MaxText does not read {key} {where}.")

    def _number(self, key: str) -> float:
        """The number at a key, or MaxText's default."""
        default = self.model.defaults[key]
        config, is_whole = self.config, isinstance(default, int)
        number = config.whole(key) if is_whole else config.number(key, above=0)
        return config.or_default(key, number, default, self.model.assumes)

    def _largest_scale(self, layer_key: str | None = None) -> float:
        """The largest time scale, from the layers' own key unless that is absent or -1 (off)."""
        scale = None if layer_key is None else self.config.number(layer_key)
        if scale in (None, -1):
            return self._number("rope_theta")
        self.config.ignore(_MOST)  # no layer of this kind reads it
        return scale

    def _smallest_scale(self) -> int:
        """The smallest time scale; positions are divided by it."""
        return self.config.whole(_LEAST) or 1

    def _kind_rope(self, kind: str = "") -> Rope:
        """The rope of a kind of layer; local layers may have another base."""
        config = self.config
        if self.rotation == "yarn":
            return self._yarn()
        is_local = self.rotation == "default" and kind == "sliding_attention"
        largest, smallest = (
            self._largest_scale(_MOST_LOCAL if is_local else None),
            self._smallest_scale(),
        )
        pairing = "interleaved" if self.rotation == "llama3.1" else "half"
        rope = self.model.rope(pairing, base=largest / smallest)
        if self.rotation == "mrope":
            rope = with_sections(rope, config, config.wholes("mrope_section"), "interleaved")
        elif self.rotation == "llama3.1" and config.flag("rope_use_scale") is not False:
            if smallest != 1:
                config.refuse(_LEAST, "1 where rope_use_scale is not false")
            return replace(rope, scaling=Llama3(**self.model.facts["llama3"]))
        elif self.model.turns_all and self.rotation == "default":
            return divided(rope, smallest * self._factor(is_local=is_local))
        return divided(rope, smallest)

    def _factor(self, *, is_local: bool) -> float:
        """The divisor of positions for whole heads; local layers of Gemma 3 have none."""
        factor = self.config.number(_LINEAR, above=0) or 1.0
        return 1.0 if is_local and self.name.startswith("gemma3") else factor

    def _gemma4_rope(self, kind: str) -> Rope:
        """The rope of a kind of layer in Gemma 4: with its own base, width and rotated part."""
        config, is_local = self.config, kind == "sliding_attention"
        largest, smallest = (
            self._largest_scale(_MOST_LOCAL if is_local else _MOST_GLOBAL),
            self._smallest_scale(),
        )
        rope = self.model.rope("half", base=largest / smallest)
        fraction = self._number(f"{'local' if is_local else 'global'}_rope_proportion")
        if not is_local and (width := config.whole("global_head_dim", least=0)):
            rope = replace(rope, head_dim=width, rotary_dim=width)
        if fraction >= 1:
            return divided(rope, smallest * self._factor(is_local=is_local))
        if self.name.startswith("gemma4"):
            return replace(rope, scaling=Proportional(fraction=fraction, factor=float(smallest)))
        return divided(replace(rope, rotary_dim=int(rope.head_dim * fraction)), smallest)

    def _end_rope(self, key: str) -> Rope:
        """The rope that turns the end of a head, with the base at ``key``."""
        rope = self.model.rope("interleaved", base=self._number(key))
        width = int(self._number("qk_rope_head_dim"))
        return replace(rope, rotary_dim=width, rotary_start=rope.head_dim - width)

    def _yarn(self) -> Rope:
        config, interleaved = self.config, self.config.flag("rope_interleave") is not False
        if (pairwise := config.flag("rope_pairwise")) and not interleaved:
            config.refuse("rope_pairwise", "false where rope_interleave is")
        pairing, pairing_out = (
            "interleaved" if interleaved else "half",
            None if pairwise else "half",
        )
        rope = self.model.rope(pairing, pairing_out, base=self._largest_scale())
        factor = self._number("rope_factor")
        scales_cos = config.flag("rope_attention_scaling")
        with renamed_keys(config, factor="rope_factor"):
            law = Yarn(
                factor=factor,
                original_max_positions=int(self._number(_ORIGINAL)),
                beta_fast=self._number("beta_fast"),
                beta_slow=self._number("beta_slow"),
                truncate=config.flag("rope_truncate") is not False,
                mscale_all_dim=self._mscale(),
                attention_factor=yarn_multiplier(factor, 1.0) if scales_cos else 1.0,
            )
        return replace(rope, scaling=law)

    def _mscale(self) -> float:
        """YaRN's coefficient for the softmax of latent attention; 0 if it is not scaled."""
        is_longer = self.model.latent and self._number(CONTEXT) > self._number(_ORIGINAL)
        return self._number("mscale") if is_longer else 0.0


# Writing.

# MaxText accepts only whole time scales, so for other bases both are multiplied by this unit, which
# is exact as it is a power of two.
_UNIT = 2**30


def _settings(ropes: LayerRopes, context: int) -> Iterator[Keys]:
    main, local = main_and_local(ropes)
    if main.base is None or (local and local.base is None):
        return
    if main.rotary_start:
        yield _end_keys(ropes)
    elif local is None:
        yield from _one_rope_keys(main, context)
    else:
        yield from _two_rope_keys(main, local, re.sub("[-_]", "", model_family(ropes)))


def _end_keys(ropes: LayerRopes) -> Keys:
    """The keys of the block that turns the ends of heads, with a base for each kind of layer."""
    bases = {"compressed" in kind: int(rope.base or 0) for kind, rope in rotating(ropes).items()}
    keys = {False: _MOST, True: _MOST_COMPRESSED}
    base_keys = {keys[is_compressed]: base for is_compressed, base in bases.items()}
    return {_BLOCK: "deepseek4", _TYPE: "default", **base_keys}


def _one_rope_keys(rope: Rope, context: int) -> Iterator[Keys]:
    law, base, factor = rope.scaling, rope.base or 0, linear_factor(rope)
    # no whole number is infinite; what is cut so is read back as another rope
    most = min(base * int(factor or 0), sys.float_info.max)
    scaled = {_LEAST: int(factor or 0), _MOST: int(most)}
    if factor is not None and rope.pairing == "interleaved":
        if rope.rotary_dim == rope.head_dim:  # this block turns no part of a head
            yield {_BLOCK: "llama2", _TYPE: "llama3.1", "rope_use_scale": False, **scaled}
    elif factor is not None:
        if rope.rotary_dim == rope.head_dim:  # the block for parts of heads turns whole heads too
            yield {_BLOCK: "llama2", **_whole_head_keys(factor, base)}
        part = {"partial_rotary_factor": rotated_fraction(rope.rotary_dim, rope.head_dim)}
        counts = [] if isinstance(rope.axes, OneAxis) else list(rope.axes.counts(rope.num_pairs))
        axes_keys = {"use_mrope": True, "mrope_section": counts} if counts else {}
        yield {_BLOCK: "qwen3_next", _TYPE: "default", **scaled, _LINEAR: 1.0, **part, **axes_keys}
    elif isinstance(law, Llama3):
        law_keys = {_TYPE: "llama3.1", "rope_use_scale": True, _LEAST: 1, _MOST: int(base)}
        yield {_BLOCK: "llama2", **law_keys}
    elif isinstance(law, Yarn):
        yield {_BLOCK: "llama2", **_yarn_keys(rope, law, context)}


def _whole_head_keys(factor: float, base: float, local_base: float = 0.0) -> Keys:
    """The keys for whole heads; both bases are in the same unit."""
    unit = 1 if base.is_integer() and local_base.is_integer() else _UNIT
    keys = {_LEAST: unit, _MOST: round(base * unit), _LINEAR: factor / unit}
    local_keys = {_MOST_LOCAL: round(local_base * unit)} if local_base else {}
    return {_TYPE: "default", **keys, **local_keys}


def _yarn_keys(rope: Rope, law: Yarn, context: int) -> Keys:
    numbers = law_numbers(law, "beta_fast", "beta_slow", factor="rope_factor")
    interleaved = rope.pairing == "interleaved"
    return {
        _TYPE: "yarn",
        _MOST: int(rope.base or 0),
        _ORIGINAL: law.original_max_positions,
        **{name: int(number) for name, number in numbers.items()},
        "mscale": law.mscale_all_dim,  # for the softmax of latent attention
        "rope_interleave": interleaved,
        "rope_pairwise": interleaved and rope.output_pairing == "interleaved",
        "rope_truncate": law.truncate,
        "rope_attention_scaling": rope.attention_factor != 1,
        # its table has this length; above the original one, latent attention scales its softmax
        CONTEXT: max(context, law.original_max_positions + 1),
    }


def _two_rope_keys(main: Rope, local: Rope, family: str) -> Iterator[Keys]:
    law, bases = main.scaling, (main.base or 0, local.base or 0)
    if isinstance(law, Proportional) and family.startswith("gemma4"):
        turning = 2 * int(law.fraction * main.rotary_dim // 2)
        keys = _whole_head_keys(1.0, *bases)
        local_base = keys.pop(_MOST_LOCAL)
        yield {
            _BLOCK: "gemma4",
            _NAME: "gemma4",
            **keys,
            _MOST_GLOBAL: keys[_MOST],
            "global_rope_proportion": rotated_fraction(turning, main.rotary_dim),
            _MOST_LOCAL: local_base,
            "local_rope_proportion": 1.0,
        }
    elif (factor := linear_factor(main)) is not None:
        keys = _whole_head_keys(factor, *bases)
        is_gemma3 = family.startswith("gemma3") and keys[_LINEAR] != 1
        yield {_BLOCK: "gemma3", **({_NAME: "gemma3"} if is_gemma3 else {}), **keys}


def _sizes(ropes: LayerRopes, _context: int) -> Keys:
    main, local = main_and_local(ropes)
    return {
        _NAME: "default",
        "base_num_decoder_layers": len(ropes),
        "head_dim": (local or main).head_dim,
        "global_head_dim": main.head_dim,
        "qk_rope_head_dim": main.rotary_dim,
        "compress_ratios": [4 * ("compressed" in kind) for kind in ropes.layer_kinds],
    }


DIALECT = Dialect(
    read=lambda file: read(ProgramModel("MaxText", file)),
    settings=_settings,
    sizes=_sizes,
    near=lambda rope: [_set_llama3(rope)] if isinstance(rope.scaling, Llama3) else [],
    has_both_pairings=False,
    states_still_layers=False,
    scales_softmax=False,
)


def _set_llama3(rope: Rope) -> Rope:
    """The rope with Llama 3's law, whose numbers are constants in the code."""
    law = Llama3(**read_programs()["MaxText"]["llama3"])
    return round_base(replace(rope, scaling=law))


def _alternate_layers(ropes: LayerRopes) -> LayerRopes:
    """The model with alternating local and global layers, because no key states their order."""
    kinds, (_, local) = rotating(ropes), main_and_local(ropes)
    sliding = [kind for kind in kinds if "sliding" in kind]
    if local is None or sliding != [kind for kind, rope in kinds.items() if rope == local]:
        return ropes
    global_kinds, local_kinds = [kind for kind in kinds if kind not in sliding], cycle(sliding)
    order = [
        kind for global_kind in global_kinds for kind in (*islice(local_kinds, 5), global_kind)
    ]
    return replace(ropes, layer_kinds=tuple(order), kinds=kinds, query_factors={})


def _write(ropes: LayerRopes, context: int) -> ProgramSettings:
    for rope in ropes.ropes:
        if rope.rotary_start not in (0, rope.head_dim - rope.rotary_dim):
            feature = f"a rotation from coordinate {rope.rotary_start} on"
            MAXTEXT.refuse("start", feature, rope, [])
    model, law = _alternate_layers(ropes), main_and_local(ropes)[0].scaling
    if isinstance(law, Proportional) and find_settings(DIALECT, model, context) is None:
        MAXTEXT.only_rope(ropes)  # only one of two kinds of layers can have that law
    written = settings_or_refusal(MAXTEXT, DIALECT, model, context)
    model_keys = {_BLOCK: "", _NAME: "", **written.keys}
    keys = {key: value for key, value in written.keys.items() if key not in (_BLOCK, _NAME)}
    notes = [*_class_notes(written.form, model_keys[_BLOCK], model_keys[_NAME])]
    is_latent = model_keys[_BLOCK] != "deepseek4" and ropes.num_kv_heads == 1
    if is_latent and keys[_TYPE] != "yarn":
        keys["mscale"] = 0.0  # otherwise latent attention would scale its softmax
    if model_keys[_BLOCK] != "deepseek4" and keys[_TYPE] != "llama3.1":
        notes.append("model_name must not begin with llama3.1, whose rope is in the code.")
    if interval := layers_with(ropes, None).interval:
        keys["nope_layer_interval"] = interval
        notes.append("Only the decoder_block of Llama 4 reads nope_layer_interval.")
    if LLAMA4_FACTOR in ropes.query_factors.values():
        keys["temperature_tuning"] = True
    return as_yaml(keys, notes, written.performed)


def _class_notes(ropes: LayerRopes, block: str, name: str) -> Iterator[str]:
    """Notes on the decoder block, model name and head widths that the keys are for."""
    main, local = main_and_local(ropes)
    if block == "deepseek4":
        sizes = f"head_dim {main.head_dim} and qk_rope_head_dim {main.rotary_dim}"
        yield f"The decoder_block has to be deepseek4, with {sizes}: others turn from the start."
        return
    if local is None or local.head_dim == main.head_dim:
        yield f"head_dim, in latent attention qk_rope_head_dim, has to be {main.head_dim}."
    else:
        yield f"head_dim has to be {local.head_dim}, and global_head_dim {main.head_dim}."
    if name:
        yield f"model_name has to begin with {name}: others rotate these layers differently."
    elif local is not None:
        yield "The decoder_block decides which layers are local."
    if main.rotary_dim != main.head_dim:
        yield "The decoder_block has to be qwen3_next or qwen3_5: others turn whole heads."
    elif main.axes.n_axes > 1:
        yield "The decoder_block has to be one of Qwen's: others have one axis."


MAXTEXT = Target(
    name="maxtext",
    program="keys of a configuration of MaxText",
    source="https://github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/configs/base.yml",
    checked="engine",
    write=_write,
    other_pairs_out=True,
    axes=(OneAxis, InterleavedSections),
    softmax_note=f"In other than latent attention: {SOFTMAX_NOTE}",
    leaves_layers="The decoder_block",
    query_factor=lambda factor, rope: factor == LLAMA4_FACTOR,
)
