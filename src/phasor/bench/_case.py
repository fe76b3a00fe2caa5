"""What is measured and who takes part: workloads and contenders as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from phasor.axes import InterleavedSections, OneAxis
from phasor.pairings import Pairing
from phasor.rope import Rope

#: From a query and a key, and the weights of their norms for those that normalise, to both turned.
Rotation = Callable[..., Sequence[Tensor]]
#: Of every RMS norm, added to the mean of the squares.
EPSILON = 1e-6


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
        documents: Lengths of the texts that are packed into the sequence, each of which begins at
            the first position; one text if empty.
        norm: A weighted RMS norm of every head stands before the rotation; contenders that do
            both are told so, and the others rotate alone.
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
    documents: tuple[int, ...] = ()
    norm: bool = False

    @property
    def size(self) -> int:
        """Bytes of the query and the key."""
        heads = self.q_heads + self.k_heads
        width = getattr(torch, self.dtype).itemsize
        return self.batch * self.seq * heads * self.head_dim * width

    def rope(self, pairing: Pairing, pairing_out: Pairing | None = None) -> Rope:
        """The embedding that every contender of this pairing applies."""
        return Rope(
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim or self.head_dim,
            pairing=pairing,
            pairing_out=pairing_out,
            base=self.base,
            axes=InterleavedSections(self.sections) if self.sections else OneAxis(),
        )

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 ``[seq]``, ``[batch, 1]`` for decode; of several axes with ``[..., n_axes]``."""
        if self.seq == 1:
            place = (self.first + 4096 + 997 * torch.arange(self.batch)) % 2**15
            text = place.unsqueeze(-1)
            return (text.unsqueeze(-1).expand(-1, -1, self.n_axes) if self.sections else text).to(
                device
            )
        lengths = self.documents or (self.seq,)
        place = self.first + torch.cat([torch.arange(n) for n in lengths])
        if self.sections:
            # frames of 32 x 32 patches
            place = torch.stack([place // 1024, place // 32 % 32, place % 32], dim=-1)
        return place.to(device)

    @property
    def n_axes(self) -> int:
        """Coordinates of a position."""
        return len(self.sections) or 1

    def tensors(self, seed: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Query and key ``[batch, seq, heads, head_dim]`` of normal numbers, laid out as asked."""
        draw = torch.Generator(device).manual_seed(seed)
        q_row, k_row = self.rows or (self.head_dim, self.head_dim)
        return self._tensor(self.q_heads, q_row, draw), self._tensor(self.k_heads, k_row, draw)

    def weights(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Of the norms of query and key: ``[head_dim]`` each, between 1/2 and 3/2."""
        ramp = torch.linspace(0.5, 1.5, self.head_dim, device=device)
        kind = getattr(torch, self.dtype)
        return ramp.to(kind), ramp.flip(0).to(kind)

    def _tensor(self, heads: int, row: int, draw: torch.Generator) -> Tensor:
        middle = (heads, self.seq) if self.heads_first else (self.seq, heads)
        kind = getattr(torch, self.dtype)
        x = torch.empty(self.batch, *middle, row, dtype=kind, device=draw.device)
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
        norm: It applies the weighted RMS norm of the case before it turns.
        trains_in_place: It differentiates although it writes its arguments, and their gradients.
        may_raise: What it is left out for when it raises it; another package's interface may be
            another than the one that was read.
        heads_first: It wants ``[batch, heads, seq, head_dim]``.
        pairing_out: Pairing of its results, where it differs.
        shift: Added to every position.
    """

    name: str
    pairing: Pairing
    build: Callable[[Case, Tensor], Rotation]
    in_place: bool = False
    norm: bool = False
    trains_in_place: bool = False
    may_raise: tuple[type[Exception], ...] = (UnableError, torch.OutOfMemoryError)
    heads_first: bool = False
    pairing_out: Pairing | None = None
    shift: int = 0

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self.name}, {self.pairing}"
