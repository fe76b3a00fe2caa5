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
from phasor.describe import original_context
from phasor.errors import ConfigError, PhasorError
from phasor.identification import Identification, identify_samples
from phasor.layers import LayerRopes
from phasor.positions import every_axis
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch.architectures import (
    architecture,
    attempting,
    counts_itself,
    position_axes,
    tiny_inputs,
    tiny_model,
)
from phasor.torch.architectures._compared import Positions, compared
from phasor.torch.architectures._recording import Recorded, record
from phasor.torch.architectures._tiny import EQUAL_COORDINATES

# far enough that the slowest pairs move by more than float32 loses
_FARTHEST = 1 << 14
_IN_A_ROW = 256
# positions, attention's own vectors by layer, and what was turned beside
Run = tuple[Positions, dict[int, list[Recorded]], list[Recorded]]


@dataclass(frozen=True, kw_only=True)
class KindVerdict:
    """What was said about one kind of layer.

    Attributes:
        kind: As `phasor.load` names it.
        layers: The layers of this kind in the tiny model.
        loaded: The rope that the config states; None where it states none.
        found: What the recorded vectors show; None where nothing was turned.
        beyond: What they show beyond the original context, where the rope is a rule.
        loaded_error: Error of ``loaded`` as a share of what float32 angles explain, so that at most
            1 is right. None where there is nothing to compare.
        found_error: The same for ``found`` and ``beyond``.
        place: Where the vectors stand in the heads that attention is given, and the width of those,
            where the model turns a slice that it has cut out (latent attention). None elsewhere.
        wrong: What is wrong, a sentence each.
    """

    kind: str
    layers: tuple[int, ...]
    loaded: Rope | None = None
    found: Identification | None = None
    beyond: Identification | None = None
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
            asdict(replace(one, loaded=None, found=None, beyond=None))
            | {
                "loaded": None if one.loaded is None else one.loaded.to_dict(),
                "found": None if one.found is None else one.found.as_plain(),
                "beyond": None if one.beyond is None else one.beyond.as_plain(),
            }
            for one in self.kinds
        ]
        return asdict(replace(self, kinds=())) | {"kinds": kinds, "right": self.right}


def verdict(name: str, config: Mapping[str, Any] | None = None) -> Verdict:
    """What phasor says about an architecture of transformers, and whether it is so.

    A tiny random model runs once, and where a rule picks the law twice: within the original context
    and beyond. What its own rotation was given and returned is the truth.

    Args:
        name: A model type, or the name of a model class.
        config: What a ``config.json`` of that type says; the class's defaults if None.

    Raises:
        BackendError: If transformers is not installed.
        ConfigError: If it has no such architecture, the config is damaged, or no tiny model of it
            can be built and run.

    >>> found = verdict("gptj")
    >>> found.right, found.kinds[0].loaded.rotary_dim, found.kinds[0].found.pairing
    (True, 64, 'interleaved')
    """
    one = architecture(name)
    # read before anything is built of it: a damaged number must not fill the memory
    whole = None if config is None else load({"model_type": one.model_type, **config})
    model = tiny_model(name, config)
    nothing = Verdict(model_type=one.model_type, class_name=one.class_name)
    try:
        ropes = load(json.loads(model.config.to_json_string(use_diff=False)))
    except ConfigError as error:
        return replace(nothing, wrong=(f"phasor.load: {error}",))
    # transformers writes kinds of layers that the file may not have named
    wrong = [
        f"phasor.load says otherwise of {kind} layers before they are cut to a few"
        for kind, rope in ropes.kinds.items()
        if whole is not None and rope not in whole.kinds.values()
    ]
    runs: list[Run] = []
    for positions in _positions(model, ropes):
        with attempting(f"no tiny {one.class_name} can run"):
            runs.append((positions, *_parted(record(model, tiny_inputs(model, positions)))))
    if not runs[0][1]:
        wrong.append("its rotation was not called, or not by a name that is watched")
    beside = [_said(one, positions) for positions, _, others in runs for one in others]
    equal = EQUAL_COORDINATES.get(one.model_type)
    return replace(
        nothing,
        kinds=tuple(_judged(kind, ropes, runs) for kind in dict.fromkeys(ropes.layer_kinds)),
        beside=tuple(dict.fromkeys(beside)),
        notes=() if equal is None else (equal,),
        wrong=tuple(wrong),
        tokens=sum(len(positions) for positions, _, _ in runs),
        farthest=max(int(positions.max()) for positions, _, _ in runs),
    )


def _positions(model: Any, ropes: LayerRopes) -> list[Positions]:
    """Positions that show both the fastest and the slowest pair, for every run.

    One run within the model's context; where a rule picks the law, one within the original context
    and one beyond. Each ``[seq]``; for a multimodal rope ``[seq, axes]``, equal coordinates first,
    then one axis after the other alone.
    """
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or _FARTHEST
    rules = [rope for rope in ropes.kinds.values() if rope and isinstance(rope.scaling, Rule)]
    original = {length for rope in rules if (length := original_context(rope))}
    end = min(context, _FARTHEST, *original)
    if counts_itself(model):
        return [np.arange(min(end, _IN_A_ROW))]
    return [_reaching(model, end) for end in (end, *(2 * length for length in original))]


def _reaching(model: Any, end: int) -> Positions:
    along = list(range(9))
    while (further := along[-1] + along[-1] // 2) < end:
        along.append(further)
    steps = np.array(along)
    axes = position_axes(model)
    if axes == 1 or model.config.get_text_config().model_type in EQUAL_COORDINATES:
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


def _judged(kind: str, ropes: LayerRopes, runs: Sequence[Run]) -> KindVerdict:
    layers = tuple(layer for layer, one in enumerate(ropes.layer_kinds) if one == kind)
    loaded = ropes.kinds[kind]
    said = KindVerdict(kind=kind, layers=layers, loaded=loaded)
    errors: dict[str, list[float]] = {"loaded": [], "found": []}
    identified: list[Identification] = []
    wrongs: list[str] = []
    for positions, own, _ in runs:
        seen = [one for layer in layers for one in own.get(layer, [])]
        if not seen:
            wrong = () if loaded is None else ("phasor.load states a rope, and nothing was turned",)
            return replace(said, wrong=wrong)
        said = replace(said, place=said.place or _place(seen))
        found = _identified(seen[0], positions)
        identified.append(found)
        if loaded is None:
            wrongs.append("phasor.load states no rope, and vectors were turned")
        else:
            share, why = compared(loaded.at(int(positions.max()) + 1), seen, positions)
            errors["loaded"].append(share)
            wrongs += [f"phasor.load: {one}" for one in why]
        if found.rope is None:
            wrongs.append(f"identify: {found.why_no_rope}")
        else:
            share, why = compared(found.rope, seen, positions, found.attention_factor)
            errors["found"].append(share)
            wrongs += [f"identify: {one}" for one in why]
    return replace(
        said,
        found=identified[0],
        beyond=identified[1] if len(identified) > 1 else None,
        loaded_error=max(errors["loaded"], default=None),
        found_error=max(errors["found"], default=None),
        wrong=tuple(dict.fromkeys(wrongs)),
    )


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
    base = "frequencies of their own" if rope.base is None else f"base {rope.base:.15g}"
    return f"{what}: {rope.pairing} pairs{back}, {rope.rotary_dim} turned, {base}"
