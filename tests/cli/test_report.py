"""The command that writes a page: one whole file, or the old one."""

import os
from pathlib import Path

import pytest

from .running import run_phasor


def command(*arguments):
    """`phasor report` with these arguments."""
    return run_phasor("report", *arguments)


@pytest.mark.report
def test_the_command_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    """One whole page, its size printed, no part of one."""
    path = tmp_path / "page.html"
    path.write_text("old")
    done = command("gpt-j-6b", "-o", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{path}: {path.stat().st_size / 1e6:.1f} MB\n"
    assert path.read_text("utf-8").endswith("</html>")
    assert os.listdir(tmp_path) == ["page.html"]  # noqa: PTH208


@pytest.mark.report
def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    """A disk that fails half-way: exit code 2, the old file, no rest."""
    path = tmp_path / "page.html"
    path.write_text("old")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    done = command("gpt-j-6b", "-o", path)
    assert done.returncode == 2
    assert "cannot be written: No space left on device" in done.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]  # noqa: PTH208


def test_a_missing_folder_is_said(tmp_path):
    """One line, exit code 2."""
    done = command("gpt-j-6b", "-o", tmp_path / "none" / "page.html")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No such file or directory" in done.stderr


def test_the_missing_extra_is_named(tmp_path, monkeypatch):
    """Without the plotting library the command says what to install."""
    monkeypatch.setattr("phasor.cli.output.find_spec", lambda name: name != "altair" or None)
    done = command("gpt-j-6b", "-o", tmp_path / "page.html")
    assert done.returncode == 2
    assert "pip install 'phasor-rope[charts]'" in done.stderr


@pytest.mark.report
def test_a_report_goes_where_a_symlink_leads(tmp_path):
    """The link stays a link."""
    (tmp_path / "folder").mkdir()
    real, link = tmp_path / "folder" / "real.html", tmp_path / "link.html"
    real.write_text("old")
    link.symlink_to(real)
    done = command("gpt-j-6b", "-o", link)
    assert (done.returncode, done.stderr) == (0, "")
    assert link.is_symlink()
    assert real.read_text("utf-8").endswith("</html>")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "link.html", "real.html"]


def leading(tmp_path, what):
    """A path that leads to something that is no file."""
    path = tmp_path / "page.html"
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    elif what == "a circle of links":
        path.symlink_to(tmp_path / "other.html")
        (tmp_path / "other.html").symlink_to(path)
    else:
        return tmp_path / "none" / "page.html"
    return path


OUTPUTS = ["a pipe", "a link to a pipe", "a circle of links", "no folder"]


@pytest.mark.parametrize("what", OUTPUTS)
def test_a_report_replaces_nothing_but_files(tmp_path, monkeypatch, what):
    """What stood there stands there still, and the reason is said before the work."""
    path = leading(tmp_path, what)
    before = {one: one.lstat().st_mode for one in tmp_path.iterdir()}
    monkeypatch.setattr("phasor.charts.report", None)
    done = command("gpt-j-6b", "-o", path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"phasor: {path} ")
    assert {one: one.lstat().st_mode for one in tmp_path.iterdir()} == before
