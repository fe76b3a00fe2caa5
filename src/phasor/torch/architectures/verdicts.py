"""Whether phasor says of an architecture what the architecture does, by its recorded vectors.

Two statements are put to the test: the ropes that `phasor.load` reads from the config, and the
rope that `identify_samples` reads off the vectors. Each has to turn every recorded query and key
into what the model made of it, as exactly as float32 angles can.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from phasor.configs import load
from phasor.conventions import Identification, identify_samples
from phasor.errors import ConfigError, PhasorError
from phasor.layers import LayerRopes
from phasor.positions import every_axis
from phasor.spec import Rope
from phasor.torch.architectures import (
    architecture,
    counts_itself,
    position_axes,
    quietly,
    tiny_inputs,
    tiny_model,
)
from phasor.torch.architectures._compared import Positions, compared
from phasor.torch.architectures._recording import Recorded, record
from phasor.torch.architectures._tiny import EQUAL_COORDINATES

# far enough that the slowest pairs move by more than float32 loses
_FARTHEST = 1 << 14
_IN_A_ROW = 256


@dataclass(frozen=True, kw_only=True)
class KindVerdict:
    """What was said about one kind of layer.

    Attributes:
        kind: As `phasor.load` names it.
        layers: The layers of this kind in the tiny model.
        loaded: The rope that the config states; None where it states none.
        found: What the recorded vectors show; None where nothing was turned.
        loaded_error: Error of ``loaded`` as a share of what float32 angles explain, so that at most
            1 is right. None where there is nothing to compare.
        found_error: The same for ``found``.
        place: Where the vectors stand in the heads that attention is given, and the width of those,
            where the model turns a slice that it has cut out (latent attention). None elsewhere.
        wrong: What is wrong, a sentence each.
    """

    kind: str
    layers: tuple[int, ...]
    loaded: Rope | None = None
    found: Identification | None = None
    loaded_error: float | None = None
    found_error: float | None = None
    place: tuple[int, int] | None = None
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What phasor says about an architecture, and whether its own vectors bear it out.

    Attributes:
        model_type: What its configs call it.
        class_name: The class that ran; None where none did.
        kinds: The kinds of its layers.
        beside: Rotations that are not attention's own, such as those of an indexer.
        notes: What limits the comparison.
        wrong: What is wrong with the whole.
        not_built: Why nothing ran; None where it did.
        tokens: How many were turned.
        farthest: The largest coordinate of their positions.
    """

    model_type: str
    class_name: str | None = None
    kinds: tuple[KindVerdict, ...] = ()
    beside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    not_built: str | None = None
    tokens: int = 0
    farthest: int = 0

    @property
    def right(self) -> bool:
        """Whether something ran, and bears out all that was said."""
        clean = not self.wrong and not any(kind.wrong for kind in self.kinds)
        return self.not_built is None and clean

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values."""
        kinds = [
            asdict(replace(one, loaded=None, found=None))
            | {
                "loaded": None if one.loaded is None else one.loaded.to_dict(),
                "found": None if one.found is None else one.found.as_plain(),
            }
            for one in self.kinds
        ]
        return asdict(replace(self, kinds=())) | {"kinds": kinds, "right": self.right}


def verdict(name: str, config: Mapping[str, Any] | None = None) -> Verdict:
    """What phasor says about an architecture of transformers, and whether it is so.

    A tiny random model runs once; what its own rotation was given and returned is the truth.

    Args:
        name: A model type, or the name of a model class.
        config: What a ``config.json`` of that type says; the class's defaults if None.

    Raises:
        BackendError: If transformers is not installed.
        ConfigError: If it has no such architecture, or no tiny model of it can be built.

    >>> found = verdict("gptj")
    >>> found.right, found.kinds[0].loaded.rotary_dim, found.kinds[0].found.pairing
    (True, 64, 'interleaved')
    """
    one = architecture(name)
    model = tiny_model(name, config)
    positions = positions_for(model)
    with quietly():
        records = record(model, tiny_inputs(model, positions))
    wrong: list[str] = []
    ropes: LayerRopes | None = None
    try:
        ropes = load(json.loads(model.config.to_json_string(use_diff=False)))
        if config is not None:
            # transformers writes kinds of layers that the file may not have named
            whole = load({"model_type": one.model_type, **config})
            wrong += [
                f"phasor.load says otherwise of {kind} layers before they are cut to a few"
                for kind, rope in ropes.kinds.items()
                if rope not in whole.kinds.values()
            ]
    except ConfigError as error:
        wrong.append(f"phasor.load: {error}")
    own, others = _parted(records)
    if not own:
        wrong.append("its rotation was not called, or not by a name that is watched")
    notes = [EQUAL_COORDINATES[one.model_type]] if one.model_type in EQUAL_COORDINATES else []
    kinds = {
        kind: tuple(i for i, named in enumerate(names) if named == kind)
        for names in [_layer_kinds(model, ropes)]
        for kind in dict.fromkeys(names)
    }
    return Verdict(
        model_type=one.model_type,
        class_name=one.class_name,
        kinds=tuple(_judged(kind, layers, own, ropes, positions) for kind, layers in kinds.items()),
        beside=tuple(dict.fromkeys(_said(one, positions) for one in others)),
        notes=tuple(notes),
        wrong=tuple(wrong),
        tokens=len(positions),
        farthest=int(positions.max()),
    )


def positions_for(model: Any) -> Positions:
    """Positions that show both the fastest and the slowest pair, within the model's context.

    ``[seq]``; for a multimodal rope ``[seq, axes]``, equal coordinates first, then one axis after
    the other alone.
    """
    config = model.config.get_text_config()
    context = min(getattr(config, "max_position_embeddings", None) or _FARTHEST, _FARTHEST)
    if counts_itself(model):
        return np.arange(min(context, _IN_A_ROW))
    along = list(range(9))
    while (further := along[-1] + along[-1] // 2) < context:
        along.append(further)
    steps = np.array(along)
    axes = position_axes(model)
    if axes == 1 or config.model_type in EQUAL_COORDINATES:
        return steps
    alone = [np.where(np.arange(axes) == axis, steps[1:, None], 0) for axis in range(axes)]
    return np.concatenate([every_axis(steps, axes), *alone])


def _parted(records: list[Recorded]) -> tuple[dict[int, list[Recorded]], list[Recorded]]:
    """Attention's own vectors by layer, and what was turned beside."""
    by_layer: dict[int, list[Recorded]] = {}
    for one in records:
        by_layer.setdefault(one.layer, []).append(one)
    others: list[Recorded] = []
    for layer, ours in by_layer.items():
        # of a query that is multiplied after its rotation, only the key of the call is seen again
        calls = {one.call for one in ours if one.head_dim is not None}
        calls = calls or {one.call for one in ours}
        others += [one for one in ours if one.call not in calls]
        by_layer[layer] = [one for one in ours if one.call in calls]
    return by_layer, others


def _layer_kinds(model: Any, ropes: LayerRopes | None) -> Sequence[str]:
    if ropes is not None:
        return ropes.layer_kinds
    config = model.config
    return getattr(config, "layer_types", None) or ["rope"] * config.num_hidden_layers


def _judged(
    kind: str,
    layers: tuple[int, ...],
    own: Mapping[int, list[Recorded]],
    ropes: LayerRopes | None,
    positions: Positions,
) -> KindVerdict:
    seen = [one for layer in layers for one in own.get(layer, [])]
    loaded = None if ropes is None else ropes.kinds[kind]
    said = KindVerdict(kind=kind, layers=layers, loaded=loaded)
    if not seen:
        wrong = () if loaded is None else ("phasor.load states a rope, and nothing was turned",)
        return replace(said, wrong=wrong)
    wrongs: list[str] = []
    if loaded is not None:
        share, why = compared(loaded.at(int(positions.max()) + 1), seen, positions)
        said = replace(said, loaded_error=share)
        wrongs += [f"phasor.load: {one}" for one in why]
    elif ropes is not None:
        wrongs.append("phasor.load states no rope, and vectors were turned")
    found = _identified(seen[0], positions)
    if found.rope is None:
        wrongs.append(f"identify: {found.why_no_rope}")
    else:
        share, why = compared(found.rope, seen, positions, found.attention_factor)
        said = replace(said, found_error=share)
        wrongs += [f"identify: {one}" for one in why]
    return replace(said, found=found, place=_place(seen), wrong=tuple(wrongs))


def _place(seen: Sequence[Recorded]) -> tuple[int, int] | None:
    for one in seen:
        if one.head_dim is not None and one.head_dim != one.before.shape[-1]:
            assert one.slice_start is not None
            return one.slice_start, one.head_dim
    return None


def _identified(one: Recorded, positions: Positions) -> Identification:
    rows, _, heads, width = one.before.shape
    before, after = (x.transpose(1, 0, 2, 3).reshape(-1, width) for x in (one.before, one.after))
    return identify_samples(before, after, positions.repeat(rows * heads, axis=0))


def _said(one: Recorded, positions: Positions) -> str:
    """One sentence about what was turned beside attention."""
    what = f"{one.function}({one.argument}) of {one.before.shape[-1]} coordinates"
    if one.before.shape[1] != len(positions):
        return f"{what}, of other tokens"
    try:
        rope = _identified(one, positions).rope
    except PhasorError:
        rope = None
    if rope is None:
        return f"{what}: not identified"
    back = " backwards" if rope.direction < 0 else ""
    base = "frequencies of their own" if rope.base is None else f"base {rope.base:g}"
    return f"{what}: {rope.pairing} pairs{back}, {rope.rotary_dim} turned, {base}"
