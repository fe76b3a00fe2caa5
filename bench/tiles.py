"""Which tile on a GPU, how many warps, and from how many tokens on: ``python bench/tiles.py``.

Each setting rotates Llama 3.1 8B's query and key in place by rows that were made before, and is
timed against `copy_` on the same tensors. What is best becomes ``HEAD_STEPS`` and ``_TILE`` of
``phasor.torch._operator.triton``, whose own setting is named in the table. ``TRITON_INTERPRET=1``
rehearses it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from cases import Case
from device import restart_with_kept_memory
from measure import COPY, REPLAYED, TOLERANCE
from report import Section, markdown
from run import about, device_of
from timing import Call, interleave
from torch import Tensor

from phasor.torch import Rotation
from phasor.torch._operator import triton as backend
from phasor.torch._operator.arguments import Turn

TOKENS = 1, 64, 256, 512, 1024, 2048, 4096, 32768


class Setting(NamedTuple):
    """A kernel: how many steps a program takes, in each so many bytes, and its warps."""

    steps: int
    tile: int
    warps: int

    def __str__(self) -> str:
        return f"{self.steps} steps of {self.tile // 1024} kB, {self.warps} warps"


SETTINGS = [
    Setting(steps, 1024 * kilobytes, warps)
    for steps in (1, 2, 4, 8)
    for kilobytes, warps in ((4, 4), (8, 4), (8, 8))
]


def call_with(setting: Setting, xs: Sequence[Tensor], rows: Rotation) -> Call:
    """A launch of this kernel on ``xs``, in place; the first has been compiled and checked."""
    turn = Turn(xs, rows.cos, rows.sin, "half", "half", rows.rotary_start)
    head_steps = ((0, setting.steps),) if setting.steps > 1 else ()
    with patch.multiple(backend, _TILE=setting.tile, HEAD_STEPS=head_steps):
        plan = backend.make_plan(turn, xs)
    assert plan is not None, "contiguous tensors are one launch"
    given = [x.clone() for x in xs]
    tensors = *xs, *xs
    kernel = backend.load_kernels().rotation[(plan.programs, 1, 1)]
    plan.compiled = kernel(*tensors, rows.cos, rows.sin, *plan.arguments, num_warps=setting.warps)
    for x, y in zip(xs, rows(*given), strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=8 * TOLERANCE["bfloat16"])
    return lambda: plan.launch(tensors, rows.cos, rows.sin)


def own_setting(tokens: int) -> str:
    """The setting that the library has for so many tokens; Triton's own number of warps is 4."""
    *_, head_steps = backend.choose_tile(64, tokens, 2)
    return str(Setting(head_steps, backend._TILE, 4))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every setting and write a table of ratios to the copy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="for tiles.md", required=True)
    folder = parser.parse_args(arguments).into
    device = device_of("cuda")
    rows: dict[str, dict[str, str]] = {}
    for tokens in TOKENS:
        case = device.sized(Case(name="tiles", dtype="bfloat16", seq=tokens))
        rotation = Rotation.at(case.positions(device.where), case.rope("half"))
        xs, target = case.tensors(device=device.where), case.tensors(device=device.where)
        pairs = [*zip(target, xs, strict=True)]
        calls: dict[str, Call] = {COPY: lambda pairs=pairs: [y.copy_(x) for y, x in pairs]}
        calls |= {str(one): call_with(one, xs, rotation) for one in SETTINGS}
        warm = case.size <= device.warm_bytes
        repeats, capture = REPLAYED if warm else 1, device.capturer()
        assert capture is not None, "a GPU replays graphs"
        replays = {name: capture(call, repeats) for name, call in calls.items()}
        timed = partial(device.time, warm=warm)
        times = interleave(
            replays, seconds=device.seconds, warm=warm, rounds=device.rounds, timed=timed
        )
        column = f"{tokens} tokens"
        for name in calls:
            own = " (phasor's)" if name == own_setting(tokens) else ""
            copied = f"{1e6 * times.median(COPY) / repeats:.4g} µs"
            text = copied if name == COPY else f"{times.ratio(name, COPY)}{own}"
            rows.setdefault(name, {})[column] = text
    told = about(device) | {"whole": True, "failed": {}}
    note = "Times over that of `copy_`, all replayed from graphs."
    page = markdown(told, [Section("Tiles", note, rows, corner="setting")])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiles.md").write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    restart_with_kept_memory()
    main()
