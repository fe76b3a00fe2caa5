"""How wide a head is and how much of it turns."""

from __future__ import annotations

from collections.abc import Sequence

from phasor.configs._reading import Block, agreed
from phasor.configs._table import Architecture, Kind
from phasor.errors import ConfigError

_HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "decoder_num_attention_heads")
_FRACTIONS = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction")
# wider than any head; a damaged width must not fill the memory
WIDEST = 65_536


def head_width(config: Block, facts: Architecture, apart: Kind) -> int:
    """Width of the part of a head that the model's rotation is given."""
    key, default = facts.head_dim_key, facts.head_dim
    if apart.head_dim_key is not None:
        key, default = apart.head_dim_key, apart.head_dim
    given = config.whole(key, least=2, most=WIDEST)
    if given is not None:
        return given
    # the class default is for a file without the key: a null overrides it
    if default is not None and key not in config.values:
        return default
    hidden, heads = config.first(_HIDDEN, Block.whole), config.first(HEADS, Block.whole)
    if hidden is None or heads is None:
        raise ConfigError(
            f"{config.name(key)} is absent and cannot be derived; add it, or both hidden_size and "
            "num_attention_heads"
        )
    if hidden % heads or not 2 <= hidden // heads <= WIDEST:
        raise ConfigError(
            f"{config.name(key)} is absent, and hidden_size / num_attention_heads "
            f"({hidden} / {heads}) must be a whole number from 2 to {WIDEST}; add it"
        )
    return hidden // heads


def widths_apart(config: Block, facts: Architecture, kinds: Sequence[str]) -> dict[str, int]:
    """Head widths by kind of layer, in files whose ``per_layer_config`` sets single layers apart.

    Raises:
        ConfigError: If layers of one kind have heads of several widths.
    """
    name = "per_layer_config"
    single = config.block(name)
    if single is None or not single.values:
        return {}
    # "05" is layer 5; a dictionary that was never a file may hold the number itself
    if any(not str(key).isdecimal() or int(key) >= len(kinds) for key in single.values):
        config.refuse(name, f"an object from numbers below {len(kinds)} to what those layers say")
    said: dict[int, int | None] = {}
    for key in single.values:
        layer = single.block(key) or Block({}, single.name(key))
        for stray in layer.values:
            if ("rope" in stray and stray != facts.head_dim_key) or "rotary" in stray:
                layer.refuse(stray, "in the block of a kind of layer, not of a single one")
        said[int(key)] = layer.whole(facts.head_dim_key, least=2, most=WIDEST)
    # what the class takes for a kind of layer is, in such a file, written at its layers
    usual = head_width(config, facts, Kind())
    found: dict[str, int] = {}
    for kind in dict.fromkeys(kinds):
        widths = {said.get(i) or usual for i, one in enumerate(kinds) if one == kind}
        if len(widths) > 1:
            raise ConfigError(
                f"{config.name(name)} gives layers of the kind {kind!r} heads of different widths "
                f"({', '.join(map(str, sorted(widths)))}); give those layers a kind of their own "
                "in layer_types"
            )
        apart = facts.kinds.get(facts.labels.get(kind, kind), Kind()).head_dim_key
        beside = None if apart is None else config.whole(apart, least=2, most=WIDEST)
        here = f"{config.name(name)} at layers of the kind {kind!r}"
        agreed([(here, width := widths.pop()), (str(apart), beside)])
        found[kind] = width
    return found


def rotated_width(config: Block, block: Block, facts: Architecture, head_dim: int) -> int:
    """Coordinates that turn, on which every key about them must agree."""
    fractions = [(block.name("partial_rotary_factor"), _fraction(block, "partial_rotary_factor"))]
    fractions += [(config.name(key), _fraction(config, key)) for key in _FRACTIONS]
    if facts.head_dim_key == "qk_rope_head_dim":
        _agree_with_latent(config, fractions, head_dim)
        return head_dim
    said = [(name, None if f is None else int(head_dim * f)) for name, f in fractions]
    said.append((config.name(facts.rotary_dim_key), config.whole(facts.rotary_dim_key)))
    width = agreed(said)
    if width is None:
        width = facts.rotary_dim
    if width is None:
        width = head_dim if facts.fraction is None else int(head_dim * facts.fraction)
    source = next((name for name, value in said if value is not None), "partial_rotary_factor")
    if width % 2 or not 2 <= width <= head_dim:
        raise ConfigError(
            f"{source} must leave an even number of rotated coordinates from 2 to {head_dim}, "
            f"got {width}"
        )
    if width != head_dim and not facts.partial:
        raise ConfigError(
            f"{source} asks for {width} of {head_dim} coordinates, but this model type rotates "
            "whole heads; remove it, or describe the embedding with phasor.Rope(...) directly"
        )
    return width


def _fraction(block: Block, key: str) -> float | None:
    value = block.number(key, above=0)
    if value is not None and value > 1:
        block.refuse(key, "a number above 0 and at most 1")
    return value


def _agree_with_latent(
    config: Block, fractions: list[tuple[str, float | None]], rotated: int
) -> None:
    """In latent attention the rotated part is a slice of its own; a fraction is of the whole."""
    still = config.whole("qk_nope_head_dim", least=0) or 0
    for name, fraction in fractions:
        whole = {still + rotated, config.whole("head_dim") or 0}
        if fraction not in (None, 1) and all(int(one * fraction) != rotated for one in whole):
            raise ConfigError(
                f"{name} says that {fraction:g} of {still + rotated} coordinates turn and "
                f"{config.name('qk_rope_head_dim')} says {rotated}; remove the wrong one"
            )
