"""mlx-lm: ``config.json``, whose classes make a rotation of it in ``initialize_rope``."""

from __future__ import annotations

from phasor.files.configs.writing import CONTEXT_KEY
from phasor.files.dialects.config_blocks import (
    has_name,
    list_block,
    named_block,
    only_length,
    write_config,
)
from phasor.files.dialects.target import (
    PICK_LAW,
    Keys,
    ProgramSettings,
    Target,
    TranslationError,
    has_steps,
    is_usual_yarn,
    model_family,
    mscales,
)
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import DynamicNTK, LongRope, Yarn


def _is_named_by_mlx_lm(rope: Rope) -> bool:
    if isinstance(rope.scaling, Yarn):  # it reads neither truncate nor attention_factor
        return has_name(rope) and is_usual_yarn(rope)
    return has_name(rope) or isinstance(rope.scaling, DynamicNTK)


def _write_mlx_lm(ropes: LayerRopes, context: int) -> ProgramSettings:
    laws = [rope.scaling for rope in ropes.ropes]
    starts = {law.original_max_positions for law in laws if isinstance(law, DynamicNTK)}
    length = only_length(MLX_LM, ropes, starts, context)

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
            keys = named_block(MLX_LM, rope, length)
        elif model_family(ropes).replace("_", "-").startswith("gpt-oss"):
            MLX_LM.refuse(
                "truncate: false for gpt-oss, whose class gives a list of divisors no "
                "max_position_embeddings",
                rope,
            )
        else:
            keys = list_block(MLX_LM, rope, length)
        if isinstance(law, Yarn) and keys["rope_type"] == "yarn":
            keys |= mscales(law)
        return keys | {"type": keys["rope_type"]}  # some classes ask for this word

    pairings = {rope.pairing for rope in ropes.ropes}
    if len(pairings) > 1:  # rope_traditional is of all layers
        MLX_LM.only_rope(ropes)
    keys = {CONTEXT_KEY: length, "rope_traditional": pairings == {"interleaved"}}
    return write_config(MLX_LM, ropes, keys, block)


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
