"""Which parts of a model are meant, and what to say of those that are not understood."""

from __future__ import annotations

from typing import Any

from torch import nn

from phasor._checks import shown
from phasor.configs import NESTED
from phasor.errors import ConfigError
from phasor.torch.transformers._live import Live, read
from phasor.torch.transformers._members import parts


def check_model(model: object) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, such as a model of transformers or a part of one, "
            f"got {shown(model)}"
        )


def read_parts(model: nn.Module, part: str | None, verb: str) -> list[Live]:
    """What the part of that name, and the parts inside it, rotate with; all of the model if None.

    Args:
        model: The whole model.
        part: As in `phasor.torch.transformers.patch`.
        verb: What the caller is called, for the call that works where this one does not.

    Raises:
        ConfigError: If there is no such part, or one of them is not understood.
    """
    there = parts(model)
    asked = [name for name in there if part is None or name == part or name.startswith(f"{part}.")]
    if not asked:
        raise ConfigError(f"part must be one of {_named(there)} in this model, got {shown(part)}")
    understood: list[Live] = []
    refused: list[ConfigError] = []
    for name in asked:
        try:
            understood.append(read(name, there[name]))
        except ConfigError as error:
            refused.append(error)
    if refused:
        calls = " or ".join(f'{verb}(model, part="{live.part}")' for live in understood)
        way_out = f", and for the other parts {calls} works" if calls else ""
        raise ConfigError(f"{refused[0]}; nothing was changed{way_out}")
    return understood


def language_part(model: nn.Module) -> str:
    """The part of a model that is its language model, or the only one.

    Raises:
        ConfigError: If there are several and it cannot be told which.
    """
    there = parts(model)
    languages = [name for name in there if all(key in NESTED for key in name.split(".") if key)]
    if len(there) == 1 or languages:
        return max(languages, key=len) if languages else next(iter(there))
    raise ConfigError(f"part must say which of {_named(there)} is meant")


def _named(there: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in there)
