"""The pairings are listed once, and one that is added is an error where nothing is said of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import phasor
from phasor import Rope
from phasor.describe import sentences
from phasor.errors import SpecError
from phasor.numpy import change_pairing, matrix, rotate
from phasor.pairings import PAIRINGS, opposite, slices
from phasor.papers.heads import positional_head
from phasor.torch import Rotation, rotate_
from phasor.torch import rotate as rotate_tensor
from phasor.torch._operator import cpu

SRC = Path(phasor.__file__).parent
PLACES = {  # written out: what the words mean
    "half": ([3, 4, 5, 6], [7, 8, 9, 10]),
    "interleaved": ([3, 5, 7, 9], [4, 6, 8, 10]),
}


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_slices_are_the_coordinates_of_each_pair(pairing: str) -> None:
    """Four pairs that begin at coordinate 3."""
    coordinates = list(range(16))
    assert tuple(coordinates[part] for part in slices(pairing, 4, 3)) == PLACES[pairing]


def test_the_opposite_is_the_other_one_and_back() -> None:
    """Of two pairings each is the other's."""
    assert [opposite(pairing) for pairing in PAIRINGS] == list(PAIRINGS[::-1])


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> Rope:
    """A Rope of a pairing that the spec knows and nothing else does."""
    monkeypatch.setattr("phasor.pairings.PAIRINGS", (*PAIRINGS, "thirds"))
    return Rope(head_dim=12, pairing="thirds")


@pytest.mark.parametrize("backend", ["auto", "eager", *(["cpu"] if cpu.paths() else [])])
def test_no_backend_rotates_a_pairing_that_it_does_not_know(third: Rope, backend: str) -> None:
    """Neither into new tensors nor in place, by a Rope nor by rows."""
    x = torch.ones(2, 1, 12)
    with pytest.raises(AssertionError, match="thirds"):
        rotate_tensor(x, torch.arange(2), third, backend=backend)
    with pytest.raises(AssertionError, match="thirds"):
        rotate_(x, torch.arange(2), third, backend=backend)
    with pytest.raises(AssertionError, match="thirds"):
        Rotation(torch.ones(2, 6), torch.ones(2, 6), pairing="thirds")(x, backend=backend)
    assert torch.equal(x, torch.ones(2, 1, 12))


def test_no_function_of_numpy_takes_it_for_another(third: Rope) -> None:
    """Rotations, matrices, new orders, heads and words."""
    for function in (
        lambda: rotate(np.ones(12), 1, third),
        lambda: matrix(1, third),
        lambda: change_pairing(np.ones(12), "half", "thirds"),
        lambda: positional_head(third, 1, alpha=1.0, width=12),
        lambda: sentences(third, None),
        lambda: opposite(third.pairing),
    ):
        with pytest.raises(AssertionError, match="thirds"):
            function()


FIRST = ["pairings.py", "cli/demo.py"]
THEN = sorted(
    path.relative_to(SRC).as_posix()
    for path in SRC.rglob("*.py")
    if "by_pairing(" in path.read_text("utf-8")
)


@pytest.mark.slow
def test_the_type_checker_names_every_place_that_has_to_say_something(tmp_path: Path) -> None:
    """One word more in the list, and pyright complains of `by_pairing`; with one argument more
    there, of everything that calls it.
    """
    pytest.importorskip("pyright")
    text = (SRC / "pairings.py").read_text("utf-8").replace('["half", ', '["thirds", "half", ')
    argument = text.replace("half: _T, ", "half: _T, thirds: _T, ")
    argument = argument.replace('"half":\n', '"half" | "thirds":\n')
    checked = {"word": (text, FIRST), "argument": (argument, THEN)}
    for name, (pairings, _) in checked.items():
        copy = Path(shutil.copytree(SRC, tmp_path / name / "phasor"))
        (copy / "pairings.py").write_text(pairings, "utf-8")
    # in one process, which reads the stubs of torch and NumPy once
    config = {
        "executionEnvironments": [{"root": name} for name in checked],
        "include": [f"{name}/phasor/{f}" for name, (_, files) in checked.items() for f in files],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), "utf-8")
    pyright = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    process = subprocess.run(
        [*pyright, "--project", str(tmp_path)], capture_output=True, text=True, check=False
    )
    errors = [
        Path(one["file"]).relative_to(tmp_path)
        for one in json.loads(process.stdout)["generalDiagnostics"]
        if one["severity"] == "error"
    ]
    for name, (_, files) in checked.items():
        package = Path(name, "phasor")
        found = {path.relative_to(package).as_posix() for path in errors if path.parts[0] == name}
        assert found == {*files}


@pytest.mark.parametrize(
    ("word", "pairing"),
    [
        *((word, "half") for word in ("neox", "GPT-NeoX", "rotate_half", "split")),
        *((word, "interleaved") for word in ("gptj", "GPT-J", "traditional")),
    ],
)
def test_another_programs_word_is_refused_with_the_pairing_that_it_means(
    word: str, pairing: str
) -> None:
    """A Rope, a conversion and a rotation by rows say it alike."""
    said = f"got {word!r}, which is {pairing!r}$"
    with pytest.raises(SpecError, match=f"^pairing must be 'half' or 'interleaved', {said}"):
        Rope(head_dim=8, pairing=word)
    with pytest.raises(SpecError, match=said):
        change_pairing(np.zeros(8), word, "half")
    with pytest.raises(SpecError, match=said):
        Rotation(torch.ones(1, 4), torch.zeros(1, 4), pairing=word)(torch.zeros(1, 1, 8))


@pytest.mark.parametrize("word", ["llama", "", "rotate", "HALF", None, 1])
def test_a_word_that_may_mean_either_is_refused_without_a_guess(word: object) -> None:
    """Llama's is one in Meta's code and the other in transformers."""
    with pytest.raises(SpecError, match=r"^pairing must be 'half' or 'interleaved', got [^,]*$"):
        Rope(head_dim=8, pairing=word)
