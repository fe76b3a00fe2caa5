"""The lesson as a notebook."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbclient
import nbformat
import pytest

DOCS = Path(__file__).parent.parent / "docs"


def make_notebook() -> nbformat.NotebookNode:
    """The lesson as the site offers it."""
    spec = importlib.util.spec_from_file_location("notebook_of_a_page", DOCS / "notebook.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return nbformat.reads(module.from_page((DOCS / "lesson.md").read_text("utf-8")), 4)


@pytest.mark.report
def test_the_notebook_runs_and_draws_every_picture_of_the_page(tmp_path: Path) -> None:
    """In a kernel of its own, in a folder without the pictures."""
    notebook = make_notebook()
    runner = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")
    runner.resources = {"metadata": {"path": str(tmp_path)}}
    runner.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawn = [output for output in outputs if "text/html" in output.get("data", {})]
    page = (DOCS / "lesson.md").read_text("utf-8")
    assert len(drawn) == page.count("](images/lesson-") == page.count("\nchart = ")


def test_the_notebook_refers_to_nothing_beside_it() -> None:
    """It is downloaded alone: no picture, no link to another page."""
    words = "".join(cell.source for cell in make_notebook().cells if cell.cell_type == "markdown")
    assert "](https://" in words
    assert "](images" not in words
    assert ".md)" not in words
    assert ".ipynb" not in words
