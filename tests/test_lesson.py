"""The lesson as a notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from docs import notebook

DOCS = Path(__file__).parent.parent / "docs"


PAGE = (DOCS / "lesson.md").read_text("utf-8")
NOTEBOOK = nbformat.read(DOCS / "lesson.ipynb", 4)


def drawn(notebook: nbformat.NotebookNode) -> int:
    """The number of pictures in its outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/svg+xml" in output.get("data", {}) for output in outputs)


@pytest.mark.report
def test_the_notebook_runs_and_draws_every_picture_of_the_page() -> None:
    """In a kernel of its own, in a folder without the pictures."""
    made = notebook.run(notebook.from_page(PAGE))
    assert drawn(made) == PAGE.count("](images/lesson-") == PAGE.count("\nchart = ")


def test_the_notebook_is_the_page_with_its_outputs() -> None:
    """``python -m docs.notebook`` writes it: every cell was run, in order."""
    cells = [(cell.cell_type, cell.source) for cell in NOTEBOOK.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in notebook.from_page(PAGE).cells]
    counts = [cell.execution_count for cell in NOTEBOOK.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert drawn(NOTEBOOK) == PAGE.count("](images/lesson-")


def test_the_notebook_refers_to_nothing_beside_it() -> None:
    """It is downloaded alone: no picture, no link to another page."""
    words = "".join(cell.source for cell in NOTEBOOK.cells if cell.cell_type == "markdown")
    assert "](https://" in words
    assert "](images" not in words
    assert ".md)" not in words
    assert ".ipynb" not in words


def test_the_trained_model_of_the_lesson_is_the_measured_one() -> None:
    """Shares of the pairs in previous-token heads and in all others, in thousandths."""
    results = DOCS.parent / "examples" / "papers" / "results" / "live_model.json"
    measured = json.loads(results.read_text("utf-8"))["measured"]
    lengths = np.array(measured["usage"]["queries"])  # [layers, heads, num_pairs]
    shares = 1000 * lengths / lengths.sum(-1, keepdims=True)
    texts = [one["previous"] for name, one in measured.items() if name.startswith("heads/2048")]
    previous = np.mean(texts, 0) > 0.4  # [layers, heads]
    page = (DOCS / "lesson.md").read_text("utf-8")
    for name, heads in (("previous_token_heads", previous), ("all_others", ~previous)):
        (shown,) = re.findall(rf"^{name} = (\[[^]]*\])", page, re.M)
        assert json.loads(re.sub(r",\s*\]", "]", shown)) == shares[heads].mean(0).round().tolist()
    assert previous.sum() == 5
    assert "Five heads" in page
    sinks = [one["sink"] for name, one in measured.items() if name.startswith("heads/2048")]
    assert 0.23 < (np.mean(sinks, 0) > 0.5).mean() < 0.28
    assert "a quarter of all heads" in page
