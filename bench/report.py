"""The Markdown that the documentation includes, from results as they were written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Section(NamedTuple):
    """A table of texts by row and column, and what stands around it; left out if it has no rows."""

    title: str = ""
    note: str = ""
    rows: Mapping[str, Mapping[str, str]] | None = None
    after: str = ""
    corner: str = ""  # what stands over the names of the rows

    def parts(self) -> Iterable[str]:
        """Paragraphs and the table; a dash where a row has nothing in a column."""
        if self.rows is None:
            return self.title and f"### {self.title}", self.note, self.after
        if not self.rows:
            return ()
        columns = dict.fromkeys(column for row in self.rows.values() for column in row)
        lines = [
            [self.corner, *columns],
            ["---", *["---:"] * len(columns)],
            *([name, *(row.get(c, "–") for c in columns)] for name, row in self.rows.items()),
        ]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return self.title and f"### {self.title}", self.note, table, self.after


def marked(title: str, parts: Iterable[str]) -> str:
    """Paragraphs between marks, so that a page of the documentation can include them alone."""
    text = "\n\n".join(filter(None, parts))
    name = "-".join(re.findall(r"\w+", title.lower())) or "note"
    return text and f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->"


def markdown(results: Mapping[str, Any], sections: Iterable[Section]) -> str:
    """A page: when, where and with what it was measured, its sections, and what failed."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    measured = (
        f"Measured {results['date']} at commit {results['commit']}, on {results['machine']}, "
        f"Python {results['python']}; {versions}."
    )
    parts = [
        marked("measured", [measured]),
        "" if results["whole"] else "This was a run of some of the cases.",
        *(marked(section.title, section.parts()) for section in sections),
    ]
    parts += [f"{step} failed: {reason}" for step, reason in results["failed"].items()]
    return "\n\n".join(filter(None, parts)) + "\n"
