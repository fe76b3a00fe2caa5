"""Importing phasor loads neither torch nor JAX nor MLX nor altair nor rich."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import phasor

SRC = Path(phasor.__file__).parent
HEAVY = ("torch", "jax", "mlx", "rich", "altair", "vl_convert", "jinja2")
# the modules whose job one of them is; nothing light imports these
HEAVY_MODULES = {"torch", "jax", "mlx", "charts", "cli"}
# importing `phasor.__main__` runs the command line
NEVER_IMPORTED = {"__main__"}

PROBE = """
import importlib, sys
heavy, names = sys.argv[1].split(), sys.argv[2:]
for name in names:
    importlib.import_module(name)
    loaded = [one for one in heavy if one in sys.modules]
    if loaded:
        sys.exit(f"{name} imports {', '.join(loaded)}")
"""


def light_modules() -> list[str]:
    """Every module of phasor that must stay light, the package first."""
    found = ["phasor"]
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and not {parts[0], ".".join(parts)} & (HEAVY_MODULES | NEVER_IMPORTED):
            found.append(".".join(("phasor", *parts)))
    return found


def imported_alone(names: Iterable[str], *path: Path) -> str:
    """What a fresh interpreter says when it imports ``names`` in turn; "" when all are light."""
    there = os.pathsep.join(str(place) for place in (*path, SRC.parent))
    process = subprocess.run(
        [sys.executable, "-c", PROBE, " ".join(HEAVY), *names],
        env={**os.environ, "PYTHONPATH": there},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return process.stderr.strip()


@pytest.mark.processes
def test_phasor_and_its_core_are_light() -> None:
    """Module by module, in one fresh interpreter."""
    names = light_modules()
    assert {"phasor", "phasor.numpy", "phasor.scaling.laws", "phasor.positions"} <= set(names)
    assert imported_alone(names) == ""


@pytest.mark.parametrize("heavy", HEAVY)
@pytest.mark.parametrize("late", [False, True], ids=["plain", "through-another-module"])
@pytest.mark.processes
def test_a_planted_import_is_caught(tmp_path: Path, heavy: str, late: bool) -> None:
    """A stand-in for the heavy package is enough, so the check itself stays cheap."""
    (tmp_path / f"{heavy}.py").write_text("", "utf-8")
    (tmp_path / "spoilt.py").write_text(f"import {heavy}\n", "utf-8")
    (tmp_path / "around.py").write_text("import spoilt\n", "utf-8")
    name = "around" if late else "spoilt"
    assert imported_alone(["json", name], tmp_path) == f"{name} imports {heavy}"


@pytest.mark.processes
def test_the_torch_package_does_not_load_the_compiler() -> None:
    """Torch leaves Dynamo out until it is used, and that takes longer than all the rest."""
    probe = "import sys, phasor.torch; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False, timeout=60).returncode == 0


@pytest.mark.processes
def test_a_module_that_cannot_be_imported_is_not_light(tmp_path: Path) -> None:
    """A broken import must not pass for a light one."""
    assert "ModuleNotFoundError" in imported_alone(["phasor.no_such_module"], tmp_path)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("rotate", "phasor.torch.rotate"),
        ("RotaryEmbedding", "phasor.torch.RotaryEmbedding"),
        ("Yarn", "phasor.scaling.Yarn"),
        ("Axial", "phasor.axes.Axial"),
    ],
)
def test_a_name_looked_for_at_the_top_is_found_by_its_error(name: str, place: str) -> None:
    """Those that people try first."""
    with pytest.raises(
        AttributeError, match=f"^module 'phasor' has no attribute '{name}'.*{place}"
    ):
        getattr(phasor, name)
    module, _, last = place.rpartition(".")
    assert hasattr(importlib.import_module(module), last)
    assert not hasattr(phasor, name)


def test_an_import_of_such_a_name_says_the_way_too() -> None:
    """Python's own words would name the package alone."""
    with pytest.raises(ImportError, match=r"from phasor\.torch import rotate_qk$"):
        exec("from phasor import rotate_qk")  # a type checker would refuse the statement


@pytest.mark.parametrize("extra", ["torch", "jax", "mlx"])
def test_an_extra_that_is_not_installed_is_named_with_its_command(
    extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None in ``sys.modules`` is how Python marks a module as absent."""
    for name in [name for name in sys.modules if name.startswith(f"phasor.{extra}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"pip install 'phasor-rope[{extra}]'")):
        importlib.import_module(f"phasor.{extra}")
