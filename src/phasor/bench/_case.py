"""What is measured and who takes part: workloads and contenders as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from phasor.axes import Interleaved, OneAxis
from phasor.spec import Pairing, Rope

Rotation = Callable[[Tensor, Tensor], Sequence[Tensor]]


class UnableError(Exception):
    """Why a contender cannot do a case."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload: a query and a key, where their tokens stand, and what is done to them.

    Attributes:
        name: What the tables call it.
        dtype: Of the tensors.
        seq: Tokens in a sequence; a case of one is a decode step, each sequence somewhere else.
        batch: Sequences.
        q_heads: Heads of the query.
        k_heads: Heads of the key.
        head_dim: Width of a head.
        rotary_dim: Coordinates that turn, the first of the head; all of them if None.
        base: Of the frequencies.
        sections: Pairs on each of several axes, dealt out in turn; one axis if empty.
        heads_first: Memory is ``[batch, heads, seq, head_dim]``, else heads and seq change places.
        rows: Widths of the rows of which the query's and the key's heads are the last coordinates;
            contiguous heads if None.
        backward: Also the gradients of both.
        first: Position of the first token.
    """

    name: str
    dtype: Literal["float32", "bfloat16"]
    seq: int
    batch: int = 1
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    rotary_dim: int | None = None
    base: float = 500_000.0
    sections: tuple[int, ...] = ()
    heads_first: bool = False
    rows: tuple[int, int] | None = None
    backward: bool = False
    first: int = 0

    def rope(self, pairing: Pairing, pairing_out: Pairing | None = None) -> Rope:
        """The embedding that every contender of this pairing applies."""
        return Rope(
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim or self.head_dim,
            pairing=pairing,
            pairing_out=pairing_out,
            base=self.base,
            axes=Interleaved(self.sections) if self.sections else OneAxis(),
        )

    def positions(self) -> Tensor:
        """int64 ``[seq]``, ``[batch, 1]`` for decode, ``[seq, n_axes]`` for several axes."""
        if self.seq == 1:
            return ((self.first + 4096 + 997 * torch.arange(self.batch)) % 2**15).unsqueeze(-1)
        place = self.first + torch.arange(self.seq)
        if not self.sections:
            return place
        # frames of 32 x 32 patches
        return torch.stack([place // 1024, place // 32 % 32, place % 32], dim=-1)

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Query and key ``[batch, seq, heads, head_dim]`` of normal numbers, laid out as asked."""
        draw = torch.Generator().manual_seed(seed)
        q_row, k_row = self.rows or (self.head_dim, self.head_dim)
        return self._tensor(self.q_heads, q_row, draw), self._tensor(self.k_heads, k_row, draw)

    def _tensor(self, heads: int, row: int, draw: torch.Generator) -> Tensor:
        middle = (heads, self.seq) if self.heads_first else (self.seq, heads)
        x = torch.empty(self.batch, *middle, row, dtype=getattr(torch, self.dtype))
        x.normal_(generator=draw)
        return (x.transpose(1, 2) if self.heads_first else x)[..., row - self.head_dim :]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to rotate a query and a key.

    Attributes:
        name: Whose, and which form.
        pairing: The coordinates it turns together.
        build: From a case and its positions, what is timed, with all tables made beforehand; it
            raises `UnableError` for a case it cannot do.
        in_place: It writes its arguments.
        heads_first: It wants ``[batch, heads, seq, head_dim]``.
        pairing_out: Pairing of its results, where it differs.
        shift: Added to every position.
    """

    name: str
    pairing: Pairing
    build: Callable[[Case, Tensor], Rotation]
    in_place: bool = False
    heads_first: bool = False
    pairing_out: Pairing | None = None
    shift: int = 0

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self.name}, {self.pairing}"
