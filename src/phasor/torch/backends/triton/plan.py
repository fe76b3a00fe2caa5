"""How one launch is made: its tile, its strides, where its rows are, and the plan of it all.

A kernel is compiled for each combination of

    the Rope's layout   number of pairs, first coordinate, pairing in and out
    the direction       forward, or inverse (which is the backward pass)
    the source of rows  one axis, several axes (int32 or int64 positions), or given rows
    the dtype           of the tensors, and of given rows
    memory              heads in one piece each on 16-byte boundaries, or anything else
    what is written     the rotated slice (in place, or all of the head), or the rest as well
    the tile            for many tokens, or for few

and for nothing else: not for a size, a stride, a position or a gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from phasor.torch._layout import read_layout
from phasor.torch._tables import hold_in_graph
from phasor.torch._written import Apart, apart
from phasor.torch.backends.triton.tiles import (
    VECTOR,
    are_few,
    bits_of,
    module,
    reciprocal,
    strides_of,
    tile_of,
    tokens_of,
)

_MOST = 256  # plans that are kept at a time


@dataclass(slots=True)
class Plan:
    """A launch without its pointers, but for those of tables and axes, which are its own."""

    kernel: tuple[str, str]  # its module, and its name there
    programs: int
    tables: Tensor | None
    axes: Tensor | None
    arguments: tuple[Any, ...]
    apart: Apart | None  # of a query and a key that are both written
    compiled: Any = None

    def launch(self, tensors: Sequence[Tensor], angles: Sequence[Tensor]) -> None:
        """Run the kernel on its tensors, of which the first two are query and key, and angles.

        Raises:
            TensorError: If both are written, and share memory.
        """
        if self.apart is not None:
            self.apart.check(tensors[0].data_ptr(), tensors[1].data_ptr())
        if self.programs == 0:
            return
        hold_in_graph(self.tables, self.axes)
        more = angles[1] if self.tables is None else self.tables
        # what was compiled is launched at once from the second time on: Triton takes as long to
        # look for it as a small rotation takes
        kernel = self.compiled or getattr(module(self.kernel[0]), self.kernel[1])
        given = (*tensors, angles[0], more, self.axes, *self.arguments)
        self.compiled = kernel[(self.programs, 1, 1)](*given) or self.compiled


def kept(
    plans: dict[tuple[Any, ...], Plan | None],
    key: tuple[Any, ...],
    make: Callable[[], Plan | None],
) -> Plan | None:
    """The plan of ``key`` in ``plans``, made where there is none yet."""
    plan: Plan | Literal[False] | None = plans.get(key, False)
    if plan is False:
        if len(plans) >= _MOST:
            plans.clear()
        # never read back: between two lines another thread may have cleared them
        plan = plans[key] = make()
    return plan


def key_of(
    tensors: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    inverse: bool,
    gain: float,
    together: bool,
    new: bool,
) -> tuple[Any, ...]:
    """All that a plan depends on, and all that was checked before it was made."""
    addresses = 0
    for t in tensors:
        addresses |= t.data_ptr()
    return (
        *(rope, inverse, gain, together, new, addresses % VECTOR == 0),
        # where sin begins is what Triton looks at
        angles[-1].data_ptr() % VECTOR == 0,
        *[(t.shape, t.stride(), t.dtype, t.device) for t in (*tensors, *angles)],
    )


def plan_of(
    tensors: Sequence[Tensor],
    angles: Sequence[Tensor],
    rope: str,
    inverse: bool,
    gain: float,
    together: bool,
    new: bool,
) -> Plan | None:
    """The launch for tensors like these, or None where they lie too unevenly for one."""
    q, k = tensors[:2]
    layout = read_layout(rope).turned_round() if inverse else read_layout(rope)
    walked = tokens_of(tensors, angles, rope)
    if walked is None:
        return None
    q_heads, k_heads = q.shape[-2], k.shape[-2] if together else 0
    placed, packed = strides_of(tensors, walked)
    wide, tokens, heads = tile_of(walked, q, packed)
    blocks, tiles = -(-q_heads // heads) + -(-k_heads // heads), -(-walked.inner // tokens)
    found = walked.rows
    kernels = module("kernels")
    return Plan(
        ("kernels", "rotation"),
        walked.outer * tiles * blocks,
        found.tables,
        found.axes,
        (
            *(walked.inner, q_heads, k_heads, reciprocal(blocks), reciprocal(tiles)),
            bits_of(gain),
            *(*placed, *walked.placed),
            *(found.source, kernels.reader(layout.pairing), kernels.writer(layout.pairing_out)),
            *(layout.pairing != layout.pairing_out or are_few(walked), inverse),
            *(found.pairs, layout.rotary_start),
            q.shape[-1] if new and q.shape[-1] > 2 * found.pairs else 0,
            *(packed, wide, tokens, heads),
        ),
        apart(q, k) if together and not new else None,
    )
