"""The numbers of torchtune's builders, by its own functions, which are called with a recorder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from phasor.files.configs.facts import inherit
from phasor.files.configs.program_model import read_programs

FACTS = read_programs()["torchtune"]
BUILDERS = FACTS["builders"]
#: What functions call the numbers of the table.
NAMES = {"rope_theta": "rope_base", "head_dim": "head_dim", "scale_factor": "scale_factor"}
SIZES = ("num_layers", "num_heads", "num_kv_heads", "embed_dim", "max_seq_len")
FOLDERS = "code_llama2 gemma gemma2 llama2 llama3 llama3_1 llama3_2 llama3_3 mistral"
FOLDERS += " phi3 phi4 qwen2 qwen2_5"


class CalledError(Exception):
    """What a recorder raises, so that no model is made."""


def modules() -> Iterator[ModuleType]:
    """Those of the release with functions that make models."""
    for folder in FOLDERS.split():
        for name in ("component_builders", "model_builders"):
            try:
                yield import_module(f"torchtune.models.{folder}._{name}")
            except ModuleNotFoundError:
                continue


def own_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Its functions, by the names that recipes have for them."""
    found = {n: f for n, f in vars(module).items() if inspect.isfunction(f)}
    return {name.removesuffix("_decoder"): function for name, function in found.items()}


def arguments(module: ModuleType, name: str, patch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """With which a function of a model calls the one that has arguments."""
    recorded: list[Mapping[str, Any]] = []

    def recorder(function: Callable[..., Any]) -> Callable[..., None]:
        def record(*args: Any, **given: Any) -> None:
            bound = inspect.signature(function).bind(*args, **given)
            bound.apply_defaults()
            if "num_kv_heads" in bound.arguments:
                recorded.append(bound.arguments)
                raise CalledError

        return record

    function = own_functions(module)[name]
    its_module = import_module(function.__module__)
    for inner, value in vars(its_module).copy().items():
        if inspect.isfunction(value) and value.__module__ != its_module.__name__:
            patch.setattr(its_module, inner, recorder(value))
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    with pytest.raises(CalledError):
        function(**{parameter.name: ["q_proj"] for parameter in needed})
    return recorded[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchtune")
def test_torchtunes_own_functions_have_the_numbers_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each builder of the release: sizes, bases, widths and factors; of others, their defaults."""
    checked = set[str]()
    for module in modules():
        for name in own_functions(module).keys() & BUILDERS.keys() - checked:
            builder = inherit(BUILDERS[name], BUILDERS)
            if "sizes" in builder:
                with monkeypatch.context() as patch:
                    found = arguments(module, name, patch)
                assert [found[size] for size in SIZES] == list(builder["sizes"]), name
            else:
                parameters = inspect.signature(own_functions(module)[name]).parameters
                found = {
                    key: p.default for key, p in parameters.items() if p.default is not p.empty
                }
                assert {*builder.get("needs", ())} <= parameters.keys() - found.keys()
            expected = {"rope_theta": FACTS["defaults"]["rope_theta"], **builder}
            for key, argument in NAMES.items():
                assert found.get(argument, expected.get(key)) == expected.get(key), (name, key)
            checked.add(name)
    later, with_images = ("llama4", "qwen3", "smollm2"), "llama3_2_vision"  # which need torchvision
    others = {name for name in BUILDERS if name.startswith((*later, with_images))}
    assert checked == {*BUILDERS} - others
