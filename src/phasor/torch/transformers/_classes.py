"""The classes that the modules of a patched model become: subclasses of their own."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from phasor.torch.transformers._carriers import Carrier, carried
from phasor.torch.transformers._forms import substitute
from phasor.torch.transformers._live import Embedding, Member
from phasor.torch.transformers._methods import derived, rotations, with_methods
from phasor.torch.transformers._sines import TABLE, CarrierTable, holds_table

#: Where a module of such a class keeps how it turns.
TURNS = "_phasor_turns"


def rotating_class(member: Member, batched: bool) -> type:
    """For a module that rotates: its methods call phasor's operator."""
    return (_with_table if holds_table(member.module) else _without_table)(member.cls, batched)


@lru_cache(maxsize=512)
def _without_table(cls: type, batched: bool) -> type:
    return with_methods(cls, _substitutes(cls, batched), partial(_without_table, batched=batched))


@lru_cache(maxsize=512)
def _with_table(cls: type, batched: bool) -> type:
    def table(self: Any) -> CarrierTable:
        return CarrierTable(self._phasor_turns[None], self._buffers[TABLE].device)

    rebuild = partial(_with_table, batched=batched)
    return with_methods(cls, _substitutes(cls, batched), rebuild, {TABLE: property(table)})


def _substitutes(cls: type, batched: bool) -> dict[str, Any]:
    return {name: substitute(function, batched) for name, function in rotations(cls).items()}


def carrying_class(one: Embedding) -> type:
    """For a module that makes cosines: it answers with positions, once where it answers once."""
    if one.ids.fixed:
        return _carrying_all(one.member.cls)
    return (_carrying_one if one.single else _carrying_two)(one.member.cls)


@lru_cache(maxsize=512)
def _carrying_one(cls: type) -> type:
    def forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: Any = None) -> Carrier:
        return carried(self._phasor_turns[layer_type], position_ids, x.dtype)

    return derived(cls, {"forward": forward}, _carrying_one)


@lru_cache(maxsize=512)
def _carrying_two(cls: type) -> type:
    def forward(
        self: Any, x: Tensor, position_ids: Tensor, layer_type: Any = None
    ) -> tuple[Carrier, Carrier]:
        carrier = carried(self._phasor_turns[layer_type], position_ids, x.dtype)
        return carrier, carrier

    return derived(cls, {"forward": forward}, _carrying_two)


@lru_cache(maxsize=512)
def _carrying_all(cls: type) -> type:
    def forward(self: Any, hidden_states: Tensor) -> Carrier:
        turns = self._phasor_turns[None]
        places = torch.tensor(turns.ids.fixed, device=hidden_states.device)
        return carried(turns, places, hidden_states.dtype)

    return derived(cls, {"forward": forward}, _carrying_all)
