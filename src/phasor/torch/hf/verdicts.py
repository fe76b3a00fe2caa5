"""Whether `phasor.load` says of an architecture what the architecture does.

A tiny random model of it runs with recorders where `phasor.torch.hf.patch` would put phasor's
operator. They note which layers rotate, with which function and which cosines and sines; what the
function does is then measured as `patch` measures it, and compared with the ropes that
`phasor.load` reads from the config.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from phasor.configs import load
from phasor.describe import original_context
from phasor.errors import ConfigError, PhasorError
from phasor.identification import Identification
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch.hf.architectures import foreign_errors, model_class, particulars, tiny_model
from phasor.torch.hf.carriers import TABLE_ROWS, Form, measure_form, tensor_parameters
from phasor.torch.hf.embeddings import (
    FARTHEST,
    Grid,
    each_row,
    identify_rows,
    rope_error,
    spread_positions,
)
from phasor.torch.hf.methods import ROWS, parameters, rotations_of, subclass_calling
from phasor.torch.hf.modules import layer_number, members_of, set_class

_ATTENTION = "eager_attention_forward"
_IN_A_ROW = 256


@dataclass(frozen=True, kw_only=True)
class KindVerdict:
    """What the config says of one kind of layer, and what its layers do.

    Attributes:
        kind: As `phasor.load` names it.
        layers: The layers of this kind in the tiny model.
        loaded: The rope that the config states; None where it states none.
        found: What the class is identified as; None where nothing is rotated.
        beyond: The same beyond the original context, where the rope is a rule.
        error: Error of ``loaded`` as a share of what float32 angles explain, so that at most 1 is
            right. None where there is nothing to compare.
        place: Where the vectors are in the heads that attention is given, and the width of those,
            where the model rotates a slice that it has cut out (latent attention). None elsewhere.
        wrong: What is wrong, a sentence each.
    """

    kind: str
    layers: tuple[int, ...]
    loaded: Rope | None
    found: Identification | None
    beyond: Identification | None
    error: float | None
    place: tuple[int, int] | None
    wrong: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What phasor says about an architecture, and whether its own code does so.

    Attributes:
        model_type: What its configs call it.
        class_name: The class that ran; None where none did.
        kinds: The kinds of its layers.
        beside: Rotations that are not attention's own, such as those of an indexer.
        notes: What limits the comparison.
        wrong: What is wrong with the whole.
        not_built: Why nothing ran; None where it did.
        tokens: How many were rotated.
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
        """Whether something ran, and does all that was said."""
        clean = not self.wrong and not any(kind.wrong for kind in self.kinds)
        return self.not_built is None and clean

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values."""
        kinds = [
            vars(one)
            | {
                "loaded": None if one.loaded is None else one.loaded.to_dict(),
                "found": None if one.found is None else one.found.as_plain(),
                "beyond": None if one.beyond is None else one.beyond.as_plain(),
            }
            for one in self.kinds
        ]
        return vars(self) | {"kinds": kinds, "right": self.right}


@dataclass(kw_only=True, eq=False)
class Call:
    """One call of a rotation function during a forward pass.

    Attributes:
        layer: Whose vectors it rotated.
        function: The function.
        rows: The cosines and sines that it was given, of one sequence.
        arguments: What the function calls the vectors.
        rotated: The vectors after their rotation, ``[batch, heads, seq, width]`` or ``[batch, seq,
            heads, width]``.
        place: Where the vectors are in the heads that attention is given, and the width of those;
            None if they are not seen there.
    """

    layer: int
    function: Callable[..., Any]
    rows: Any
    arguments: tuple[str, ...]
    rotated: Sequence[Tensor]
    place: tuple[int, int] | None = None

    @property
    def width(self) -> int:
        """Of each vector."""
        return self.rotated[0].shape[-1]

    @property
    def tokens(self) -> int:
        """How many it rotated."""
        return each_row(self.rows)[0].shape[-2]

    @property
    def form(self) -> Form | None:
        """The geometry of the function."""
        return measure_form(self.function, each_row(self.rows)[0].dim() > 2)

    def identify(self, grid: Grid) -> Identification | None:
        """What it is identified as; None where it is not understood or rotates other tokens."""
        if self.form is None or self.tokens != grid.shape[1]:
            return None
        return identify_rows(self.function, self.form, self.rows, grid, self.width)


class _Run(NamedTuple):
    """One forward pass at positions ``[axes, seq]``: attention's own calls, and those beside."""

    grid: Grid
    own: list[Call]
    beside: list[Call]


def verdict(name: str, config: Mapping[str, Any] | None = None) -> Verdict:
    """What phasor says about an architecture of transformers, and whether it is so.

    A tiny random model runs once, and where a rule picks the law twice: within the original context
    and beyond. The cosines that its own rotation is given there, and what that function does with
    them, are the truth.

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
    cls = model_class(name)
    model_type = cls.config_class.model_type
    # read before anything is built of it: a damaged number must not fill the memory
    whole = None if config is None else load({"model_type": model_type, **config})
    model = tiny_model(name, config)
    nothing = Verdict(model_type=model_type, class_name=cls.__name__)
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
    with foreign_errors(f"no tiny {cls.__name__} can run"):
        runs = [_run(model, grid) for grid in _grids(model, ropes)]
    if not runs[0].own:
        wrong.append("its rotation was not called, or not by a name that is watched")
    beside = [one for run in runs for call in run.beside for one in _sentences(call, run.grid)]
    equal = particulars()["equal_coordinates"].get(model_type)
    return replace(
        nothing,
        kinds=tuple(_kind_verdict(kind, ropes, runs) for kind in dict.fromkeys(ropes.layer_kinds)),
        beside=tuple(dict.fromkeys(beside)),
        notes=() if equal is None else (equal,),
        wrong=tuple(wrong),
        tokens=sum(run.grid.shape[1] for run in runs),
        farthest=max(int(run.grid.max()) for run in runs),
    )


# ---- what a model does ----


def _grids(model: Any, ropes: LayerRopes) -> list[Grid]:
    """Positions for every run: within the context, and where a rule picks the law beyond it."""
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or FARTHEST
    rules = [rope for rope in ropes.kinds.values() if rope and isinstance(rope.scaling, Rule)]
    original = {length for rope in rules if (length := original_context(rope))}
    end = min(context, FARTHEST, *original)
    if _counts_itself(model):
        return [np.arange(min(end, _IN_A_ROW))[None]]
    with_equal = config.model_type in particulars()["equal_coordinates"]
    n_axes = 1 if with_equal else _position_axes(model)
    return [spread_positions(end, n_axes) for end in (end, *(2 * length for length in original))]


def _position_axes(model: Any) -> int:
    """How many coordinates a model's positions have: 1, or those of its multimodal rope."""
    for module in model.modules():
        sections = getattr(module, "mrope_section", None)
        if isinstance(sections, dict):
            sections = next(iter(cast("dict[str, Any]", sections).values()), None)
        if sections is not None:
            return len(sections)
    return 1


def _counts_itself(model: Any) -> bool:
    """Whether a model takes no positions and numbers its tokens from 0."""
    taken = inspect.signature(model.forward).parameters
    takes = "position_ids" in taken or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()
    )
    return not takes or model.config.model_type in particulars()["own_positions"]


def _run(model: Any, grid: Grid) -> _Run:
    words = min(100, model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    inputs = {"input_ids": torch.randint(3, words, (1, grid.shape[1]), generator=generator)}
    if model.config.model_type in particulars()["timed"]:
        inputs["t_cond"] = torch.zeros(1, 1, model.config.hidden_size)
    if not _counts_itself(model):
        # [axes, seq] -> [1, seq] of one axis, [axes, 1, seq] of several
        inputs["position_ids"] = torch.from_numpy(grid if len(grid) == 1 else grid[:, None])
    calls = record_calls(model, inputs)
    # of a query that is multiplied after its rotation, only the key of the call is seen again
    seen = {call.layer for call in calls if call.place}
    own = [call for call in calls if call.place or call.layer not in seen]
    return _Run(grid, own, [call for call in calls if call not in own])


def record_calls(model: Any, inputs: Mapping[str, Tensor]) -> list[Call]:
    """Every call of a rotation function during ``model(**inputs)`` of one sequence, in order."""
    calls: list[Call] = []
    watched: list[tuple[Any, type]] = []
    try:
        for member in members_of(model):
            cls: Any = member.cls
            functions, static = rotations_of(cls), _static_rotations(cls)
            if not functions and not static:
                continue
            recorder = functools.partial(_rotation_recorder, calls, layer_number(member) or 0)
            recorders = {name: recorder(function) for name, function in functions.items()}
            attention = cls.forward.__globals__.get(_ATTENTION)
            if attention is not None:
                recorders[_ATTENTION] = _attention_recorder(calls, attention)
            body = {name: staticmethod(recorder(one)) for name, one in static.items()}
            watched.append((member.module, cls))
            set_class(member.module, subclass_calling(cls, recorders, None, body))
        with torch.no_grad():
            model(**inputs)
    finally:
        for module, cls in watched:
            set_class(module, cls)
    return calls


def _static_rotations(cls: type) -> dict[str, Any]:
    """Static methods that rotate, as RoFormer has one."""
    return {
        name: value.__func__
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, staticmethod) and name.startswith("apply_rotary")
    }


def _rotation_recorder(
    calls: list[Call], layer: int, function: Callable[..., Any]
) -> Callable[..., Any]:
    names, tensors = tuple(parameters(function)), tensor_parameters(function)

    @functools.wraps(function)
    def recorded(*args: Any, **words: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **words}
        returned: Any = function(*args, **words)
        outputs = [returned] if isinstance(returned, Tensor) else list(returned)
        rotated = [one for one in outputs[: len(tensors)] if isinstance(one, Tensor)]
        rows = [given[name] for name in (*ROWS, TABLE_ROWS) if name in given]
        # [1, 1, seq, width] -> [seq, width]
        rows = [row.reshape(row.shape[-2:]) if row.dim() > 3 else row for row in rows]
        call = Call(
            layer=layer, function=function, rows=rows if len(rows) > 1 else rows[0],
            arguments=tensors[: len(rotated)], rotated=rotated,
        )  # fmt: skip
        calls.append(call)
        return returned

    return recorded


def _attention_recorder(calls: list[Call], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(module: Any, query: Tensor, key: Tensor, *args: Any, **words: Any) -> Any:
        for call in calls:
            for heads in (query, key):
                # beside a sequence, keys of other tokens may stand
                if call.place is None and heads.shape[2] == call.tokens:
                    call.place = _find_in_head(call, heads[0, 0, -1])
        return function(module, query, key, *args, **words)

    return recorded


def _find_in_head(call: Call, head: Tensor) -> tuple[int, int] | None:
    """Where a call's vector is in the first head of the last token, and the width of that."""
    for x in call.rotated:
        # the last token of the first head, wherever the function has its heads
        for vector in (x[0, 0, -1], x[0, -1, 0]) if x.dim() == 4 else (x[0, -1],):
            for start in range(len(head) - call.width + 1):
                if torch.equal(head[start : start + call.width], vector):
                    return start, len(head)
    return None


# ---- whether it is what was said ----


def _kind_verdict(kind: str, ropes: LayerRopes, runs: Sequence[_Run]) -> KindVerdict:
    layers = tuple(layer for layer, one in enumerate(ropes.layer_kinds) if one == kind)
    loaded = ropes.kinds[kind]
    found: list[Identification] = []
    errors: list[float] = []
    wrong: list[str] = []
    places: list[tuple[int, int]] = []
    for run in runs:
        calls = [call for call in run.own if call.layer in layers]
        if not calls:
            if loaded is not None:
                wrong.append("phasor.load states a rope, and nothing was turned")
            continue
        places += [call.place for call in calls if call.place and call.place[1] != call.width]
        if (identification := calls[0].identify(run.grid)) is None:
            wrong.append(f"{calls[0].function.__name__} turns no pairs that phasor knows")
            continue
        found.append(identification)
        if loaded is None:
            wrong.append("phasor.load states no rope, and vectors were turned")
            continue
        error, why = compare(loaded.at(int(run.grid.max()) + 1), calls, run.grid)
        errors.append(error)
        wrong += [f"phasor.load: {one}" for one in why]
    return KindVerdict(
        kind=kind,
        layers=layers,
        loaded=loaded,
        found=found[0] if found else None,
        beyond=found[1] if len(found) > 1 else None,
        error=max(errors, default=None),
        place=places[0] if places else None,
        wrong=tuple(dict.fromkeys(wrong)),
    )


def compare(rope: Rope, calls: Sequence[Call], grid: Grid) -> tuple[float, list[str]]:
    """The worst error over the calls as a share of what float32 explains, and what is wrong."""
    if len(grid) == 1:
        grid = np.tile(grid, (rope.axes.n_axes, 1))
    if rope.axes.n_axes != len(grid):
        return np.inf, [f"positions of {rope.axes.n_axes} axes, the model's have {len(grid)}"]
    worst, why = 0.0, dict[str, None]()
    for call in calls:
        form, width = call.form, call.width
        start, head_dim = call.place or (None, None)
        if width == rope.head_dim:
            head_dim = width
            start = width - rope.rotary_dim if form is not None and form.slice == "end" else 0
        elif width != rope.rotary_dim:
            why[f"heads of {rope.head_dim}, and vectors of {width} were turned"] = None
            continue
        # a slice that the model cuts out itself was seen in attention
        if start not in (None, rope.rotary_start):
            why[f"a slice from {rope.rotary_start}, the model's from {start}"] = None
        if head_dim not in (None, rope.head_dim):
            why[f"heads of {rope.head_dim}, the model's are of {head_dim}"] = None
        error = np.inf
        if form is not None and call.tokens == grid.shape[1]:
            error = rope_error(rope, form, call.rows, grid)
        worst = max(worst, error)
    if worst > 1:
        why[f"off by {worst:.3g} times what float32 angles explain"] = None
    return worst, list(why)


def _sentences(call: Call, grid: Grid) -> list[str]:
    """About each of the vectors that a call rotated beside attention."""
    try:
        found = call.identify(grid)
    except PhasorError:
        found = None
    rope = None if found is None else found.rope
    if call.tokens != grid.shape[1]:
        what = ", of other tokens"
    elif rope is None:
        what = ": not identified"
    else:
        back = " backwards" if rope.direction < 0 else ""
        base = "frequencies of their own" if rope.base is None else f"base {rope.base:.15g}"
        what = f": {rope.pairing} pairs{back}, {rope.rotary_dim} turned, {base}"
    name = call.function.__name__
    return [f"{name}({one}) of {call.width} coordinates{what}" for one in call.arguments]
