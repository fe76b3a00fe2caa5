"""The output of commands: text on the terminal, JSON, progress, and files."""

from __future__ import annotations

import errno
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phasor.errors import BackendError, PhasorWarning, SpecError, install_hint, visible

if TYPE_CHECKING:  # rich loads more than most commands need
    from rich.progress import ProgressColumn

    from phasor.identification.report import Difference


class Screen(Console):
    """Rich's console without markup and emoji codes; unprintable characters are escaped."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        # rich renders every str here; cells in tables may have several lines
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)

    def print_line(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print one line; each part is text, or text with its style.

        On a terminal it wraps between words and keeps its indent.
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
        # do not break a list of numbers, because users copy it
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
        """Print a table from its columns; those in ``words`` hold text. ``styles`` are for rows.

        Names and numbers are never cut: if the columns do not fit, each row takes several lines.
        """
        # titles may wrap between words
        widths = [
            max(map(len, [*title.split(), *cells]), default=0) for title, cells in columns.items()
        ]
        if sum(widths) + 2 * len(widths) + 2 > self.width:
            self._print_rows(columns, styles)
            return
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        for title, width in zip(columns, widths, strict=True):
            table.add_column(title, justify="left" if title in words else "right", min_width=width)
        for cells, style in zip_longest(zip(*columns.values(), strict=True), styles):
            table.add_row(*cells, style=style)
        self.print(table)

    def _print_rows(
        self, columns: Mapping[str, Sequence[str]], styles: Sequence[str | None]
    ) -> None:
        """Print each row of a table as several lines under its first cell."""
        _, *titles = columns
        longest = max(map(len, titles))
        for (name, *cells), style in zip_longest(zip(*columns.values(), strict=True), styles):
            self.print_line(f"  {name}", style=style or "bold")
            for title, cell in zip(titles, cells, strict=True):
                self.print_line(f"    {title:<{longest}}  {cell}", style=style or "")

    def on_broken_pipe(self) -> None:
        # this runs in an except block; rich itself would exit with status 1
        raise


def exit_with(difference: Difference, *, as_json: bool) -> NoReturn:
    """Print a difference, its first line as a title, and exit with 1 if there is one."""
    if as_json:
        print_json(difference.as_plain())
    else:
        screen, (title, *rest) = Screen(), difference.lines()
        screen.print_line((title, "bold"))
        screen.print_lines(rest)
    raise click.exceptions.Exit(1 if difference else 0)


def print_warning(message: str) -> None:
    """Print a warning as a line on stderr."""
    Screen(stderr=True).print_line(f"phasor: warning: {message}")


@contextmanager
def warnings_to(show_message: Callable[[str], None]) -> Generator[None]:
    """Pass each of phasor's warnings to ``show_message``, without the line of code."""
    with warnings.catch_warnings():
        show_with_code = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *code: Any) -> None:
            if issubclass(category, PhasorWarning):
                show_message(str(message))
            else:
                show_with_code(message, category, *code)

        warnings.showwarning = show
        yield


@contextmanager
def progress_bar(
    title: str, *columns: str | ProgressColumn
) -> Generator[Callable[[int, int], None]]:
    """A progress bar on a terminal's stderr; yields ``update(done, total)``."""
    from rich.progress import Progress

    screen = Screen(stderr=True)
    if not screen.is_terminal:  # rich before 15 prints an empty line for a bar that is not shown
        yield lambda completed, total: None
        return
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda completed, total: progress.update(task, completed=completed, total=total)


def print_json(plain: Any) -> None:
    """Print JSON values, with non-ASCII characters escaped."""
    click.echo(json.dumps(plain, indent=2))


def require_modules(feature: str, extra: str, *modules: str) -> None:
    """Raise an error that names the extra to install if one of its ``modules`` is missing."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise BackendError(
            f"{feature} needs {', '.join(missing)}, not installed: {install_hint(extra)}"
        )


def resolve_output(path: Path) -> Path:
    """``path`` with symlinks resolved, after a check that it can be written or replaced."""
    try:
        file = path.resolve()
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise SpecError(
                f"{path} must be a file or not exist, but is a device, a pipe or a folder"
            )
        if not os.access(file.parent, os.W_OK):
            number = errno.EACCES if file.parent.is_dir() else errno.ENOENT
            raise OSError(number, os.strerror(number))
    except (OSError, RuntimeError) as error:  # RuntimeError: symlinks in a circle
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{path} cannot be written: {reason}") from None
    return file


def write_file(path: Path, text: str) -> None:
    """Write a file completely or not at all; an existing file is replaced."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("x", encoding="utf-8", errors="xmlcharrefreplace") as stream:
            stream.write(text)
        part.replace(path)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
