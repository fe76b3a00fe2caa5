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
    found = builders.get(name, builders.get(re.sub("^q?lora_|_classifier$|_decoder$", "", name)))
    if found is None or not component.startswith("torchtune.models."):
        config.refuse("_component_", "a model of torchtune's that phasor knows")
    of_model, given, names = inherit(found, builders), config.unread(), facts["names"].values()
    numbers = dict(zip(facts["sizes"], of_model.get("sizes", ()), strict=False))
    numbers |= {key: of_model[key] for key in facts["numbers"] if key in of_model}
    numbers = {"rope_theta": model.defaults["rope_theta"]} | numbers
    assumed = {key: number for key, number in numbers.items() if not config.has(key)}
    said = ", ".join(f"{config.name(key)} {number:.12g}" for key, number in assumed.items())
    if said:
        config.notes.append(f"In torchtune's code of {name}, and not in the file: {said}.")
    model.config = config = config.with_defaults(assumed)
    for key in of_model.get("needs", ()):
        config.require(key, config.value(key))
    rope = model.rope(of_model["pairing"])
    rope = model.law(of_model["law"], rope) if "law" in of_model else rope
    config.notes += [facts["note"], *([of_model["note"]] if "note" in of_model else [])]
    key = "skip_rope_interval"
    interval = config.whole(key) if key in of_model else None
    takes = {*names, *of_model.get("takes", ())} - {*of_model.get("lacks", ())}
    takes = set[str]() if "sizes" in of_model else takes
    read = config.keys_read.union(names, ["scale_factor"])
    for key in (key for key in given if key in read - takes):
        config.refuse(key, f"absent, as torchtune's {name} takes no such argument")
    still_layers = LayerPattern.every(interval or 0, config.layers())
    return model.ropes({"nope": None, "rope": rope}, still_layers)
