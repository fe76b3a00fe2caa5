"""Published models as data: `preset` gives the ropes of a model, `preset_names` lists the models.

`preset_of_hub_id` finds the preset of a repository on the Hugging Face Hub, and
`documented_extension` returns the longer context that a model's release documents.

The data is in ``presets.toml``; its header explains the keys.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from phasor._checks import did_you_mean, find_name, short_repr
from phasor.errors import SpecError
from phasor.layers import ConfigLocation, LayerRopes, NamedRope, QueryFactor
from phasor.rope import Rope
from phasor.scaling import Yarn

# keys that a table does not inherit from the table that it is ``like``
_NOT_INHERITED = frozenset({"source", "uncertain", "hub", "extends"})
_MERGED = frozenset({"rope", "size", "kinds"})


def preset(name: str) -> LayerRopes:
    """The rope of every layer of a published model, as its Hugging Face checkpoint stores it.

    Names that end in ``-meta`` or ``-mistral`` describe the makers' own files instead.
    ``notes`` gives the source of the numbers ("Source: ..."), facts that a Rope has no field for,
    and unconfirmed facts ("Uncertain: ...").

    Args:
        name: One of `preset_names`, with any case and punctuation (``"Llama 3.1 8B"``), or the id
            of its repository on the Hugging Face Hub, such as ``"meta-llama/Llama-3.1-8B"``.

    Raises:
        SpecError: If there is no such preset; the message suggests similar names.

    >>> ropes = preset("llama-3.1-8b")
    >>> len(ropes), ropes[0].base, ropes[0].scaling.factor
    (32, 500000.0, 8.0)
    >>> [rope is None for rope in preset("smollm3-3b")[:4]]
    [False, False, False, True]
    """
    preset_name = preset_of_hub_id(name) or find_name(name, preset_names())
    if preset_name is None:
        hint = " ".join(filter(None, (did_you_mean(name, preset_names()), "phasor.preset_names()")))
        raise SpecError(
            f"name must be one of the {len(preset_names())} presets, got {short_repr(name)}; "
            f"{hint} lists them all"
        )
    return _layer_ropes(preset_name, _merged_table(preset_name))


@lru_cache(maxsize=1)
def preset_names() -> tuple[str, ...]:
    """The names that `preset` knows, sorted.

    >>> "gpt-j-6b" in preset_names()
    True
    """
    return tuple(sorted(_tables()))


def preset_of_hub_id(repository: str) -> str | None:
    """The name of the preset of a repository on the Hugging Face Hub, in any case, or None.

    >>> preset_of_hub_id("meta-llama/llama-3.1-8b")
    'llama-3.1-8b'
    """
    return _presets_by_hub_id().get(str(repository).lower())


@dataclass(frozen=True, kw_only=True)
class DocumentedExtension:
    """The longer context that the release of a preset, the ``model``, documents, and its source."""

    model: str
    law: Yarn
    source: str

    @property
    def reach(self) -> int:
        """Tokens up to which the law is documented: its factor times its original context."""
        return int(self.law.factor * self.law.original_max_positions)


def documented_extension(ropes: LayerRopes) -> DocumentedExtension | None:
    """The longer context that the release of a model documents; None if none is known.

    A preset is known by its name, and a config file by its layers, heads and context.

    >>> documented_extension(preset("qwen3-8b")).reach
    131072
    """
    for name, table in _tables().items():
        # a preset without a documented extension may inherit from one that has it
        if "extends" not in table or (ropes.name != name and ropes.name in preset_names()):
            continue
        candidate = preset(name)
        sizes, model_sizes = ((m.num_heads, m.num_kv_heads, m.context) for m in (candidate, ropes))
        if sizes == model_sizes and list(candidate) == list(ropes):
            law = dict(table["extends"])
            source = law.pop("source")
            return DocumentedExtension(model=name, law=Yarn(**law), source=source)
    return None


@lru_cache(maxsize=1)
def _presets_by_hub_id() -> Mapping[str, str]:
    return {id_.lower(): name for name, table in _tables().items() for id_ in table.get("hub", ())}


@lru_cache(maxsize=1)
def _tables() -> Mapping[str, Mapping[str, Any]]:
    # importing importlib.resources would take as long as reading this file
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text("utf-8"))


def _merged_table(name: str) -> dict[str, Any]:
    """The table of ``name``, merged with the table that it is ``like``."""
    table = dict(_tables()[name])
    if "like" not in table:
        return table
    inherited = _merged_table(table.pop("like"))
    merged = {key: value for key, value in inherited.items() if key not in _NOT_INHERITED}
    for key, value in table.items():
        merged[key] = merged.get(key, {}) | value if key in _MERGED else value
    return merged


def _layer_ropes(name: str, table: Mapping[str, Any]) -> LayerRopes:
    shared, size = table.get("rope", {}), table["size"]
    kinds: Mapping[str, Any] = table.get("kinds", {"rope": {}})
    order = chain(table.get("prefix", ()), cycle(table.get("pattern", kinds)))
    num_heads, num_kv_heads = size["heads"]
    layer_kinds = tuple(islice(order, size["layers"]))
    auxiliary_ropes: list[NamedRope] = []
    for rotation_name, entry in table.get("auxiliary_ropes", {}).items():
        rope = Rope.from_dict(shared | kinds[layer_kinds[-1]] | entry["rope"])
        auxiliary_ropes.append(NamedRope(rotation_name, rope, tuple(entry["layers"])))
    return LayerRopes(
        name=name,
        layer_kinds=layer_kinds,
        kinds={
            kind: None if fields == "none" else Rope.from_dict(shared | fields)
            for kind, fields in kinds.items()
        },
        context=size.get("context"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        auxiliary_ropes=tuple(auxiliary_ropes),
        query_factors={k: QueryFactor(**v) for k, v in table.get("query_factors", {}).items()},
        in_config=ConfigLocation(
            labels=table.get("labels", {}), ignores_scaling=table.get("fixed", False)
        ),
        notes=(
            f"Source: {table['source']}.",
            *table.get("notes", ()),
            *(f"Uncertain: {doubt}" for doubt in table.get("uncertain", ())),
        ),
    )
