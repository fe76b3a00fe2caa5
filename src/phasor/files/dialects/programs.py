"""Files of programs that train or serve, each with a dialect: which program a file belongs to.

The table of each dialect has the facts about its program; their sources are at its top:

* ``program``: its name.
* ``inside``: keys under which a file may contain the model's config as an object.
* ``marks``: lists of keys. A file with a key of each list belongs to the program.
* ``names``: the program's names for transformers' keys.
* ``defaults``: the values that its code assumes for absent keys.
* ``laws``: for each law, the names of its numbers in the file (empty if the program does not read
  them), the values that its code assumes for absent numbers, and phasor's name of the law if that
  differs; ``when``: keys of which a file must have one for the law to apply.
* ``ignored``: keys about ropes that have no effect: they select a kernel, or belong to a law that
  is not in use.
* ``instead``: for each other type of position embedding, the positions that the model has.
* ``rotating``: the types of position embedding that rotate.
* ``classes``: facts of the program's classes, added to the facts of the class that it is ``like``:

  * ``kinds`` of its layers with the facts of each, or false for a kind that does not rotate: a
    ``base``, which is a constant in the code unless a ``base_key`` contains it, and the keys of a
    head width, of a factor that divides positions, and of the fraction of pairs, the fastest, that
    turn.
  * ``layers``: which layers are of the first kind. With a list at ``key`` they are those with the
    kind's name, the ``flag``, or else 1, and if the list goes ``beyond``, all layers after its end.
    ``counts`` is a phrase for errors, if the list may contain instead how many layers of the
    second and of the first kind alternate.
    Without a list, or with a number in its place, it is every n-th layer; if the ``switch`` is off,
    all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from phasor.files.configs.program_model import ProgramModel, read_programs, spellings
from phasor.files.configs.source import JsonObject, is_huggingface
from phasor.files.dialects import kerashub, litgpt, maxtext, megatron, tensorrt_llm, torchtune
from phasor.layers import LayerRopes

_READERS: Mapping[str, Callable[[ProgramModel], LayerRopes]] = {
    "litgpt": litgpt.read,
    "TensorRT-LLM": tensorrt_llm.read,
    "Megatron": megatron.read,
    "KerasHub": kerashub.read,
    "torchtune": torchtune.read,
    "MaxText": maxtext.read,
}


def load_program(top: JsonObject) -> LayerRopes | None:
    """The rope of each layer; None if the file is none of these programs'."""
    if is_huggingface(top):
        return None
    for program, facts in read_programs().items():
        for place in (*facts["inside"], ""):
            values = top.find(place) if place else top.values
            if not isinstance(values, Mapping):
                continue
            config = JsonObject(cast("Mapping[str, Any]", values), place, strict=top.strict)
            if is_huggingface(config):
                continue
            if all(any(map(config.has, spellings(keys))) for keys in facts["marks"]):
                model = ProgramModel(program, config, str(top.values.get("name")))
                return _READERS[program](model)
    return None
