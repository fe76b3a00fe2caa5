"""YaRN (2309.00071) as configs spell it, with the three places its temperature may go."""

from __future__ import annotations

import math
from functools import partial

from phasor.configs._model import Model, extension_factor, original_length, renamed
from phasor.configs._reading import Block, agreed
from phasor.errors import ConfigError
from phasor.scaling import Yarn, yarn_multiplier

_MAX = "max_position_embeddings"


def yarn(block: Block, model: Model) -> Yarn:
    """The law of a ``yarn`` block; transformers' defaults where the block is silent."""
    original = original_length(block, model, or_context=True)
    factor = extension_factor(block, model, original)
    betas = {
        key: value
        for key in ("beta_fast", "beta_slow")
        if (value := block.number(key, above=0)) is not None
    }
    # ministral's blocks repeat the model's context, which its class reads from there as well
    agreed([(block.name(_MAX), block.whole(_MAX)), (_MAX, model.context)])
    truncate = block.flag("truncate")
    names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    with renamed(block, names):
        return Yarn(
            factor=factor,
            original_max_positions=original,
            truncate=True if truncate is None else truncate,
            **betas,
            **_temperature(block, model, factor),
        )


def _temperature(block: Block, model: Model, factor: float) -> dict[str, float]:
    """YaRN's temperature as the model applies it, on cos and sin or on the softmax scale."""
    m = partial(yarn_multiplier, factor)

    mscale = block.number("mscale", least=0)
    all_dim = block.number("mscale_all_dim", least=0)
    stated = block.number("attention_factor", above=0)
    if stated is None:
        stated = model.architecture.yarn_attention_factor
    if stated is None and mscale and all_dim:
        stated = m(mscale) / m(all_dim)
        if model.architecture.softmax:
            # these two stand for the same factor, and for the softmax scale's
            return {"mscale": mscale, "mscale_all_dim": all_dim}
    elif stated is None:
        by_transformers = m(1)
        by_deepseek = m(1 if mscale is None else mscale) / m(all_dim or 0)
        if not math.isclose(by_transformers, by_deepseek, rel_tol=1e-12):
            raise ConfigError(
                f"{block.name('mscale')} and {block.name('mscale_all_dim')} must both be given and "
                f"not zero: with one of them transformers multiplies cos and sin by "
                f"{by_transformers:g}, DeepSeek's own code by {by_deepseek:g}; "
                "give both, or attention_factor"
            )
    temperature = {} if stated is None else {"attention_factor": stated}
    if model.architecture.softmax and all_dim:
        temperature["mscale_all_dim"] = all_dim
    return temperature
