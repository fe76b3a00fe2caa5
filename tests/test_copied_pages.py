"""A reader who copies a page's blocks from top to bottom into a fresh process sees them run.

Other tests run the blocks too, but in a process that has imported what tests import.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^( *)```(python|console)[^\n]*\n(.*?)^\1```", re.M | re.S)
PROMPTS = (">>>", "...")


def as_python(language: str, block: str) -> str:
    """A block as a program: without prompts and results, a command as a process."""
    lines = textwrap.dedent(block).splitlines()
    if language == "console":
        commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ phasor ")]
        return "\n".join(f"run_command({command!r})" for command in commands)
    if any(line.startswith(">>> ") for line in lines):
        lines = [line[4:] for line in lines if line.startswith(PROMPTS)]
    return "\n".join(lines)


#: Commands that a page shows end with other statuses than 0 too.
BEGINNING = """\
import shlex, subprocess, sys
def run_command(command):
    _, *arguments = shlex.split(command)
    subprocess.run([sys.executable, "-m", "phasor", *arguments], stdout=subprocess.DEVNULL)
"""


def blocks_of(page: Path) -> list[str]:
    """The blocks of a page as programs; none if it has no Python."""
    blocks = BLOCK.findall(page.read_text("utf-8"))
    if all(language == "console" for _, language, _ in blocks):
        return []
    return [as_python(language, block) for _, language, block in blocks]


SOURCES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = {page.name: blocks for page in SOURCES if (blocks := blocks_of(page))}


@pytest.mark.parametrize("page", PAGES)
def test_a_copied_page_runs_in_a_fresh_process(page: str, tmp_path: Path) -> None:
    """In a folder of its own, with the repository's examples beside it."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program = tmp_path / "page.py"
    program.write_text("\n".join((BEGINNING, *PAGES[page])), "utf-8")
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
