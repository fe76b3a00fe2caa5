"""A page as a Jupyter notebook, for people who would rather run it."""

import re

import jupytext

# pictures, the link to the notebook, and the fold around what draws
_NOT_THERE = re.compile(
    r"^(!\[[^\]]*\]\([^)]*\)|\[[^\]]*\]\([^)]*\.ipynb\)\.|</?(details|summary).*)\n+",
    re.M,
)
_LINK_INSIDE = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")
_CHART_AT_THE_END = re.compile(r"^chart = ", re.M)


def from_page(text: str) -> str:
    """The notebook, as JSON, of a page's text: its charts are drawn in place of their pictures.

    Links to other pages become plain words, since a notebook lies by itself.
    """
    words = _LINK_INSIDE.sub(r"\1", _NOT_THERE.sub("", text))
    notebook = jupytext.reads(words, "md")
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and _CHART_AT_THE_END.search(cell.source):
            cell.source += "\nchart"
        cell.id = f"cell-{index}"  # otherwise random, and another file in every build
    notebook.metadata["kernelspec"] = {
        "name": "python3", "display_name": "Python 3", "language": "python",
    }  # fmt: skip
    return jupytext.writes(notebook, "ipynb")
