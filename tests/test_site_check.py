"""The check of the built pages finds what it is there to find."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tools.browser import BROWSER
from tools.site_check import look_at_all, pages_of, serve

pytestmark = [
    pytest.mark.report,
    pytest.mark.skipif(
        BROWSER is None and not os.environ.get("CI"), reason="no Chromium in the search path"
    ),
]

PAGE = """<!doctype html><meta charset=utf-8><link rel=icon href="data:,">
<style>body {{ margin: 0 }} code {{ display: block; overflow-x: auto }}</style>
<div class=md-nav--primary><nav><a class="md-nav__link--active">A page</a></nav></div>
<article><h1>A page</h1><p>Words.</p>{}</article>"""
SMALL = """<svg xmlns="http://www.w3.org/2000/svg" width="800" height="9">
<text font-size="12">a</text></svg>"""

FAULTS = {
    f"<pre><code>{'x' * 200}</code></pre>": (
        "390: scrolls without an edge",
        "1280: cut: code",
        "1280: scrolls without an edge",
    ),
    "<p style='width: 1400px'>Wide</p>": ("390: the page goes", "390: beyond", "1280: the page"),
    "<p style='color: #aaa'>Pale</p>": ("390: contrast 2.32", "1280: contrast 2.32"),
    "<img src=picture.svg width=300>": ("390: labels of picture.svg are 4.5 px",),
    "<p>" + "word " * 1_801: ("1804 words, 1800",),
    "<script>console.log('heard')</script>": ("heard",),
    "<script>nothing.here</script>": ("nothing is not defined",),
    "<img src='https://phasor.invalid/x.png'>": ("https://phasor.invalid",),
    "<script>document.querySelector('h1').textContent = 'B'</script>": ("is 'B', and 'A page' in",),
    "<p>Nothing else.</p>": (),
}


def test_every_fault_is_found(tmp_path: Path) -> None:
    """Each on a page of its own, and none where there is none."""
    for number, body in enumerate(FAULTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "index.html").write_text(PAGE.format(body), "utf-8")
        (folder / "picture.svg").write_text(SMALL, "utf-8")
    with serve(tmp_path) as root:
        seen = {page.path: page.faults for page in look_at_all(root, pages_of(tmp_path))}
    assert len(seen) == len(FAULTS)
    for number, expected in enumerate(FAULTS.values()):
        faults = seen[f"{number}/"]
        assert [one for one in expected if not any(one in fault for fault in faults)] == []
        assert bool(faults) == bool(expected), faults
