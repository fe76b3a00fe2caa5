"""The files of ``bench/``, which are scripts and no package, as a fixture of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def files_of_bench(*names: str) -> Any:
    """A fixture: the named files, imported as the scripts do and forgotten again."""

    @pytest.fixture
    def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
        monkeypatch.syspath_prepend(str(ROOT / "bench"))
        yield {name: __import__(name) for name in names}
        for name in names:
            sys.modules.pop(name, None)

    return modules
