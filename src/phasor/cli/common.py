"""What several commands share: options, reading a model, and the way to the terminal."""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.text import Text

import phasor
from phasor.errors import BackendError, PhasorWarning, SpecError, install_hint, visible
from phasor.layers import LayerRopes
from phasor.presets import preset, preset_names

STDIN = "-"


class _Model(click.ParamType[str]):
    """A preset's name, a path, or a dash; a shell completes the first two."""

    name = "model"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        named = [CompletionItem(one) for one in preset_names() if one.startswith(incomplete)]
        return named or [CompletionItem(incomplete, type="file")]


MODEL = _Model()
token_counts = click.IntRange(1, 2**63 - 1)
# a function is asked about a matrix of this width at many positions: here, some gigabytes
function_widths = click.IntRange(2, 4096)
at_option = click.option(
    "--at",
    "seq_len",
    type=token_counts,
    metavar="TOKENS",
    help="Sequence length at which a rule (dynamic NTK, LongRoPE) picks its law.",
)


trained_option = click.option(
    "--context",
    type=click.IntRange(2),
    metavar="TOKENS",
    help="Tokens of the training; the model's own context unless given.",
)

_READING = (
    click.option(
        "--part", metavar="KEY", help="Config inside the file that is meant, as vision_config."
    ),
    click.option("--like", metavar="TYPE", help="Read an unknown model type as this known one."),
    click.option(
        "--lenient", is_flag=True, help="Leave aside keys that the model's class does not read."
    ),
)


def reading_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say how a config file is read, given as one argument ``reading``."""

    @wraps(command)
    def take(*args: Any, part: str | None, like: str | None, lenient: bool, **rest: Any) -> None:
        reading = {"part": part, "like": like, "strict": not lenient}
        command(*args, reading=reading, **rest)

    for option in reversed(_READING):
        take = option(take)
    return take


def say(text: str = "", *, err: bool = False) -> None:
    """Print one line, whatever a file had to say in it."""
    click.echo(visible(text), err=err)


def say_json(plain: Any) -> None:
    """Print JSON values; what is not ASCII is escaped."""
    click.echo(json.dumps(plain, indent=2))


def need_torch(what: str) -> None:
    """Say what to install where there is no PyTorch."""
    if find_spec("torch") is None:
        raise BackendError(
            f"{what} rotates with PyTorch, which is not installed: {install_hint('torch')}"
        )


def need(what: str, extra: str, *modules: str) -> None:
    """Say which extra of phasor to install where one of its ``modules`` is missing."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise BackendError(
            f"{what} is made with {', '.join(missing)}, not installed: {install_hint(extra)}"
        )


def output_file(path: Path) -> Path:
    """The file that ``path`` leads to, which can be written or replaced; symlinks are followed."""
    try:
        file = path.resolve()
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise SpecError(f"{path} must be a file or new, and is a device, a pipe or a folder")
        if not os.access(file.parent, os.W_OK):
            number = errno.EACCES if file.parent.is_dir() else errno.ENOENT
            raise OSError(number, os.strerror(number))
    except (OSError, RuntimeError) as error:  # Python says so of symlinks in a circle
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{path} cannot be written: {reason}") from None
    return file


def read(model: str, reading: Mapping[str, Any]) -> LayerRopes:
    """The model that a preset's name, a path or a dash stands for; ``reading`` is for files."""
    is_path = model == STDIN or Path(model).exists() or "/" in model or model.endswith(".json")
    if is_path and model not in preset_names():
        with warnings.catch_warnings():
            # what is assumed stands in the notes, which commands print
            warnings.simplefilter("ignore", PhasorWarning)
            return phasor.load(model, **reading)  # imports the readers of files only now
    try:
        return preset(model)
    except SpecError as error:
        # who types a command is told of a command
        said = str(error).replace("phasor.preset_names()", "`phasor presets`")
        raise SpecError(f"no file or folder is called {model!r}, and as a preset: {said}") from None


class Screen(Console):
    """Rich's console without markup and emoji codes, where every text is made `visible` first."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **how: Any) -> Text:
        # what rich is given as a string comes through here; cells of tables may have several lines
        return super().render_str("\n".join(map(visible, text.split("\n"))), **how)

    def say(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print one line, however long; a part is text, or text with its style."""
        line = Text(style=style)
        for part in parts:
            text, own = (part, "") if isinstance(part, str) else part
            line.append(visible(text), own)
        self.print(line, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        # called while the error is handled, which rich itself would turn into status 1
        raise


@contextmanager
def waiting(what: str) -> Generator[None]:
    """A sign of life on a terminal's stderr while something runs."""
    with Screen(stderr=True).status(what):
        yield


@contextmanager
def progress_bar(what: str) -> Generator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr, moved by how much is done, and of how much."""
    from rich.progress import Progress

    screen = Screen(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)
