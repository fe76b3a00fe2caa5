"""The kind of every layer: from the file's own list, or the pattern of its model class."""

from __future__ import annotations

from collections.abc import Mapping

from phasor._checks import shown
from phasor.configs.block import Block, agreed
from phasor.configs.facts import Architecture, table
from phasor.errors import ConfigError

# more layers than any model has; a damaged count must not fill the memory
MOST_LAYERS = 100_000


def layer_kinds(config: Block, facts: Architecture) -> tuple[str, ...]:
    """One kind per layer: the file's names for them, else ``rope`` and ``nope``."""
    count = config.whole("num_hidden_layers", most=MOST_LAYERS)
    if count is None:
        raise ConfigError(f"{config.name('num_hidden_layers')} is absent; add the number of layers")
    if "no_rope_interval" in facts.layers:
        return _switched(config, facts, count)
    if "bases_key" in facts.layers:
        return _with_bases(config, facts.layers["bases_key"], count)
    if "blocks_key" in facts.layers:
        return _with_attention(config, facts.layers["blocks_key"], count)
    key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    named = config.texts(key)
    if named is None:
        return patterned(config, facts, count)
    if len(named) != count:
        raise ConfigError(
            f"{config.name(key)} must name the kind of each of the {count} layers, got {len(named)}"
        )
    known = _words(facts)
    for i, word in enumerate(named):
        if word not in known:
            raise ConfigError(
                f"{config.name(key)}.{i} must be one of {', '.join(sorted(known))}, "
                f"got {shown(word)}"
            )
    return named


def _words(facts: Architecture) -> frozenset[str]:
    """What a file may call a kind of layer of this class."""
    rule = facts.layers
    own = {rule[word] for word in ("hit", "miss", "absent") if word in rule}
    own |= facts.labels.keys() | set(rule.get("codes", {}).values())
    if facts.without_rope or facts.kinds:
        # another word for one of these would leave it without what sets it apart
        return frozenset(own) | table().without_rope
    return frozenset(own) | table().without_rope | table().layer_words


def has_rope(kind: str, config: Block, facts: Architecture) -> bool:
    """Whether layers of this kind rotate at all."""
    if kind in table().without_rope:
        return False
    needs = facts.without_rope_needs
    return kind not in facts.without_rope or not (needs is None or config.has(needs))


def _switched(config: Block, facts: Architecture, count: int) -> tuple[str, ...]:
    """Layers that a list of ones and zeros (1 rotates), or an interval, sets without rope."""
    # the mask, not the rope, follows layer_types in these models
    config.ignore("layer_types")
    switches = config.wholes("no_rope_layers")
    interval = config.whole("no_rope_layer_interval")
    if switches:
        if len(switches) != count or not set(switches) <= {0, 1}:
            config.refuse("no_rope_layers", f"a list of {count} ones (rope) and zeros (none)")
        return tuple("rope" if switch else "nope" for switch in switches)
    every = interval or facts.layers["no_rope_interval"]
    return tuple("rope" if (i + 1) % every else "nope" for i in range(count))


def _with_bases(config: Block, key: str, count: int) -> tuple[str, ...]:
    """Layers that a list of bases, 0 for none, gives a rope; one base for all that have any."""
    # the mask, not the rope, follows layer_types in these models
    config.ignore("layer_types")
    bases = config.items(key)
    if bases is None:
        raise ConfigError(f"{config.name(key)} is absent; add it, with 0 for layers without rope")
    used = {base for base in bases if base}
    if len(bases) != count or len(used) > 1:
        config.refuse(key, f"one base, or 0 for no rope, for each of {count} layers")
    stated = (config.block("rope_parameters") or config).number("rope_theta", above=1)
    agreed([(config.name(key), next(iter(used), None)), (config.name("rope_theta"), stated)])
    return tuple("rope" if base else "nope" for base in bases)


def _with_attention(config: Block, key: str, count: int) -> tuple[str, ...]:
    """Layers that a search for a smaller model left their attention (Nemotron-NAS)."""
    blocks = config.items(key)
    if blocks is None or len(blocks) != count or not all(isinstance(b, Mapping) for b in blocks):
        config.refuse(key, f"a list of one object for each of {count} layers")
    kinds: list[str] = []
    for i, block in enumerate(blocks):
        attention = Block(block, f"{config.name(key)}.{i}").block("attention")
        gone = ("no_op", "replace_with_linear")
        kept = attention is None or not any(attention.flag(switch) for switch in gone)
        kinds.append("rope" if kept else "nope")
    return tuple(kinds)


def patterned(config: Block, facts: Architecture, count: int) -> tuple[str, ...]:
    """One kind per layer where the file has no list of kinds: the rule of the model class."""
    rule = facts.layers
    if not rule:
        return ("rope",) * count
    if "listed" in rule:
        raise ConfigError(f"{config.name('layer_types')} is absent; add the kind of every layer")
    hit, miss = rule.get("hit", ""), rule.get("miss", "")
    if "indices_key" in rule:
        indices = config.wholes(rule["indices_key"])
        if indices is None and "absent" in rule:
            return (rule["absent"],) * count
        if indices is None:
            raise ConfigError(
                f"{config.name(rule['indices_key'])} is absent; add it, or layer_types"
            )
        return tuple(hit if i in indices else miss for i in range(count))
    if "codes_key" in rule:
        return _coded(config, rule["codes_key"], rule["codes"], count)
    if "cycle_key" in rule:
        cycle = config.texts(rule["cycle_key"]) or rule["cycle"]
        return tuple(hit if cycle[i % len(cycle)] == rule["word"] else miss for i in range(count))
    if "needs" in rule and not config.has(rule["needs"]):
        config.ignore(*rule.get("keys", ()))
        return (hit,) * count
    every: int | str = rule["every"]
    for key in rule.get("keys", ()):
        if isinstance(config.values.get(key), str):
            return _lettered(config, key, hit, miss, count)
        every = agreed([(config.name(key), config.whole(key))]) or every
    shift = rule.get("shift", 1)
    kinds = [hit if (i + shift) % int(every) == 0 else miss for i in range(count)]
    for i in rule.get("also", ()):
        kinds[i] = hit
    return tuple(kinds)


def _coded(config: Block, key: str, codes: dict[str, str], count: int) -> tuple[str, ...]:
    """DeepSeek V4 gives each layer a number; entries past the last layer are its drafter's."""
    given = config.wholes(key)
    if given is None or len(given) < count or not {str(code) for code in given} <= codes.keys():
        config.refuse(key, f"a list of one of {', '.join(codes)} for each of {count} layers")
    return tuple(codes[str(code)] for code in given[:count])


def _lettered(config: Block, key: str, hit: str, miss: str, count: int) -> tuple[str, ...]:
    """EXAONE 4 writes its pattern in letters: L for a local layer, G for a global one."""
    word = config.text(key) or ""
    if not word or set(word) - {"L", "G"}:
        config.refuse(key, 'a number of layers or a word of "L" and "G" such as "LLLG"')
    return tuple(hit if word[i % len(word)] == "G" else miss for i in range(count))
