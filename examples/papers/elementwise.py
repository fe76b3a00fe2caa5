"""The rotation element by element (eq. 34) against its block-diagonal matrix (eq. 15), by width.

Every contender gets what it needs for the positions beforehand, so the time is that of the
rotation alone, and the memory is what it holds for 256 positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import altair as alt
import numpy as np
import torch
from torch import Tensor

from phasor import Rope
from phasor.angles import cos_sin
from phasor.numpy import matrix
from phasor.torch import rotate

from .pictures import band, lines, log2, mean_and_spread, table
from .study import Row, Study
from .training import milliseconds

CONTENDERS = ("matrix, eq. 15", "element by element, eq. 34", "phasor")
UNIT = "phasor at width 16 = 1"


def settings(quick: bool) -> Row:
    """Widths of a head, and how often each is timed."""
    widths = [16, 64] if quick else [16, 32, 64, 128, 256, 512]
    return {"seq": 256, "widths": widths, "calls": 3 if quick else 15, "few": [16, 256]}


def run(study: Study) -> None:
    """Time and memory of each contender, after a check that all rotate alike."""
    study.each_seed("rotations", lambda seed: _measure(study.settings, seed))


def _measure(made: Row, seed: int) -> Row:
    torch.manual_seed(seed)
    found: Row = {name: {"milliseconds": [], "kilobytes": []} for name in CONTENDERS}
    found |= {"largest difference": 0.0, **{f"{few} matrices": [] for few in made["few"]}}
    for width in made["widths"]:
        x = torch.randn(made["seq"], 1, width)
        rotations = _rotations(width, made["seq"])
        wanted = rotations["phasor"][0](x)
        for name, (call, held) in rotations.items():
            difference = (call(x) - wanted).abs().max().item()
            if difference > 1e-5:
                raise AssertionError(f"{name} rotates differently at width {width}: {difference}")
            found["largest difference"] = max(found["largest difference"], difference)
            kilobytes = sum(part.nelement() * part.element_size() for part in held) / 1024
            found[name]["kilobytes"].append(kilobytes)
            found[name]["milliseconds"].append(milliseconds(partial(call, x), made["calls"]))
        whole = rotations[CONTENDERS[0]][1][0]
        for few in made["few"]:
            matrices, some = whole[:few].contiguous(), x[:few]
            time = milliseconds(partial(_by_matrix, matrices, some), made["calls"])
            found[f"{few} matrices"].append(1e6 * time / (few * width**2))
    return found


def _by_matrix(matrices: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("sij,shj->shi", matrices, x)


def _rotations(width: int, seq: int) -> dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]]:
    """Each contender's call, and the tensors that it holds for these positions."""
    rope = Rope(head_dim=width, pairing="interleaved")
    positions = torch.arange(seq)
    # [seq, width, width]: one matrix for each position
    whole = torch.from_numpy(np.stack([matrix(p, rope) for p in range(seq)])).float()
    # [seq, 1, width]: the cosine and sine of each pair twice, for both of its coordinates
    cos, sin = (
        torch.from_numpy(part).float().repeat_interleave(2, -1)[:, None]
        for part in cos_sin(np.arange(seq), rope)
    )

    def by_element(x: Tensor) -> Tensor:
        # (x0, x1, x2, x3, ...) -> (-x1, x0, -x3, x2, ...)
        swapped = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos + swapped * sin

    calls = [partial(_by_matrix, whole), by_element, lambda x: rotate(x, positions, rope)]
    held = [[whole], [cos, sin], [positions]]
    return dict(zip(CONTENDERS, zip(calls, held, strict=True), strict=True))


def _relative_times(measured: Row, name: str) -> list[float]:
    """A contender's times by width, as ratios within one run, which another machine repeats."""
    unit = measured["phasor"]["milliseconds"][0]
    return [time / unit for time in measured[name]["milliseconds"]]


def tables(study: Study) -> str:
    """Time and memory by width."""
    made, seeds, widths = study.settings, study.over_seeds("rotations"), study.settings["widths"]
    times, held = {}, []
    for name in CONTENDERS:
        columns = zip(*(_relative_times(seed, name) for seed in seeds), strict=True)
        times[name] = [mean_and_spread(each, 2) for each in columns]
        held.append([name, *(f"{kilobytes:,.0f}" for kilobytes in seeds[0][name]["kilobytes"])])
    few = [
        [
            f"{n} matrices",
            *(mean_and_spread(each, 2) for each in study.columns("rotations", f"{n} matrices")),
        ]
        for n in made["few"]
    ]
    largest = max(seed["largest difference"] for seed in seeds)
    return "\n\n".join(
        (
            table(
                [f"time, {UNIT}, width", *map(str, widths)],
                ([name, *cells] for name, cells in times.items()),
            ),
            table(["nanoseconds for a number of eq. 15, width", *map(str, widths)], few),
            table(["kilobytes held, width", *widths], held),
            f"Largest difference between two of them: {largest:.1e}.",
        )
    )


def chart(study: Study) -> alt.TopLevelMixin:
    """Time and memory against width, both axes logarithmic."""
    widths, seeds = study.settings["widths"], study.over_seeds("rotations")

    def panel(read: Callable[[Row, str], list[float]], title: str) -> alt.LayerChart:
        curves = {name: [read(seed, name) for seed in seeds] for name in CONTENDERS}
        rows = [row for name in CONTENDERS for row in band(curves[name], widths, name)]
        # below the least of them, so that a level line does not lie on the axis
        least = min(row["low"] for row in rows) / 2
        scale = alt.Scale(type="log", nice=False, domainMin=least)
        y = alt.Y("mean:Q", title=title, scale=scale, axis=alt.Axis(format="~g", tickCount=6))
        return lines(rows, CONTENDERS, x=log2("width of a head", widths), y=y)

    return alt.hconcat(
        panel(_relative_times, f"time, {UNIT}"),
        panel(lambda seed, name: seed[name]["kilobytes"], "kilobytes held"),
    )
