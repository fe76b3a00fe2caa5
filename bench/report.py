"""The Markdown that the documentation includes, from results as they were written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Section(NamedTuple):
    """A table, and what stands around it; left out are empty parts, and all if it has no rows."""

    title: str = ""
    note: str = ""
    titles: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    after: str = ""

    def parts(self) -> tuple[str, ...]:
        """Paragraphs and the table."""
        if self.titles and not self.rows:
            return ()
        title = f"### {self.title}" if self.title else ""
        return title, self.note, table(self.titles, self.rows), self.after


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, all columns but the first of which stand right."""
    if not titles:
        return ""
    marks = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (titles, marks, *rows))


def markdown(results: Mapping[str, Any], sections: Iterable[Section]) -> str:
    """A page: when, where and with what it was measured, its sections, and what failed."""
    named = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    parts = [
        f"Measured {results['date']} at commit {results['commit']}, on {results['machine']}, "
        f"Python {results['python']}; {named}.",
        "" if results["whole"] else "This was a run of some of the cases.",
        *(part for section in sections for part in section.parts()),
    ]
    parts += [f"{what} failed: {reason}" for what, reason in results["failed"].items()]
    return "\n\n".join(filter(None, parts)) + "\n"
