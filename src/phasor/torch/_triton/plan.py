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

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phasor.torch._layout import read_layout
from phasor.torch._triton.tiles import Rows, broadcast, module, source_of, tile, walk
from phasor.torch._written import Apart, apart

_VECTOR = 16


@dataclass(slots=True)
class Plan:
    """A launch without its pointers, but for those of tables and axes, which are its own."""

    programs: int
    tables: Tensor | None
    axes: Tensor | None
    arguments: tuple[Any, ...]
    apart: Apart | None  # of a query and a key that are both written
    compiled: Any = None

    def launch(self, tensors: Sequence[Tensor], angles: Sequence[Tensor]) -> None:
        """Rotate the query and the key into where they go.

        Raises:
            TensorError: If both are written, and share memory.
        """
        if self.apart is not None:
            self.apart.check(tensors[0].data_ptr(), tensors[1].data_ptr())
        if self.programs == 0:
            return
        more = angles[1] if self.tables is None else self.tables
        # what was compiled is launched at once from the second time on: Triton takes as long to
        # look for it as a small rotation takes
        kernel = self.compiled or module("kernels").rotation
        given = (*tensors, angles[0], more, self.axes, *self.arguments)
        self.compiled = kernel[(self.programs, 1, 1)](*given) or self.compiled


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
        *(rope, inverse, gain, together, new, addresses % _VECTOR == 0),
        # where sin begins is what Triton looks at
        angles[-1].data_ptr() % _VECTOR == 0,
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
    given = len(angles) == 2
    if given:
        cos, sin = angles
        source = Rows(module("angles").given, cos, sin, None, cos.shape[-1])
    else:
        source = source_of(angles[0], rope, q.dtype)
    last = 1 if given or source.axes is not None else 0
    lead = q.shape[:-2]
    strides = [t.stride()[:-2] for t in tensors]
    strides += [broadcast(a, last, lead) for a in angles]
    dimensions = walk(lead, strides)
    if len(dimensions) > 2:
        return None
    dimensions += [(1, (0,) * len(strides))] * (2 - len(dimensions))
    (inner, inner_steps), (outer, outer_steps) = dimensions
    wide, tokens, heads = tile(source.pairs, inner * outer, q.element_size())
    q_heads, k_heads = q.shape[-2], k.shape[-2] if together else 0
    placed: list[int] = []
    packed = True
    for i, t in enumerate(tensors):
        # the stride of a single head means nothing, and may be anything
        steps = outer_steps[i], inner_steps[i], t.stride(-2) if t.shape[-2] > 1 else 0
        placed += (*steps, t.stride(-1))
        ends = t.data_ptr() | (steps[0] | steps[1] | steps[2]) * t.element_size()
        packed = packed and ends % _VECTOR == 0 and t.stride(-1) == 1
    for i, a in enumerate(angles, start=len(tensors)):
        placed += (outer_steps[i], inner_steps[i], a.stride(-1) if last else 0)
    kernels = module("kernels")
    return Plan(
        outer * -(-inner // tokens) * (-(-q_heads // heads) + -(-k_heads // heads)),
        None if given else source.more,
        source.axes,
        (
            *(inner, q_heads, k_heads, struct.unpack("q", struct.pack("d", gain))[0]),
            *(placed if given else (*placed, 0, 0, 0)),
            *(source.function, kernels.READ[layout.pairing], kernels.WRITE[layout.pairing_out]),
            *(layout.pairing != layout.pairing_out, inverse, source.pairs, layout.rotary_start),
            q.shape[-1] if new and q.shape[-1] > 2 * source.pairs else 0,
            *(packed, wide, tokens, heads),
        ),
        apart(q, k) if together and not new else None,
    )
