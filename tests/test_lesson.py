"""The lesson as a notebook."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import nbclient
import nbformat
import numpy as np
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
    assert previous.sum() == 6
    assert "Six heads" in page
    sinks = [one["sink"] for name, one in measured.items() if name.startswith("heads/2048")]
    assert 0.23 < (np.mean(sinks, 0) > 0.5).mean() < 0.28
    assert "a quarter of all heads" in page
