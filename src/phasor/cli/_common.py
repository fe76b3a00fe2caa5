"""What several commands share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from phasor.configs import load
from phasor.errors import BackendError, SpecError
from phasor.layers import LayerRopes
from phasor.presets import preset, preset_names

at_option = click.option(
    "--at",
    "seq_len",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Sequence length at which a rule (dynamic NTK, LongRoPE) picks its law.",
)


def need_torch(what: str) -> None:
    """Say what to install where there is no PyTorch."""
    if find_spec("torch") is None:
        raise BackendError(
            f"{what} rotates with PyTorch, which is not installed: pip install 'phasor[torch]'"
        )


def read(model: str) -> LayerRopes:
    """The model that a preset's name or a path stands for."""
    is_path = Path(model).exists() or "/" in model or model.endswith(".json")
    if is_path and model not in preset_names():
        return load(model)
    try:
        return preset(model)
    except SpecError as error:
        raise SpecError(
            f"no file or folder is called {model!r}, and as a preset: {error}"
        ) from None
