"""Options that several commands share, and how they select and load a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click
from click.shell_completion import CompletionItem

import phasor
from phasor.errors import PhasorWarning, SpecError
from phasor.files import LEFT_ASIDE
from phasor.files.presets import preset, preset_names
from phasor.layers import LayerRopes

# generic since click 8.4
_Int = click.ParamType[int] if TYPE_CHECKING else click.ParamType


class TokenCount(_Int):
    """A number of tokens, at least ``minimum``; k is 1024 and M is 1024 * 1024."""

    name = "tokens"
    _UNIT_SIZES: ClassVar = {"": 1, "k": 1 << 10, "m": 1 << 20}

    def __init__(self, minimum: int = 1) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        # more digits than any real count
        match = re.fullmatch(r"([0-9][0-9_]{,30})([km]?)", str(value).lower())
        count = 0 if match is None else int(match[1].replace("_", "")) * self._UNIT_SIZES[match[2]]
        if not self._minimum <= count < 1 << 63:
            self.fail(
                f"{value!r} must be a number of tokens from {self._minimum} to 2**63 - 1, such as "
                "4096, 128k (131072) or 1M (1048576).",
                param,
                ctx,
            )
        return count


def tokens_option(name: str, text: str, *, least: int = 1, **rest: Any) -> Callable[..., Any]:
    """An option that takes a number of tokens."""
    return click.option(name, type=TokenCount(least), metavar="TOKENS", help=text, **rest)


# functions are called with matrices of this width at many positions: wider ones take gigabytes
HEAD_DIM = click.IntRange(2, 4096)
seq_len_option = tokens_option(
    "--seq-len", "Sequence length at which a rule (dynamic NTK, LongRoPE) picks its law."
)
context_option = tokens_option(
    "--context", "Number of tokens in training; by default the model's context.", least=2
)
part_option = click.option(
    "--part", metavar="KEY", help="The config inside the file to read, such as vision_config."
)
like_option = click.option(
    "--like", metavar="TYPE", help="The known model type to read a file of an unknown type as."
)
strict_option = click.option(
    "--strict/--no-strict",
    default=True,
    help="--no-strict ignores keys that the model's class does not read.",
)


def takes_models(*names: str, required: bool = True) -> Callable[..., Any]:
    """Arguments that are models, and the options of `phasor.load`, passed as ``**load_options``.

    Each is the name of a preset, a path, an id on the Hub, or a dash; shells complete them.
    """

    def complete(_context: object, _parameter: object, begun: str) -> list[CompletionItem]:
        items = [CompletionItem(name) for name in preset_names() if name.startswith(begun)]
        return items or [CompletionItem(begun, type="file")]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = part_option(like_option(strict_option(command)))
        for name in reversed(names):
            command = click.argument(name, required=required, shell_complete=complete)(command)
        return command

    return decorate


@contextmanager
def left_aside_warnings() -> Generator[None]:
    """Show only the warnings of ``--no-strict``; notes repeat the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PhasorWarning)
        warnings.filterwarnings("default", LEFT_ASIDE, PhasorWarning)
        yield


def read_model(model: str, **load_options: Any) -> LayerRopes:
    """Load a preset by name, or a file by path or dash; ``load_options`` are for files."""
    is_path = model == "-" or Path(model).exists() or "/" in model or model.endswith(".json")
    if is_path and model not in preset_names():
        with left_aside_warnings():
            # imported late, because it imports the file readers
            return phasor.load(model, **load_options)
    try:
        return preset(model)
    except SpecError as error:
        # refer to the command instead of the Python function
        message = str(error).replace("phasor.preset_names()", "`phasor presets`")
        raise SpecError(f"{model!r} is not a file or folder, and as a preset: {message}") from None
