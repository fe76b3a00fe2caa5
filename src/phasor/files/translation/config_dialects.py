"""JSON that is read in a way of its own: by mlx-lm and exllamav3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phasor.axes import OneAxis
from phasor.files.configs.file_keys import keys_over_file
from phasor.files.configs.writing import CONTEXT_KEY, rotated_fraction
from phasor.files.dialects.target import (
    PICK_LAW,
    Keys,
    ProgramSettings,
    Target,
    TranslationError,
    as_json,
    base_and_divisors,
    first_length,
    has_steps,
    is_usual_yarn,
    main_and_local,
    model_family,
    mscales,
    ntk_as_base,
)
from phasor.files.translation.config_files import (
    ConfigTarget,
    blocks_of,
    in_config_form,
    place_notes,
    slice_block,
)
from phasor.layers import LayerRopes, QueryFactor
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, Linear, Llama3, LongRope, Proportional, Yarn

_ORIGINAL = "original_max_position_embeddings"


# mlx-lm and exllamav3: keys that older classes read outside the block too; other frequencies than
# those of a law with a name are the divisors of a longrope.


def _has_name(rope: Rope) -> bool:
    """Whether its law is of a type that both programs know."""
    form = ntk_as_base(rope)
    whole_head = form.rotary_start + form.rotary_dim == form.head_dim
    laws = (type(None), Linear, Llama3, Yarn, *((Proportional,) if whole_head else ()))
    return form.direction == 1 and form.base is not None and isinstance(form.scaling, laws)


def _named_block(target: Target, rope: Rope, length: int) -> Keys:
    if isinstance(law := rope.scaling, Proportional):
        # some programs count coordinates where others count pairs
        turning = int(law.fraction * rope.rotary_dim // 2)
        fraction = rotated_fraction(2 * turning, rope.rotary_dim)
        rope = replace(rope, scaling=replace(law, fraction=fraction))
    return slice_block(in_config_form(target, rope), length)


def _list_block(target: Target, rope: Rope, length: int) -> Keys:
    """LongRoPE with one list, whose factor on cos and sin comes from two lengths."""
    gain, (base, divisors) = rope.attention_factor, base_and_divisors(rope)
    if gain < 1:
        target.refuse(f"cos and sin multiplied by {gain:g}", rope)
    original = first_length(gain, length)
    plain = replace(rope, base=base, scaling=None, explicit_inv_freq=None)
    return _named_block(target, plain, length) | {
        "rope_type": "longrope",
        "factor": length / original,
        **dict.fromkeys(("short_factor", "long_factor"), divisors.tolist()),
        _ORIGINAL: original,
    }


def _only_length(target: Target, ropes: LayerRopes, lengths: set[int], context: int) -> int:
    """The length by which the laws of all layers are computed, or the context."""
    if len(lengths) > 1:
        target.only_rope(ropes)
    return min(lengths, default=context)


def _write_dialect(
    target: Target, ropes: LayerRopes, keys: Keys, block: Callable[[Rope], Keys]
) -> ProgramSettings:
    """The keys of a config: ``block`` of every rope, and outside it what older classes read."""
    parameters, blocks = blocks_of(ropes, block)
    notes, by_kind = place_notes(ropes), ropes.has_blocks_by_kind
    outside = ["rope_theta", "partial_rotary_factor"]
    outside += [_ORIGINAL] if parameters.get("rope_type") == "longrope" else []
    keys |= {key: parameters[key] for key in outside if key in parameters and not by_kind}
    factors = ropes.query_factors.items()
    # what it would multiply by otherwise is left out
    its_own = {kind: f for kind, f in factors if target.query_factor(f, ropes.kinds[kind])}
    its_ropes = replace(ropes, query_factors=its_own)
    keys = keys_over_file({**keys, "rope_parameters": parameters}, its_ropes)
    if target is EXLLAMAV3 and _ORIGINAL in keys:
        keys[_ORIGINAL] = round(keys[_ORIGINAL])  # it takes no other, and reads that of the block
    if by_kind:
        # of these classes older ones read one law, and know themselves which layers have it
        main, _ = main_and_local(ropes)
        kind = next(kind for kind, rope in ropes.kinds.items() if rope == main)
        scaled = keys["rope_parameters"][ropes.in_config.label(kind)]
        keys["rope_scaling"] = None if scaled["rope_type"] == "default" else scaled
        if not ropes.in_config.values:  # of no file, as Gemma 3's classes call the bases
            names = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
            found = [(key, parameters.get(label)) for label, key in names.items()]
            keys |= {key: own["rope_theta"] for key, own in found if own}
        note = f"The class for the model in {target.name} must read a block for each kind"
        if all(found in ({**found, "rope_type": "default"}, block(main)) for found in blocks):
            note += ", or a base for each and rope_scaling for all but sliding layers"
        notes += (f"{note}.",)
    else:
        block_of_file = keys["rope_parameters"]
        if parameters["rope_type"] == "yarn" and _ORIGINAL not in parameters:
            block_of_file.pop(_ORIGINAL, None)  # with it exllamav3 would not read the factor
        nothing = block_of_file["rope_type"] == "default" and "mrope_section" not in parameters
        keys["rope_scaling"] = None if nothing else block_of_file
    if any(not float(found.get(_ORIGINAL, 0)).is_integer() for found in blocks):
        notes += (
            f"{_ORIGINAL} gives the factor on cos and sin; it is no length, and other "
            "programs refuse it.",
        )
    return as_json(keys, notes)


# mlx-lm


def _is_named_by_mlx_lm(rope: Rope) -> bool:
    if isinstance(rope.scaling, Yarn):  # it reads neither truncate nor attention_factor
        return _has_name(rope) and is_usual_yarn(rope)
    return _has_name(rope) or isinstance(rope.scaling, DynamicNTK)


def _write_mlx_lm(ropes: LayerRopes, context: int) -> ProgramSettings:
    laws = [rope.scaling for rope in ropes.ropes]
    starts = {law.original_max_positions for law in laws if isinstance(law, DynamicNTK)}
    length = _only_length(MLX_LM, ropes, starts, context)

    def block(rope: Rope) -> Keys:
        law = rope.scaling
        if isinstance(law, DynamicNTK) and rope.direction < 0:
            raise TranslationError(
                f"mlx-lm keeps one law for clockwise pairs, and DynamicNTK picks one; {PICK_LAW}"
            )
        if isinstance(law, LongRope):
            start = law.original_max_positions
            short, rope = rope.at(start), rope.at(start + 1)
            if short != rope:
                MLX_LM.refuse(
                    "the short list of LongRope, which picks one by the length of the sequence: "
                    f"its code always takes the long one; {PICK_LAW}",
                    short,
                    [rope],
                    start,
                )
        if _is_named_by_mlx_lm(rope):
            keys = _named_block(MLX_LM, rope, length)
        elif model_family(ropes).replace("_", "-").startswith("gpt-oss"):
            MLX_LM.refuse(
                "truncate: false for gpt-oss, whose class gives a list of divisors no "
                "max_position_embeddings",
                rope,
            )
        else:
            keys = _list_block(MLX_LM, rope, length)
        if isinstance(law, Yarn) and keys["rope_type"] == "yarn":
            keys |= mscales(law)
        return keys | {"type": keys["rope_type"]}  # some classes ask for this word

    pairings = {rope.pairing for rope in ropes.ropes}
    if len(pairings) > 1:  # rope_traditional is of all layers
        MLX_LM.only_rope(ropes)
    keys = {CONTEXT_KEY: length, "rope_traditional": pairings == {"interleaved"}}
    return _write_dialect(MLX_LM, ropes, keys, block)


MLX_LM = Target(
    name="mlx-lm",
    program="keys of a model's config.json for mlx-lm",
    source="https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/models/rope_utils.py",
    checked="run",
    write=_write_mlx_lm,
    takes=lambda rope: rope.pairing == "half" or _is_named_by_mlx_lm(rope),
    backwards=True,
    rules=(DynamicNTK, LongRope),
    class_decides="not every one reads rope_traditional and rope_scaling",
    query_factor=has_steps,
)


# exllamav3


def _length_for_exllamav3(law: Yarn) -> int:
    """The tokens by which it computes YaRN's factor, or those before the extension if it cannot."""
    length = round(law.factor * law.original_max_positions)
    is_exact = length / law.original_max_positions == law.factor
    return length if is_exact else law.original_max_positions


def _write_exllamav3(ropes: LayerRopes, context: int) -> ProgramSettings:
    laws = [rope.scaling for rope in ropes.ropes]
    lengths = {_length_for_exllamav3(law) for law in laws if isinstance(law, Yarn)}
    length = _only_length(EXLLAMAV3, ropes, lengths, context)

    def block(rope: Rope) -> Keys:
        if rope.axes.n_axes not in (1, 3):
            one_axis = replace(rope, axes=OneAxis())
            EXLLAMAV3.refuse(f"positions of {rope.axes.n_axes} axes", rope, [one_axis])
        if not _has_name(rope):
            return _list_block(EXLLAMAV3, rope, length)
        keys = _named_block(EXLLAMAV3, rope, length)
        if isinstance(law := rope.scaling, Yarn):
            keys["attention_factor"] = rope.attention_factor  # the classes compute different ones
            if law.factor != length / law.original_max_positions:
                del keys[_ORIGINAL]  # then it reads the factor
        return keys

    return _write_dialect(EXLLAMAV3, ropes, {CONTEXT_KEY: length}, block)


def _exllamav3_multiplies_queries(factor: QueryFactor, rope: Rope | None) -> bool:
    """Only the code of YaRN reads the factor, whose length it takes from the law."""
    law = rope.scaling if rope and _has_name(rope) else None
    from_0 = has_steps(factor) and factor.first == 0
    return from_0 and isinstance(law, Yarn) and law.original_max_positions == factor.length


EXLLAMAV3 = ConfigTarget(
    name="exllamav3",
    program="keys of a model's config.json for exllamav3",
    source="https://github.com/turboderp-org/exllamav3/blob/master/exllamav3/util/rope.py",
    checked="engine",
    write=_write_exllamav3,
    backwards=True,
    query_factor=_exllamav3_multiplies_queries,
)
