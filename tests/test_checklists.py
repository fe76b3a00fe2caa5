"""What is new is missed nowhere: each test names the places that it needs.

Laws, model types, pairings, axes, backends, options of attention and targets.

The lists themselves, with what to write in each place, are in docs/recipes.md.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib import import_module, resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from phasor import Rope, axes, scaling
from phasor.axes import AXES, Mixed, OneAxis
from phasor.files import translation
from phasor.files.configs.facts import table
from phasor.files.translation import TARGETS, Target
from phasor.pairings import PAIRINGS
from phasor.scaling import LAWS, Law, Rule
from phasor.torch import RotaryAttention, _operator, rotate
from phasor.torch._operator import eager
from phasor.torch._operator.ops import BACKENDS

from . import oracle, strategies
from .files.configs import published_configs
from .files.translation.programs import PROGRAMS, runner_of
from .torch import attention_reference

# older entries that neither a published file nor the sizes of a class vouch for; bring a file
UNCHECKED_TYPES = {
    *("dots3_note_text", "fuyu", "param2moe", "sarvam_mla"),
    "chronos2",  # what some files of "t5" are
}
DOCS = Path(__file__).parent.parent / "docs"


def assert_nothing_is_missing(places: Mapping[str, object]) -> None:
    """Fail with a line for each place where something is, or is not, as it has to be."""
    if missing := [place for place, is_there in places.items() if not is_there]:
        pytest.fail("missing:\n" + "\n".join(missing), pytrace=False)


def page(name: str) -> str:
    """A page's text."""
    return (DOCS / name).read_text("utf-8")


def written(name: str) -> str:
    """A page, and what writes its rows."""
    return f"docs/{name}, by python -m tools.doc_tables --write {name}"


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


def test_every_law_and_class_of_axes_is_in_its_registry() -> None:
    """Without a name there it has no JSON form, and the tests below do not see it."""
    laws = concrete(scaling.laws, Law) | concrete(scaling.rules, Rule)
    classes = concrete(axes, axes.Axes)
    listed = {kind.__name__ for kind in (*LAWS.values(), *AXES.values())}
    places = {f"scaling/__init__.py REGISTRY: {law}": law in listed for law in laws}
    places |= {f"scaling/__init__.py __all__: {law}": law in scaling.__all__ for law in laws}
    places |= {f"axes.py AXES: {name}": name in listed for name in classes}
    assert_nothing_is_missing(places)


@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_in_every_place(name: str) -> None:
    """Its checks, its draws and formula, and its rows, which a tool makes of the registry."""
    law = LAWS[name]
    draws = set(re.findall(r"\w+", inspect.getsource(strategies.laws)))
    places = {
        f"scaling/laws.py _CHECKS: {one.name}": one.name in scaling.laws._CHECKS
        for one in fields(law)
    }
    places |= {
        "tests/oracle.py LAWS": not hasattr(law, "apply") or law.__name__ in oracle.LAWS,
        "tests/strategies.py laws": not hasattr(law, "apply") or law.__name__ in draws,
        written("laws.md"): f"| `{name}` |" in page("laws.md"),
        written("api/index.md"): f"`scaling.{law.__name__}`" in page("api/index.md"),
        written("api/scaling.md"): shown(law.__name__),
    }
    assert_nothing_is_missing(places)


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
    types = {
        n: f for n, f in table().huggingface.items() if not f.other_positions and not f.refused
    }
    sizes = resources.files("phasor.files.configs").joinpath("class_sizes.toml").read_text("utf-8")
    checked = {*tomllib.loads(sizes)}
    for case in published_configs.cases().values():
        checked |= {*model_types(case["config"])}
    facts = [types[name] for name in checked & types.keys()]
    unchecked = {name for name in types.keys() - checked if types[name] not in facts}
    places = {
        f"tests/files/configs/published: {name}": False for name in unchecked - UNCHECKED_TYPES
    }
    places |= {f"UNCHECKED_TYPES here, less {n}": False for n in UNCHECKED_TYPES - unchecked}
    assert_nothing_is_missing(places)


@pytest.mark.parametrize("name", AXES)
def test_a_class_of_axes_is_in_every_place(name: str) -> None:
    """How `phasor show` describes it, its draw and its rows."""
    kind = AXES[name]
    places = {
        "axes.py summary": bool(getattr(kind, "summary", "")),
        "tests/strategies.py EVERY_AXES": name in strategies.EVERY_AXES,
        "docs/conventions.md": f"`{kind.__name__}`" in page("conventions.md"),
        "docs/api/scaling.md members": shown(kind.__name__),
    }
    assert_nothing_is_missing(places)


@pytest.mark.parametrize("name", AXES)
def test_the_oracle_knows_a_class_of_axes(name: str) -> None:
    """Each axis turns some of nine pairs; a class that the oracle does not know names itself."""
    kind: Any = AXES[name]
    if kind is Mixed:
        axes: Any = Mixed(((0.3, -2.0), (0.1, 0.7), (0.0, 1.0)))
    else:
        axes = OneAxis() if kind is OneAxis else kind((3, 3, 3))  # as `identify` makes it
    pairs = 2 if kind is Mixed else 9
    rope = Rope(head_dim=2 * pairs, pairing="half", axes=axes)
    terms = np.array(oracle.terms(rope), float)
    assert terms.shape == (axes.n_axes, pairs)
    assert terms.any(axis=0).all()
    assert terms.any(axis=1).all()


def test_every_backend_is_in_the_registry() -> None:
    """A module that rotates and has no line there is never asked."""
    folder = Path(str(_operator.__file__)).parent
    names = {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__"}
    modules = [import_module(f"{_operator.__name__}.{name}") for name in names]
    able = {module.__name__ for module in modules if "run_into" in vars(module)}
    listed = {module.__name__ for module in BACKENDS.values()}
    assert_nothing_is_missing({f"ops.py BACKENDS: {one}": one in listed for one in able})


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_oracle_knows_a_pairing(pairing: str) -> None:
    """Four pairs have eight coordinates; a pairing that the oracle does not know says its name."""
    first, second = oracle.pair_places(pairing, 0, 4)
    assert sorted([*first, *second]) == list(range(8))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_in_every_place(name: str) -> None:
    """Its two functions, called as those of plain torch are, and where it is chosen."""
    module = BACKENDS[name]
    places = {
        f"{module.__name__} {function.__name__}": list(inspect.signature(function).parameters)
        == list(inspect.signature(getattr(module, function.__name__, lambda: None)).parameters)
        for function in (eager.unsupported_reason, eager.run_into)
    }
    places["torch/functional.py rotate.__doc__"] = f'``"{name}"``' in str(rotate.__doc__)
    assert_nothing_is_missing(places)


def test_every_option_of_attention_is_in_every_place() -> None:
    """A line with what it does, and a case that the tests of attention run."""
    options = list(inspect.signature(RotaryAttention).parameters)
    text = str(RotaryAttention.__doc__)
    tried = {name for given, _ in attention_reference.LAYERS.values() for name in given}
    always = {"embed_dim", "num_heads", "device", "dtype"}  # sizes of every case; where it runs
    places = {f"torch/attention.py docstring: {n}": f"\n        {n}: " in text for n in options}
    places |= {
        f"tests/torch/attention_reference.py LAYERS: {name}": name in always | tried
        for name in options
    }
    assert_nothing_is_missing(places)


def test_every_target_is_in_the_registry() -> None:
    """A file with a target that is not in ``TARGETS`` is never asked."""
    folder = Path(str(translation.__file__)).parent
    modules = [
        import_module(f"phasor.files.translation.{path.stem}") for path in folder.glob("*.py")
    ]
    found = {one.name for module in modules for one in vars(module).values()
             if isinstance(one, Target)}  # fmt: skip
    assert_nothing_is_missing(
        {f"translation/__init__.py TARGETS: {n}": n in TARGETS for n in found}
    )


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_in_every_place(name: str) -> None:
    """What runs or describes it, the requirement of the tests that is run, and its rows."""
    target = TARGETS[name]
    module, runner = runner_of(target)
    groups = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    required = {re.split(r"[^\w.-]", one)[0] for one in [*groups["peers"], *groups["test"]]
                if isinstance(one, str)}  # fmt: skip
    places = {
        f"{module.__name__} {runner}": name in PROGRAMS,
        "pyproject.toml test, or Target.package": target.checked != "run"
        or (target.package or name) in required,
        written("translate.md"): f"| `{name}` |" in page("translate.md"),
    }
    assert_nothing_is_missing(places)
