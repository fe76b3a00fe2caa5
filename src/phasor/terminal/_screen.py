"""The way to the terminal: text is only text, and what colours it has come from here."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from phasor.errors import visible


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
