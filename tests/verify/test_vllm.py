"""The plug-in of vLLM, on a loader that is called as vLLM's is.

What ran in vLLM itself, docs/verify.md says.
"""

from __future__ import annotations

import logging
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import phasor

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
LLAMA_3 = "meta-llama/Meta-Llama-3-8B"
LOADER = "vllm.model_executor.model_loader.base_loader"


class Rotary(torch.nn.Module):
    """Holds a table, as theirs does."""

    def __init__(self, base: float, pairs: int = 64) -> None:
        super().__init__()
        angles = torch.arange(300)[:, None] * base ** (-torch.arange(pairs).double() / pairs)
        table = torch.cat([angles.cos(), angles.sin()], -1)
        self.register_buffer("cos_sin_cache", table.float(), persistent=False)


def model_of(rotaries: list[Any]) -> torch.nn.Module:
    """A model whose layers have these."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    for rotary in rotaries:
        layer = torch.nn.Module()
        layer.rotary_emb = rotary
        model.layers.append(layer)
    return model


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Load a model after the entry point was called, and return all that was logged."""
    module: Any = ModuleType(LOADER)

    class BaseModelLoader:
        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            return model_config.made

    module.BaseModelLoader = BaseModelLoader
    monkeypatch.setitem(sys.modules, LOADER, module)
    caplog.set_level(logging.INFO)
    (group,) = PLUGINS
    (value,) = PLUGINS[group].values()
    assert group == "vllm.general_plugins"
    EntryPoint("phasor", value, group).load()()

    def load(checkpoint: str, made: torch.nn.Module) -> list[tuple[str, str]]:
        config = SimpleNamespace(model=checkpoint, made=made)
        loader = BaseModelLoader()
        assert loader.load_model(vllm_config=None, model_config=config, prefix="") is made
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    return load


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set, but for the test that takes it away."""
    monkeypatch.setenv("PHASOR_VERIFY", "1")


def test_tables_as_the_checkpoint_says(load: Any) -> None:
    """One line says so, below warnings; a table that layers share is looked at once."""
    ((level, line),) = load(LLAMA_3, model_of([Rotary(5e5)] * 32))
    assert level == "INFO"
    assert line.startswith("phasor: llama-3-8b: rotates as it should. layer 0")
    assert "\n" not in line
    assert "layer 1" not in line


def test_a_law_that_is_not_applied(load: Any) -> None:
    """The line is a warning, and names it."""
    ((level, line),) = load("meta-llama/Llama-3.1-8B", model_of([Rotary(5e5)] * 32))
    assert level == "WARNING"
    assert "Law: Llama3 is not applied" in line


def test_a_module_of_one_kind_in_layers_of_another(load: Any) -> None:
    """It is looked at once for each kind."""
    kinds = phasor.preset("gemma-3-4b").layer_kinds
    ropes = [rope for rope in phasor.preset("gemma-3-4b").kinds.values() if rope]
    local = Rotary(1e4, ropes[0].num_pairs)
    assert len(set(kinds)) == 2
    ((level, line),) = load("google/gemma-3-4b-pt", model_of([local] * len(kinds)))
    assert level == "WARNING"
    assert "1 of 2 differ" in line


@pytest.mark.parametrize(
    ("checkpoint", "made", "said"),
    [
        ("/no/such/model", model_of([Rotary(5e5)]), "/no/such/model is not verified: "),
        (LLAMA_3, model_of([torch.nn.Identity()]), "no layer of Module has a cos_sin_cache"),
        (LLAMA_3, model_of([Rotary(5e5)] + [Rotary(5e5)] * 32), "has a layer 32"),
    ],
)
def test_what_cannot_be_verified_stops_nothing(
    load: Any, checkpoint: str, made: Any, said: str
) -> None:
    """A warning says why."""
    ((level, line),) = load(checkpoint, made)
    assert level == "WARNING"
    assert said in line


def test_nothing_without_the_variable(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even an import."""
    from phasor.identification import vllm

    monkeypatch.delenv("PHASOR_VERIFY")
    monkeypatch.delitem(sys.modules, LOADER)
    vllm.register()


def test_a_vllm_that_has_moved_its_loader_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The module is absent, or has no such class; both are one warning."""
    (value,) = PLUGINS["vllm.general_plugins"].values()
    for module in (None, ModuleType(LOADER)):
        caplog.clear()
        monkeypatch.setitem(sys.modules, LOADER, module)
        EntryPoint("phasor", value, "vllm.general_plugins").load()()
        assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_loader_that_is_called_in_another_way_still_loads(load: Any) -> None:
    """By place, and without a configuration that is known."""
    loader: Any = sys.modules[LOADER]
    made = model_of([Rotary(500_000.0)])
    config = SimpleNamespace(model=LLAMA_3, made=made)
    assert loader.BaseModelLoader().load_model(None, config) is made
