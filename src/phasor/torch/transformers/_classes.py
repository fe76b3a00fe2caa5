"""The classes that the modules of a patched model become: subclasses of their own."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from phasor.torch.transformers._carriers import Carrier, carried
from phasor.torch.transformers._forms import substitute
from phasor.torch.transformers._live import Part
from phasor.torch.transformers._methods import derived, rotations, with_methods
from phasor.torch.transformers._sines import TABLE, CarrierTable, holds_table

#: Where a module of such a class keeps how it turns.
TURNS = "_phasor_turns"


def rotating_class(part: Part) -> type:
    """For a module that rotates: its methods call phasor's operator."""
    return _with_table(part.cls) if holds_table(part.module) else _without_table(part.cls)


@lru_cache(maxsize=512)
def _without_table(cls: type) -> type:
    return with_methods(cls, _substitutes(cls), _without_table)


@lru_cache(maxsize=512)
def _with_table(cls: type) -> type:
    def table(self: Any) -> CarrierTable:
        return CarrierTable(self._phasor_turns[None], self._buffers[TABLE].device)

    return with_methods(cls, _substitutes(cls), _with_table, {TABLE: property(table)})


def _substitutes(cls: type) -> dict[str, Any]:
    return {name: substitute(function) for name, function in rotations(cls).items()}


def carrying_class(cls: type, single: bool) -> type:
    """For a module that makes cosines: it answers with positions, once where ``single``."""
    return _carrying_one(cls) if single else _carrying_two(cls)


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
