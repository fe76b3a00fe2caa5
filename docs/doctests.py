"""Show the doctests of a docstring as code: Markdown would take ``>>>`` for a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

# from the first prompt of a run of examples to the next blank line
_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


def _fenced(match: re.Match[str]) -> str:
    return f"{match[1]}```pycon\n{match[0]}\n{match[1]}```"


class Doctests(griffe.Extension):
    """Puts a fence around every example."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)
