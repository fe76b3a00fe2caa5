"""Files of programs that train or serve, each with a dialect: which file is whose.

The facts of a program are in the table of its dialect, whose sources stand at its top. They are:

* ``program``: what it is called.
* ``inside``: the keys of objects that a file may have the model's in.
* ``marks``: a file is the program's if it has a key of each list.
* ``names``: what the program calls a key of ours.
* ``defaults``: what its code assumes for an absent key.
* ``laws``: for a law, its numbers' names in the file (none if the program reads none), what its
  code assumes for absent ones, and the law that it is, where that has another name; ``when`` a file
  has one of some keys, else always.
* ``ignored``: keys about ropes that change nothing: they choose a kernel, or are of a law that is
  not in use.
* ``instead``: what a model has instead of a rotation, by the word for its position embedding.
* ``rotating``: its other types, which rotate.
* ``classes``: other or further facts of a class of the program, added to those of the class that
  it is ``like``:

  * ``kinds`` of its layers, and what is a kind's own, false where it does not rotate: a ``base``,
    which stands in the code where no ``base_key`` says it, and the keys of a width of heads, of a
    factor that divides positions, and of the fraction of pairs, the fastest, that turn.
  * ``layers``: which are of the first kind: those with its name in the list at ``key``, or with the
    ``flag``, or else 1; after a list that goes ``beyond`` all are. ``counts`` is what else it may
    hold: how many of the second kind and of the first come in turn. Without a list, or where it is
    a number, every so many; all if the ``switch`` is off.
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
            found = JsonObject(cast("Mapping[str, Any]", values), place, strict=top.strict)
            if is_huggingface(found):
                continue
            if all(any(map(found.has, spellings(keys))) for keys in facts["marks"]):
                model = ProgramModel(program, found, str(top.values.get("name")))
                return _READERS[program](model)
    return None
