"""Shared by the commands: options, reading a model, printing, progress."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import click
from click.shell_completion import CompletionItem
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import phasor
from phasor.errors import BackendError, PhasorWarning, SpecError, install_hint, visible
from phasor.files.presets import preset, preset_names
from phasor.layers import LayerRopes

if TYPE_CHECKING:  # which loads more than most commands need
    from phasor.identification.report import Difference

STDIN = "-"


class TokenCount(click.ParamType[int]):
    """A number of tokens from ``minimum`` on: whole, or with k (1024) or M (1024 * 1024)."""

    name = "tokens"
    _UNIT_SIZES: ClassVar = {"": 1, "k": 1 << 10, "m": 1 << 20}

    def __init__(self, minimum: int = 1) -> None:
        self._minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        # no more digits than any count has
        match = re.fullmatch(r"([0-9][0-9_]{,30})([km]?)", str(value).lower())
        count = 0 if match is None else int(match[1].replace("_", "")) * self._UNIT_SIZES[match[2]]
        if not self._minimum <= count < 1 << 63:
            self.fail(
                f"{value!r} is no number of tokens from {self._minimum} to 2**63 - 1, such as "
                "4096, 128k (131072) or 1M (1048576).",
                param,
                ctx,
            )
        return count


def model_argument(name: str = "model", *, required: bool = True) -> Callable[..., Any]:
    """A preset's name, a path, an id of the Hub, or a dash; shells complete names and paths."""

    def complete(_context: object, _parameter: object, begun: str) -> list[CompletionItem]:
        names = [CompletionItem(known) for known in preset_names() if known.startswith(begun)]
        return names or [CompletionItem(begun, type="file")]

    return click.argument(name, required=required, shell_complete=complete)


def tokens_option(name: str, says: str, *, least: int = 1, **rest: Any) -> Callable[..., Any]:
    """An option that takes a number of tokens."""
    return click.option(name, type=TokenCount(least), metavar="TOKENS", help=says, **rest)


# functions are called with a matrix of this width at many positions: wider ones take gigabytes
function_widths = click.IntRange(2, 4096)
seq_len_option = tokens_option(
    "--seq-len", "Sequence length at which a rule (dynamic NTK, LongRoPE) picks its law."
)
context_option = tokens_option(
    "--context", "Tokens of the training; the model's own context unless given.", least=2
)
part_option = click.option(
    "--part", metavar="KEY", help="Config inside the file that is meant, as vision_config."
)
like_option = click.option(
    "--like", metavar="TYPE", help="Read an unknown model type as this known one."
)
strict_option = click.option(
    "--strict/--no-strict",
    default=True,
    help="--no-strict leaves aside keys that the model's class does not read.",
)


def add_load_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `phasor.load`, which a command takes as ``**load_options``."""
    return part_option(like_option(strict_option(command)))


def print_json(plain: Any) -> None:
    """Print JSON values, with non-ASCII characters escaped."""
    click.echo(json.dumps(plain, indent=2))


def require_modules(feature: str, extra: str, *modules: str) -> None:
    """Raise an error that names the extra to install if one of its ``modules`` is missing."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise BackendError(
            f"{feature} is made with {', '.join(missing)}, not installed: {install_hint(extra)}"
        )


def resolve_output(path: Path) -> Path:
    """``path`` with symlinks resolved, after a check that it can be written or replaced."""
    try:
        file = path.resolve()
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise SpecError(f"{path} must be a file or new, and is a device, a pipe or a folder")
        if not os.access(file.parent, os.W_OK):
            number = errno.EACCES if file.parent.is_dir() else errno.ENOENT
            raise OSError(number, os.strerror(number))
    except (OSError, RuntimeError) as error:  # RuntimeError: symlinks in a circle
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{path} cannot be written: {reason}") from None
    return file


def write_file(path: Path, text: str) -> None:
    """Write a whole file or nothing; an existing file is replaced."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="utf-8", errors="xmlcharrefreplace") as stream:
            stream.write(text)
        part.replace(path)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def read_model(model: str, **load_options: Any) -> LayerRopes:
    """Load a preset by name, or a file by path or dash; ``load_options`` are for files."""
    is_path = model == STDIN or Path(model).exists() or "/" in model or model.endswith(".json")
    if is_path and model not in preset_names():
        with warnings.catch_warnings():
            # commands print the notes, which say the same
            warnings.simplefilter("ignore", PhasorWarning)
            return phasor.load(model, **load_options)  # imports the readers of files only now
    try:
        return preset(model)
    except SpecError as error:
        # name the command instead of the Python function
        message = str(error).replace("phasor.preset_names()", "`phasor presets`")
        raise SpecError(
            f"no file or folder is called {model!r}, and as a preset: {message}"
        ) from None


class Screen(Console):
    """Rich's console without markup and emoji codes; unprintable characters are escaped."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        # rich renders every str here; cells of tables may have several lines
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)

    def print_line(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print one line; a part is text, or text with its style.

        On a terminal it is broken between words, with the indent of its first row.
        """
        line = Text(style=style)
        for part in parts:
            text, text_style = (part, "") if isinstance(part, str) else part
            line.append(visible(text), text_style)
        if not self.is_terminal or len(line) <= self.width:
            self.print(line, soft_wrap=True)
            return
        indent = len(line.plain) - len(line.plain.lstrip())
        starts, start = list[int](), indent
        # a list of numbers is one word, as it may be copied
        for word in re.finditer(r"(?:[\[(][-+.,\de ]*[\])]|\S)+", line.plain):
            if word.start() > start and word.end() - start > self.width - indent:
                start = word.start()
                starts.append(start)
        for row in line[indent:].divide([start - indent for start in starts]):
            row.rstrip()
            self.print(Text(" " * indent) + row, soft_wrap=True)

    def print_lines(self, lines: Iterable[str], indent: str = "") -> None:
        """Print several lines."""
        for line in lines:
            self.print_line(indent + line)

    def print_table(
        self,
        columns: Mapping[str, Sequence[str]],
        *,
        words: Collection[str] = (),
        styles: Sequence[str | None] = (),
    ) -> None:
        """Print a table by its columns of numbers, or ``words``, in the styles of its rows."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        for title in columns:
            table.add_column(title, justify="left" if title in words else "right")
        for cells, style in zip_longest(zip(*columns.values(), strict=True), styles):
            table.add_row(*cells, style=style)
        self.print(table)

    def on_broken_pipe(self) -> None:
        # called inside the except block; rich would exit with status 1
        raise


def exit_with(difference: Difference, *, as_json: bool) -> NoReturn:
    """Print a difference, its first line as a title, and exit with 1 if there is one."""
    if as_json:
        print_json(difference.as_plain())
    else:
        screen, (title, *rest) = Screen(), difference.lines()
        screen.print_line((title, "bold"))
        screen.print_lines(rest)
    sys.exit(1 if difference else 0)


@contextmanager
def progress_bar(title: str) -> Generator[Callable[[int, int], None]]:
    """A progress bar on a terminal's stderr; yields ``update(done, total)``."""
    from rich.progress import Progress

    screen = Screen(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda completed, total: progress.update(task, completed=completed, total=total)
