"""The programs that `phasor.translate` writes for.

``PROGRAMS[target](job)`` turns the tokens of a `Job` with what was written, and returns float64
``[seq, head_dim]``: the function of the name of the target, in ``libraries.py`` for programs that
are run themselves, in ``engines.py`` for those that are described.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType

import numpy as np

from phasor.files.translation import TARGETS, Target

from . import engines, libraries
from .jobs import Job

#: Those that only the slow tests run.
IMPORT_LARGE_LIBRARIES = {"liger", "megatron", "meta", "onnx", "torchtune", "transformers"}


def runner_of(target: Target) -> tuple[ModuleType, str]:
    """The module that a target's runner is in, and its name."""
    return libraries if target.checked == "run" else engines, re.sub(r"\W", "_", target.name)


PROGRAMS: dict[str, Callable[[Job], np.ndarray]] = {
    name: getattr(*runner_of(target))
    for name, target in TARGETS.items()
    if hasattr(*runner_of(target))
}
