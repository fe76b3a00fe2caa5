"""torchtune: recipes, whose model is one of torchtune's functions, with or without arguments."""

from __future__ import annotations

import re

from phasor.files.configs.facts import inherit
from phasor.files.configs.layer_pattern import LayerPattern
from phasor.files.configs.program_model import ProgramModel
from phasor.layers import LayerRopes


def read(model: ProgramModel) -> LayerRopes:
    """The rope of each layer."""
    config, facts = model.config, model.facts
    component = config.text("_component_") or ""
    builders, name = facts["builders"], component.rpartition(".")[2]
    builder = builders.get(name, builders.get(re.sub("^q?lora_|_classifier$|_decoder$", "", name)))
    if builder is None or not component.startswith("torchtune.models."):
        config.refuse("_component_", "a model of torchtune's that phasor knows")
    entry, file_values, names = inherit(builder, builders), config.unread(), facts["names"].values()
    numbers = dict(zip(facts["sizes"], entry.get("sizes", ()), strict=False))
    numbers |= {key: entry[key] for key in facts["numbers"] if key in entry}
    numbers = {"rope_theta": model.defaults["rope_theta"]} | numbers
    assumed = {key: number for key, number in numbers.items() if not config.has(key)}
    assumed_text = ", ".join(f"{config.name(key)} {number:.12g}" for key, number in assumed.items())
    if assumed_text:
        config.notes.append(f"In torchtune's code of {name}, and not in the file: {assumed_text}.")
    model.config = config = config.with_defaults(assumed)
    for key in entry.get("needs", ()):
        config.require(key, config.value(key))
    rope = model.rope(entry["pairing"])
    rope = model.law(entry["law"], rope) if "law" in entry else rope
    config.notes += [facts["note"], *([entry["note"]] if "note" in entry else [])]
    key = "skip_rope_interval"
    interval = config.whole(key) if key in entry else None
    known_names = {*names, *entry.get("takes", ())} - {*entry.get("lacks", ())}
    known_names = set[str]() if "sizes" in entry else known_names
    keys_read = config.keys_read.union(names, ["scale_factor"])
    for key in (key for key in file_values if key in keys_read - known_names):
        config.refuse(key, f"absent, as torchtune's {name} takes no such argument")
    still_layers = LayerPattern.every(interval or 0, config.layers())
    return model.ropes({"nope": None, "rope": rope}, still_layers)
