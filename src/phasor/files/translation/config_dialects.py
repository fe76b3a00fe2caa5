"""mlx-lm and exllamav3: programs that read a model's config.json in a way of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from phasor.axes import InterleavedSections, OneAxis, Sectioned
from phasor.files.configs.writing import keys_over_file, rope_parameters, rotated_fraction
from phasor.files.translation.config_files import Block, class_notes, refusing
from phasor.files.translation.target import (
    PICK_LAW,
    ProgramSettings,
    Target,
    base_and_divisors,
    has_steps,
    model_family,
    ntk_as_base,
    plain_candidates,
    yarn_mscale,
)
from phasor.layers import LayerRopes
from phasor.pairings import PAIRINGS, Pairing
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, Linear, Llama3, LongRope, Proportional, Yarn

_LAWS = (type(None), Linear, Llama3, Proportional, Yarn)
_CONTEXT, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"


def _has_name(rope: Rope) -> bool:
    """Whether a ``rope_type`` says the law; other frequencies are divisors of a longrope."""
    form = ntk_as_base(rope)
    turns = form.direction == 1 and form.base is not None
    whole_head = form.rotary_start + form.rotary_dim == form.head_dim
    return (
        turns
        and isinstance(form.scaling, _LAWS)
        and (whole_head or not isinstance(form.scaling, Proportional))
    )


def _named_block(target: Target, rope: Rope, length: int) -> Block:
    form = ntk_as_base(replace(rope, inv_freq_dtype="exact", pairing_out=None))
    if isinstance(law := form.scaling, Proportional):
        # some programs count coordinates where others count pairs
        turning = int(law.fraction * rope.rotary_dim // 2)
        fraction = rotated_fraction(2 * turning, rope.rotary_dim)
        form = replace(form, scaling=replace(law, fraction=fraction))
    if isinstance(law, Yarn):
        usual = (law.mscale, law.mscale_all_dim) == (1, 0)
        gain = law.attention_factor if usual else rope.attention_factor
        form = replace(form, scaling=replace(law, mscale=1.0, attention_factor=gain))
    with refusing(target):
        return rope_parameters(form, length)


def _list_block(target: Target, rope: Rope, length: int) -> Block:
    """LongRoPE with one list, whose factor on cos and sin comes from two lengths."""
    gain = rope.attention_factor
    if gain < 1:
        target.refuse(f"cos and sin multiplied by {gain:g}", rope, length, plain_candidates(rope))
    base, divisors = base_and_divisors(rope)
    plain = replace(rope, base=base, scaling=None, explicit_inv_freq=None)
    original = length if gain == 1 else length ** (1 / gain**2)
    return _named_block(target, plain, length) | {
        "rope_type": "longrope",
        "factor": length / original,
        **dict.fromkeys(("short_factor", "long_factor"), divisors.tolist()),
        _ORIGINAL: original,
    }


def _write(
    target: Target,
    ropes: LayerRopes,
    keys: Block,
    block: Callable[[Rope], Block],
    pairing: str = "no config says which",
) -> tuple[ProgramSettings, ...]:
    """The keys of a config: ``block`` of every rope, and outside it what older classes read."""
    with refusing(target):
        blocks = ropes.config_blocks()

    def slice_block(rope: Rope) -> Block:
        # the class says where in a head its slice begins
        width = rope.head_dim - rope.rotary_start
        return block(replace(rope, head_dim=width, rotary_start=0))

    one = isinstance(blocks, Rope)
    if one:
        parameters = slice_block(blocks)
        keys |= {
            key: parameters[key]
            for key in ("rope_theta", "partial_rotary_factor")
            if key in parameters
        }
    else:
        parameters = {label: rope and slice_block(rope) for label, rope in blocks.items()}
    keys = keys_over_file({**keys, "rope_parameters": parameters}, ropes)
    if one:
        block_of_file = keys["rope_parameters"]
        if parameters["rope_type"] == "yarn" and _ORIGINAL not in parameters:
            block_of_file.pop(_ORIGINAL, None)  # with it exllamav3 would not read the factor
        nothing = block_of_file["rope_type"] == "default" and "mrope_section" not in parameters
        keys["rope_scaling"] = None if nothing else block_of_file
    path = ropes.in_config.path
    notes = (f"These keys belong inside {path} of the config.",) if path else ()
    if not one:
        notes += (f"The class for the model in {target.name} must read a block for each kind.",)
    kinds = {kind: rope for kind, rope in ropes.kinds.items() if rope is not None}
    notes += class_notes(target, kinds.values(), pairing)
    found: list[Block | None] = [parameters] if isinstance(blocks, Rope) else [*parameters.values()]
    lengths = [keys.get(_ORIGINAL) for keys in found if keys]
    if any(isinstance(length, float) and not length.is_integer() for length in lengths):
        notes += (
            f"{_ORIGINAL} gives the factor on cos and sin; it is no length, and other "
            "programs refuse it.",
        )
    return (ProgramSettings(keys, json.dumps(keys, indent=2), notes, kinds),)


# mlx-lm


def _is_named_by_mlx_lm(rope: Rope) -> bool:
    law = rope.scaling
    if isinstance(law, Yarn):  # it reads neither truncate nor attention_factor
        return _has_name(rope) and law.truncate and (law.factor > 1 or rope.attention_factor == 1)
    return _has_name(rope) or isinstance(law, DynamicNTK)


def _pairings_of_mlx_lm(rope: Rope) -> tuple[Pairing, ...]:
    return PAIRINGS if _is_named_by_mlx_lm(rope) else ("half",)


def _write_mlx_lm(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    starts = {
        rope.scaling.original_max_positions
        for rope in ropes.ropes
        if isinstance(rope.scaling, DynamicNTK)
    }
    if len(starts) > 1:
        MLX_LM.only_rope(ropes, context)
    length = min(starts, default=context)

    def block(rope: Rope) -> Block:
        law = rope.scaling
        if isinstance(law, LongRope):
            start = law.original_max_positions
            short, rope = rope.at(start), rope.at(start + 1)
            if short != rope:
                MLX_LM.refuse(
                    "the short list of LongRope, which picks one by the length of the sequence: "
                    f"its code always takes the long one; {PICK_LAW}",
                    short,
                    start,
                    [rope],
                )
        if _is_named_by_mlx_lm(rope):
            keys = _named_block(MLX_LM, rope, length)
        elif model_family(ropes).replace("_", "-").startswith("gpt-oss"):
            near = plain_candidates(rope)
            if isinstance(law, Yarn):
                near.append(replace(rope, scaling=replace(law, truncate=True)))
            MLX_LM.refuse(
                "truncate: false for gpt-oss, whose class gives a list of divisors no "
                "max_position_embeddings",
                rope,
                context,
                near,
            )
        else:
            keys = _list_block(MLX_LM, rope, length)
        if isinstance(law, Yarn) and keys["rope_type"] == "yarn":
            keys |= {"mscale": yarn_mscale(law), "mscale_all_dim": law.mscale_all_dim}
        return keys | {"type": keys["rope_type"]}  # some classes ask for this word

    traditional = {rope.pairing == "interleaved" for rope in ropes.ropes}
    keys = {_CONTEXT: length, "rope_traditional": traditional == {True}}
    return _write(MLX_LM, ropes, keys, block, "not every one reads rope_traditional")


MLX_LM = Target(
    name="mlx-lm",
    program="keys of a model's config.json for mlx-lm",
    source="https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/models/rope_utils.py",
    checked="run",
    write=_write_mlx_lm,
    pairings=_pairings_of_mlx_lm,
    backwards=True,
    rules=(DynamicNTK, LongRope),
    softmax=True,
    query_factor=has_steps,
)


# exllamav3


def _length_for_exllamav3(law: Yarn) -> int:
    """The tokens by which it computes YaRN's factor, or those before the extension if it cannot."""
    length = law.factor * law.original_max_positions
    return int(length) if length.is_integer() else law.original_max_positions


def _write_exllamav3(ropes: LayerRopes, context: int) -> tuple[ProgramSettings, ...]:
    laws = [rope.scaling for rope in ropes.ropes]
    lengths = {_length_for_exllamav3(law) for law in laws if isinstance(law, Yarn)}
    if len(lengths) > 1:
        EXLLAMAV3.only_rope(ropes, context)
    length = min(lengths, default=context)

    def block(rope: Rope) -> Block:
        if rope.axes.n_axes not in (1, 3):
            feature = f"positions of {rope.axes.n_axes} axes"
            EXLLAMAV3.refuse(feature, rope, context, [replace(rope, axes=OneAxis())])
        if not _has_name(rope):
            return _list_block(EXLLAMAV3, rope, length)
        keys = _named_block(EXLLAMAV3, rope, length)
        law = rope.scaling
        if isinstance(law, Yarn):
            keys["attention_factor"] = rope.attention_factor  # the classes compute different ones
            if law.factor != length / law.original_max_positions:
                del keys[_ORIGINAL]  # then it reads the factor
        return keys

    return _write(EXLLAMAV3, ropes, {_CONTEXT: length}, block)


EXLLAMAV3 = Target(
    name="exllamav3",
    program="keys of a model's config.json for exllamav3",
    source="https://github.com/turboderp-org/exllamav3/blob/master/exllamav3/util/rope.py",
    checked="engine",
    write=_write_exllamav3,
    backwards=True,
    axes=(OneAxis, Sectioned, InterleavedSections),
    softmax=True,
    query_factor=has_steps,
)
