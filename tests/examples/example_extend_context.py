"""The modules of ``examples/extend_context``, and the little they are run on."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "extend_context"
MODULES = [path.stem for path in sorted(EXAMPLE.glob("*.py")) if path.stem != "__main__"]


def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's modules, imported as the script does and forgotten again."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in MODULES:  # a script elsewhere may have a module of that name
        monkeypatch.delitem(sys.modules, name, raising=False)
    threads = torch.get_num_threads()
    yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    torch.set_num_threads(threads)  # its workers have one each
    for name in MODULES:
        sys.modules.pop(name, None)


def short(example: Any) -> Any:
    """Settings that take a second."""
    return replace(
        example.settings.QUICK,
        width=16,
        heads=1,
        hidden=16,
        first=example.settings.Training(length=16, steps=5, batch=4, rate=1e-2, warmup=1),
        longer=example.settings.Training(length=64, steps=3, batch=2, rate=1e-3, warmup=1),
        windows=5,
        scored=2,
        bin=8,
        save_every=2,
    )


def sources(folder: Path, count: int, length: int) -> Path:
    """A folder of Python files of printable bytes, no two alike."""
    drawn = random.Random(5)
    for index in range(count):
        content = bytes(drawn.choices(range(32, 127), k=length + index))
        (folder / f"m{index:02d}.py").write_bytes(content)
    return folder
