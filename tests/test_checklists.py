"""What is new is missed nowhere: each test names the places that it needs.

Laws, model types, pairings, layouts of axes, backends, options of attention and targets.

The lists themselves, with what to write in each place, are in CONTRIBUTING.md.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module, resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phasor import Rope, axes, scaling
from phasor.axes import AXES, OneAxis
from phasor.files import translation
from phasor.files.configs.facts import table
from phasor.files.configs.writing import WRITERS
from phasor.files.translation import TARGETS, Target
from phasor.identification.explaining import LAYOUTS
from phasor.identification.laws import SCANS
from phasor.pairings import PAIRINGS
from phasor.scaling import LAWS, Law, Rule
from phasor.torch import RotaryAttention, _operator, rotate
from phasor.torch._operator import eager
from phasor.torch._operator.ops import BACKENDS

from . import oracle, strategies
from .files.configs import published_configs
from .files.translation.programs import PROGRAMS
from .torch import attention_oracle, torch_oracle

# older entries that neither a published file nor the sizes of a class vouch for; bring a file
UNCHECKED_TYPES = {
    *("Emu3", "aquila", "arctic", "aria", "dots3_note_text", "emu3", "ernie4_5_vl_moe", "fuyu"),
    *("gemma4_unified", "hunyuan_vl", "jina_vlm", "nanbeige", "paddleocr_vl", "sarvam_mla"),
    *("step3_text", "step3p7"),
    "chronos2",  # what some files of "t5" are
}
DOCS = Path(__file__).parent.parent / "docs"


def page(name: str) -> str:
    """A page's text."""
    return (DOCS / name).read_text("utf-8")


def concrete(module: ModuleType, *kinds: type) -> set[str]:
    """The names of a module's public classes of these kinds that can be instantiated."""
    return {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, kinds)
        and not (name.startswith("_") or inspect.isabstract(value))
    }


def shown(name: str) -> bool:
    """Whether the reference's page of laws and axes shows this class."""
    return any(
        name in line.partition("[")[2].rstrip("]").split(", ")
        for line in page("api/scaling.md").splitlines()
    )


def test_every_law_and_layout_is_in_its_registry() -> None:
    """Without a name there it has no JSON form, and the tests below do not see it."""
    laws = concrete(scaling.laws, Law) | concrete(scaling.rules, Rule)
    missing = {
        "scaling/__init__.py LAWS": laws - {law.__name__ for law in LAWS.values()},
        "axes.py AXES": concrete(axes, axes.Axes) - {one.__name__ for one in AXES.values()},
    }
    assert {place: names for place, names in missing.items() if names} == {}


#: Laws that no ``rope_type`` says; NTK is written as its raised base instead.
WITHOUT_ROPE_TYPE = {
    "Cope", "Hope", "NTK", "NTKFixed", "NTKMixed", "NTKOld", "PartNTK", "Resonance", "SteppedNTK",
    "YarnPaper",
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_in_every_place(name: str) -> None:
    """Its checks, its formula, its writer, its search, its rows and its draw."""
    law = LAWS[name]
    places = {
        "tests/oracle.py LAWS": not hasattr(law, "apply") or law.__name__ in oracle.LAWS,
        "scaling/laws.py _CHECKS": {one.name for one in fields(law)} <= scaling.laws._CHECKS.keys(),
        "tests/strategies.py EVERY_LAW": name in strategies.EVERY_LAW,
        "configs/writing.py WRITERS, or WITHOUT_ROPE_TYPE here": (law in WRITERS)
        != (law.__name__ in WITHOUT_ROPE_TYPE),
        "identification/laws.py SCANS": name in SCANS,
        "docs/laws.md": f"[`{law.__name__}`]" in page("laws.md") and f"`{name}`" in page("laws.md"),
        "docs/api/scaling.md members": shown(law.__name__),
    }
    assert [place for place, there in places.items() if not there] == []


def model_types(value: Any) -> Iterator[str]:
    """The model types that a config states or is known by, its own and those of configs inside."""
    if isinstance(value, dict):
        if isinstance(value.get("model_type"), str):
            yield value["model_type"]
        for name, keys in table().files["marks"].items():
            if {key.partition(".")[0] for key in keys} <= value.keys():
                yield name
        for inner in value.values():
            yield from model_types(inner)


def test_a_model_type_is_checked_by_its_class_or_by_a_published_file() -> None:
    """Or it rotates as one that is; the slow tests run the classes of transformers."""
    types = {n: f for n, f in table().huggingface.items() if not f.uses and not f.refused}
    sizes = resources.files("phasor.files.configs").joinpath("class_sizes.toml").read_text("utf-8")
    checked = {*tomllib.loads(sizes)}
    for case in published_configs.cases().values():
        checked |= {*model_types(case["config"])}
    facts = [types[name] for name in checked & types.keys()]
    unchecked = {name for name in types.keys() - checked if types[name] not in facts}
    assert unchecked - UNCHECKED_TYPES == set(), "tests/files/configs/published"
    assert unchecked >= UNCHECKED_TYPES, "these are checked now"


@pytest.mark.parametrize("name", AXES)
def test_a_layout_of_axes_is_in_every_place(name: str) -> None:
    """What looks for it, how `phasor show` describes it, its draw and its rows."""
    layout = AXES[name]
    places = {
        "axes.py summary": bool(getattr(layout, "summary", "")),
        "identification/explaining.py LAYOUTS": layout is OneAxis or name in LAYOUTS,
        "tests/strategies.py EVERY_LAYOUT": name in strategies.EVERY_LAYOUT,
        "docs/conventions.md": f"`{layout.__name__}`" in page("conventions.md"),
        "docs/api/scaling.md members": shown(layout.__name__),
    }
    assert [place for place, there in places.items() if not there] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_oracles_know_a_layout_of_axes(name: str) -> None:
    """They say the same of nine pairs; one that does not know it names itself."""
    layout = LAYOUTS[name]((3, 3, 3))
    rope = Rope(head_dim=18, pairing="half", axes=layout)
    assert oracle.axis_of_pair(layout, 9) == torch_oracle.axis_of_pair(rope)


def test_every_backend_is_in_the_registry() -> None:
    """A module that rotates and has no line there is never asked."""
    folder = Path(str(_operator.__file__)).parent
    names = {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__"}
    modules = [import_module(f"{_operator.__name__}.{name}") for name in names]
    able = {module.__name__ for module in modules if "rotate_into" in vars(module)}
    assert able == {module.__name__ for module in BACKENDS.values()}, "torch/_operator/ops.py"


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_both_oracles_know_a_pairing(pairing: str) -> None:
    """They say the same of four pairs; one that does not know it says its name."""
    rope = Rope(head_dim=8, pairing="half")
    pairs = [oracle.pair_of(rope, k, pairing) for k in range(4)]
    assert pairs == list(zip(*torch_oracle.pair_places(pairing, 0, 4), strict=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_in_every_place(name: str) -> None:
    """Its two functions, called as those of plain torch are, and where it is chosen."""
    module = BACKENDS[name]
    places = {
        f"{module.__name__} {function.__name__}": list(inspect.signature(function).parameters)
        == list(inspect.signature(getattr(module, function.__name__, lambda: None)).parameters)
        for function in (eager.refusal, eager.rotate_into)
    }
    places["torch/functional.py rotate.__doc__"] = f'``"{name}"``' in str(rotate.__doc__)
    assert [place for place, there in places.items() if not there] == []


def test_every_option_of_attention_is_in_every_place() -> None:
    """A line with what it does, and a case that the tests of attention run."""
    options = list(inspect.signature(RotaryAttention).parameters)
    text = str(RotaryAttention.__doc__)
    tried = {name for given, _ in attention_oracle.LAYERS.values() for name in given}
    always = {"embed_dim", "num_heads", "device", "dtype"}  # sizes of every case; where it runs
    missing = {
        "torch/attention.py docstring": [n for n in options if f"\n        {n}: " not in text],
        "tests/torch/attention_oracle.py LAYERS": sorted({*options} - always - tried),
    }
    assert {place: names for place, names in missing.items() if names} == {}


def test_every_target_is_in_the_registry() -> None:
    """A file with a target that is not in ``TARGETS`` is never asked."""
    folder = Path(str(translation.__file__)).parent
    modules = [
        import_module(f"phasor.files.translation.{path.stem}") for path in folder.glob("*.py")
    ]
    found = {one.name for module in modules for one in vars(module).values()
             if isinstance(one, Target)}  # fmt: skip
    assert found - {*TARGETS} == set(), "translation/__init__.py TARGETS"


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_in_every_place(name: str) -> None:
    """What runs it, the requirement of the tests that is run, and its row and column."""
    target = TARGETS[name]
    groups = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    required = {re.split(r"[^\w.-]", one)[0] for one in [*groups["peers"], *groups["test"]]
                if isinstance(one, str)}  # fmt: skip
    places = {
        "tests/files/translation/programs.py PROGRAMS": name in PROGRAMS,
        "pyproject.toml test, or Target.package": target.checked == "description"
        or (target.package or name) in required,
        "docs/translate.md, by tools/translation_map.py": f"| `{name}` |" in page("translate.md"),
    }
    assert [place for place, there in places.items() if not there] == []
