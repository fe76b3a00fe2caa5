"""Text that every Python brings: the sources of its standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

#: Folders left out: what is not Python's own, what need not be installed, tables of characters.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__"}
_HELD_OUT = 3  # one file in as many, of those long enough


@dataclass(frozen=True, eq=False)
class Corpus:
    """Files to train on, and windows from files that are not among them.

    Attributes:
        training: The bytes of each file.
        windows: ``[windows, length + 1]`` bytes as int64, each from a file of its own.
        files: How many files there are, held-out ones included.
        sha256: Of the names and contents of all of them, in order.
    """

    training: tuple[np.ndarray, ...]
    windows: Tensor
    files: int
    sha256: str

    def batch(self, seed: int, part: int, step: int, size: int, length: int) -> Tensor:
        """``[size, length + 1]`` bytes, drawn from all places of the training files alike.

        What is drawn depends on the arguments alone, so that a run can go on anywhere.
        """
        rng = np.random.default_rng([seed, part, step])
        places = np.cumsum([max(0, len(text) - length) for text in self.training])
        rows: list[np.ndarray] = []
        for place in rng.integers(places[-1], size=size):
            file = int(np.searchsorted(places, place, side="right"))
            start = int(place) - (int(places[file - 1]) if file else 0)
            rows.append(self.training[file][start : start + length + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def library() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def corpus(folder: Path, *, length: int, windows: int) -> Corpus:
    """The sources below ``folder``, every third of the longer files held out.

    Args:
        folder: Where to look for ``*.py``.
        length: Tokens of a held-out window, from the middle of its file.
        windows: How many windows at most, spread over the held-out files.

    Raises:
        ValueError: If there is nothing to train on, or nothing to hold out.
    """
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if not _LEFT_OUT & set(path.relative_to(folder).parts)
    )
    seen = hashlib.sha256()
    training: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    long_enough = 0
    for name in names:
        content = (folder / name).read_bytes()
        seen.update(name.encode() + b"\0" + content + b"\0")
        text = np.frombuffer(content, dtype=np.uint8)
        if len(text) > length:
            long_enough += 1
            if long_enough % _HELD_OUT == 0:
                start = (len(text) - length - 1) // 2
                held_out.append(text[start : start + length + 1])
                continue
        training.append(text)
    if not held_out or all(len(text) <= length for text in training):
        raise ValueError(
            f"{folder} must hold at least {_HELD_OUT} Python files longer than {length} bytes, "
            f"got {long_enough}; the standard library's sources have to be installed"
        )
    chosen = np.unique(np.linspace(0, len(held_out) - 1, min(windows, len(held_out))).astype(int))
    picked = np.stack([held_out[index] for index in chosen]).astype(np.int64)
    return Corpus(tuple(training), torch.from_numpy(picked), len(names), seen.hexdigest())
