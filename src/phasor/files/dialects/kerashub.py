"""KerasHub: ``config.json`` of a backbone, also inside the one of a task."""

from __future__ import annotations

from phasor.files.configs.facts import inherit
from phasor.files.configs.program_model import ProgramModel, with_sections
from phasor.layers import LayerRopes


def read(backbone: ProgramModel) -> LayerRopes:
    """The rope of each layer."""
    outer, facts = backbone.config, backbone.facts
    name, key = outer.text("class_name") or "", "position_embedding_type"
    class_entry = inherit(facts["classes"].get(name, {}), facts["classes"])
    model = ProgramModel(backbone.program, outer.object("config") or outer, entry=class_entry)
    config, layout = model.config, class_entry.get("layout")
    learned = "instead" in class_entry and config.text(key, "rotary", "absolute") == "absolute"
    if learned or name in facts["instead"]:
        return model.no_rotation(f"KerasHub's {name}", name)
    if name not in facts["classes"]:
        outer.refuse("class_name", f"a backbone that phasor knows ({', '.join(facts['classes'])})")
    rope = model.rope(class_entry.get("pairing", "half"), class_entry.get("pairing_out"))
    config.notes += class_entry.get("notes", ())
    key = "rope_position_scaling_factor"
    if config.number(key, above=0) not in (None, 1):
        config.refuse(key, "1, as releases of KerasHub differ in whether it divides positions")
    if (law := class_entry.get("law")) is not None:
        config.text("rope_scaling_type", "su")
        law_entry = facts["laws"][law]
        rope = model.law(law, rope) if any(map(config.has, law_entry["when"])) else rope
        config.ignore(*law_entry["names"].values())
    if layout == "axial":
        key = class_entry.get("axes_key", "")
        widths = config.require(key, config.wholes(key)) if key else (rope.head_dim // 2,) * 2
        rope = with_sections(rope, config, [width // 2 for width in widths], layout)
    elif layout and config.has("mrope_section"):
        rope = with_sections(rope, config, config.wholes("mrope_section"), layout)
    return model.ropes_by_kind(rope, class_entry)
