"""The lesson as a Jupyter notebook, run, for people who would rather read or change it there.

    python -m docs.notebook

writes ``docs/lesson.ipynb`` with its outputs; the site offers it as it lies there.
"""

import json
import re
import tempfile
from pathlib import Path

import jupytext
import nbclient
import nbformat

DOCS = Path(__file__).parent
# pictures, the link to the notebook, and the fold around what draws
_NOT_THERE = re.compile(
    r"^(!\[[^\]]*\]\([^)]*\)|\[[^\]]*\]\([^)]*\.ipynb\)\.|</?(details|summary).*)\n+",
    re.M,
)
_LINK_INSIDE = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")
_CHART_AT_THE_END = re.compile(r"^chart = ", re.M)
# pictures in the file itself: a viewer that runs nothing shows them
_AS_PICTURES = 'import altair\n\naltair.renderers.enable("svg")'


def from_page(text: str) -> nbformat.NotebookNode:
    """The notebook of a page's text, not run: its charts are drawn instead of their pictures.

    Links to other pages become plain words, since a notebook lies by itself.
    """
    words = _LINK_INSIDE.sub(r"\1", _NOT_THERE.sub("", text))
    notebook = jupytext.reads(words, "md")
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and _CHART_AT_THE_END.search(cell.source):
            cell.source += "\nchart"
        cell.id = (
            f"cell-{index}"  # otherwise random, and another file every time
        )
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {
                "name": "python3",
                "display_name": "Python 3",
                "language": "python",
            }
        }
    )
    return notebook


def run(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """``notebook`` with its outputs, run in a folder of its own; an error stops it."""
    notebook.cells.insert(0, nbformat.v4.new_code_cell(_AS_PICTURES))
    with tempfile.TemporaryDirectory() as folder:
        runner = nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="python3", record_timing=False
        )
        runner.resources = {"metadata": {"path": folder}}
        runner.execute()
    del notebook.cells[0]
    for count, cell in enumerate(
        (cell for cell in notebook.cells if cell.cell_type == "code"), 1
    ):
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
            # a picture is enough: no words about an object
            if "image/svg+xml" in output.get("data", {}):
                output.data = {"image/svg+xml": output.data["image/svg+xml"]}
    notebook.metadata.pop("language_info", None)  # of whoever ran it
    return notebook


def main() -> None:
    """Write the lesson's notebook."""
    notebook = run(from_page((DOCS / "lesson.md").read_text("utf-8")))
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    (DOCS / "lesson.ipynb").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
