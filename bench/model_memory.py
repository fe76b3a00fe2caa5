"""Memory of models at 32k tokens, patched against unpatched, in about a quarter of an hour.

``python bench/model_memory.py`` writes ``bench/results/model-memory.md``: how far the peak of
resident memory rises in the rotation of one layer, and in the whole model around it. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from model_shapes import SHAPES, THREADS, built, circumstances, silently_patched
from rich.progress import Progress, TaskID

from phasor.torch.hf.functions import substitute
from phasor.torch.hf.methods import rotations_of

LONG = 32_768
RESULT = Path(__file__).with_name("results") / "model-memory.md"


def resident() -> int:
    """The peak of resident memory (Linux)."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class Rise:
    """Inside ``with``, the peak of resident memory above what there was at the start."""

    def __enter__(self) -> Rise:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        self._before = resident()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = resident() - self._before


@torch.no_grad()
def of_rotation(name: str, *, patched: bool) -> int:
    """Bytes by which the rotation of one layer at 32k tokens raises this process's memory."""
    model: Any = built(name)
    layer = next(m for _, m in model.named_modules() if rotations_of(type(m)))
    function = rotations_of(type(layer))["apply_rotary_pos_emb"]
    if patched:
        silently_patched(model)
        function = substitute(function)
    shape = SHAPES[name][2]
    kind = ["full_attention"] if name.startswith("Gemma") else []
    for length in (64, LONG):
        q, k = (
            torch.ones(1, length, shape[heads], shape["head_dim"], dtype=torch.bfloat16)
            for heads in ("num_attention_heads", "num_key_value_heads")
        )
        places = torch.arange(length)[None]
        with Rise() as rise:
            rows = model.rotary_emb(q, places, *kind)
            function(q.transpose(1, 2), k.transpose(1, 2), *rows)
    return rise.bytes


@torch.no_grad()
def of_model(name: str, *, patched: bool) -> int:
    """Bytes by which a prompt of 32k tokens raises it."""
    model: Any = built(name)
    if patched:
        silently_patched(model)
    for length in (64, LONG):
        ids = torch.arange(length)[None] % 1000
        with Rise() as rise:
            model(ids, use_cache=False)
    return rise.bytes


RISES = {"rotation": of_rotation, "model": of_model}


def fresh_rise(what: str, name: str, *, patched: bool) -> int:
    """One of `RISES` in a process of its own."""
    program = [sys.executable, __file__, "--rise", what, name, *(["--patched"] if patched else [])]
    return int(subprocess.run(program, capture_output=True, check=True).stdout)


def peaks(what: str, bar: Progress, task: TaskID) -> str:
    """A table of `RISES` of one kind, before and after."""
    lines = ["| shape | transformers, MiB | phasor, MiB |", "| --- | ---: | ---: |"]
    for name in SHAPES:
        cells = [name]
        for patched in (False, True):
            cells.append(f"{fresh_rise(what, name, patched=patched) / 2**20:.0f}")
            bar.advance(task)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run everything, or one peak of memory in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rise", nargs=2, metavar=("WHAT", "SHAPE"))
    parser.add_argument("--patched", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(THREADS)
    if wanted.rise:
        what, name = wanted.rise
        print(RISES[what](name, patched=wanted.patched))
        return
    with Progress() as bar:
        task = bar.add_task("32k tokens", total=2 * len(RISES) * len(SHAPES))
        tables = {what: peaks(what, bar, task) for what in RISES}
    page = f"""\
{circumstances()}. How far the peak of resident memory rises at {LONG} tokens, in a process of its
own for every number.

One layer's rotation, from query and key on: cosines and sines, temporaries, and the rotated query
and key themselves.

{tables["rotation"]}

The whole model, without a cache:

{tables["model"]}
"""
    RESULT.write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    main()
