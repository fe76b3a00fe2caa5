"""Whether the ropes that `phasor.load` reads for an architecture are those of its code.

    python -m tools.verdicts             every architecture of the installed transformers
    python -m tools.verdicts NAME ...    those of these model types or classes

A tiny random model of it runs while recorders stand in its file instead of the functions that
rotate. They record which layers rotate, with which function and which cosines and sines. The
function is then measured, and compared with the ropes that `phasor.load` reads from the config.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from inspect import getattr_static
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tools.rotations import (
    FARTHEST,
    ROWS,
    Grid,
    RotationSignature,
    each_row,
    identify_rows,
    measure_signature,
    parameters,
    rope_error,
    spread_positions,
    tensor_parameters,
)
from tools.tiny_models import (
    foreign_errors,
    installed_model_types,
    model_class,
    not_built,
    special_cases,
    tiny_model,
)
from torch import Tensor, nn

from phasor.describe import original_context
from phasor.errors import ConfigError
from phasor.files.reading import load
from phasor.identification import Identification
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.scaling import Rule

_ATTENTION = "eager_attention_forward"
_ROTATION = re.compile(r"\w*apply_\w*(rotary|rope)\w*")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number between the dots of a path
# tokens of a model that takes no positions
_MAX_CONSECUTIVE = 256


@dataclass(frozen=True, kw_only=True)
class KindVerdict:
    """What the config states for one kind of layer, and how its layers rotate."""

    kind: str  # as `phasor.load` names it
    layers: tuple[int, ...]  # of this kind in the tiny model
    loaded: Rope | None  # that the config states, if it states one
    found: Identification | None  # None where nothing is rotated
    beyond: Identification | None  # the same beyond the original context, where there is a rule
    # of ``loaded`` as a share of what float32 angles explain, so that at most 1 is right
    error: float | None
    # where the model rotates a slice that it has cut out (latent attention): the first coordinate
    # of that in the heads of attention, and their width
    place: tuple[int, int] | None
    wrong: tuple[str, ...]  # a sentence for each difference


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What phasor says about an architecture, and whether that is true of its code."""

    model_type: str
    class_name: str | None = None  # of the class that ran
    kinds: tuple[KindVerdict, ...] = ()
    other_rotations: tuple[str, ...] = ()  # of other vectors than attention's, as an indexer's
    notes: tuple[str, ...] = ()  # limits of the comparison
    wrong: tuple[str, ...] = ()  # a sentence for each difference that concerns no single kind
    not_built: str | None = None  # why nothing ran
    tokens: int = 0  # that were rotated
    farthest: int = 0  # the largest coordinate of their positions

    @property
    def right(self) -> bool:
        """Whether a model ran, and nothing about it is wrong."""
        wrong = self.wrong or any(kind.wrong for kind in self.kinds)
        return self.not_built is None and not wrong


@dataclass(kw_only=True, eq=False)
class Call:
    """One call of a rotation function during a forward pass."""

    layer: int
    function: Callable[..., Any]
    rows: Any  # its cosines and sines, of one sequence
    arguments: tuple[str, ...]  # its parameters for the vectors
    # the vectors after it, [batch, heads, seq, width] or [batch, seq, heads, width]
    rotated: Sequence[Tensor]
    # where they are found in the heads of attention: their first coordinate, the heads' width
    place: tuple[int, int] | None = None

    @property
    def width(self) -> int:
        """The number of coordinates of each vector."""
        return self.rotated[0].shape[-1]

    @property
    def tokens(self) -> int:
        """The number of rotated tokens."""
        return each_row(self.rows)[0].shape[-2]

    @property
    def signature(self) -> RotationSignature | None:
        """The geometry of the function."""
        return measure_signature(self.function, each_row(self.rows)[0].dim() > 2)

    def identify(self, grid: Grid) -> Identification | None:
        """The identified rotation; None where it is not understood or of other tokens."""
        signature = self.signature
        if signature is None or self.tokens != grid.shape[1]:
            return None
        return identify_rows(self.rows, signature, grid)


class _Run(NamedTuple):
    """One forward pass at positions ``grid``, ``[axes, seq]``."""

    grid: Grid
    attention_calls: list[Call]  # of queries and keys
    other_calls: list[Call]


def verdict(name: str, config: Mapping[str, Any] | None = None) -> Verdict:
    """What phasor says about a model type or model class, and whether that is true.

    A tiny random model runs once, or twice where a rule picks the law: within the original context
    and beyond. The reference is the model's own rotation function with the cosines that it gets.
    ``config`` is the content of a ``config.json``; without it the class's defaults count. What
    cannot be built and run is refused.

    >>> found = verdict("gptj")
    >>> found.right, found.kinds[0].loaded.rotary_dim, found.kinds[0].found.pairing
    (True, 64, 'interleaved')
    """
    cls = model_class(name)
    model_type = cls.config_class.model_type
    # read before the model is built: a damaged number must not fill the memory
    full = None if config is None else load({"model_type": model_type, **config})
    model = tiny_model(name, config)
    unchecked = Verdict(model_type=model_type, class_name=cls.__name__)
    try:
        ropes = load(json.loads(model.config.to_json_string(use_diff=False)))
    except ConfigError as error:
        return replace(unchecked, wrong=(f"phasor.load: {error}",))
    # ropes are compared without their kinds, which transformers names where the file may not
    wrong = [
        f"phasor.load says otherwise of {kind} layers before they are cut to a few"
        for kind, rope in ropes.kinds.items()
        if full is not None and rope not in full.kinds.values()
    ]
    with foreign_errors(f"no tiny {cls.__name__} can run"):
        runs = [_run_model(model, grid) for grid in _choose_grids(model, ropes)]
    if not runs[0].attention_calls:
        wrong.append("its rotation was not called, or not by a name that is watched")
    wrong += _judge_other_calls(ropes, runs)
    other_rotations = [
        sentence
        for run in runs
        for call in run.other_calls
        for sentence in _describe_vectors(call, run.grid)
    ]
    note = special_cases()["equal_coordinates"].get(model_type)
    return replace(
        unchecked,
        kinds=tuple(_judge_kind(kind, ropes, runs) for kind in dict.fromkeys(ropes.layer_kinds)),
        other_rotations=tuple(dict.fromkeys(other_rotations)),
        notes=() if note is None else (note,),
        wrong=tuple(wrong),
        tokens=sum(run.grid.shape[1] for run in runs),
        farthest=max(int(run.grid.max()) for run in runs),
    )


# ---- runs of a model ----


def _choose_grids(model: Any, ropes: LayerRopes) -> list[Grid]:
    """Positions for every run: within the context, and beyond it where a rule picks the law."""
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or FARTHEST
    rules = [rope for rope in ropes.kinds.values() if rope and isinstance(rope.scaling, Rule)]
    original_lengths = {length for rope in rules if (length := original_context(rope))}
    end = min(context, FARTHEST, *original_lengths)
    if _numbers_tokens(model):
        return [np.arange(min(end, _MAX_CONSECUTIVE))[None]]
    has_equal = config.model_type in special_cases()["equal_coordinates"]
    n_axes = 1 if has_equal else _count_position_axes(model)
    ends = [end, *(2 * length for length in original_lengths)]
    return [spread_positions(end, n_axes) for end in ends]


def _count_position_axes(model: Any) -> int:
    """How many coordinates a model's positions have: 1, or those of its multimodal rope."""
    for module in model.modules():
        sections = getattr(module, "mrope_section", None)
        if isinstance(sections, dict):
            sections = next(iter(cast("dict[str, Any]", sections).values()), None)
        if sections is not None:
            return len(sections)
    return 1


def _numbers_tokens(model: Any) -> bool:
    """Whether a model takes no positions and numbers its tokens from 0."""
    taken = inspect.signature(model.forward).parameters
    catches_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    takes_positions = "position_ids" in taken or catches_all
    return not takes_positions or model.config.model_type in special_cases()["own_positions"]


def _run_model(model: Any, grid: Grid) -> _Run:
    vocabulary = min(100, model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    inputs = {"input_ids": torch.randint(3, vocabulary, (1, grid.shape[1]), generator=generator)}
    if model.config.model_type in special_cases()["time_inputs"]:
        inputs["t_cond"] = torch.zeros(1, 1, model.config.hidden_size)
    if not _numbers_tokens(model):
        # [axes, seq] -> [1, seq] of one axis, [axes, 1, seq] of several
        inputs["position_ids"] = torch.from_numpy(grid if len(grid) == 1 else grid[:, None])
    calls = record_calls(model, inputs)
    # in a layer of which no call is found in attention, every call counts as attention's
    layers = {call.layer for call in calls if call.place}
    attention_calls = [call for call in calls if call.place or call.layer not in layers]
    return _Run(grid, attention_calls, [call for call in calls if call not in attention_calls])


def record_calls(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Call]:
    """Every call of a rotation function during ``model(**inputs)`` of one sequence, in order."""
    calls: list[Call] = []
    record = functools.partial(_record_rotation, calls)
    with ExitStack() as changes:
        running = _watch_layers(model, changes)
        modules: list[nn.Module] = list(model.modules())
        files = {base.__module__ for module in modules for base in type(module).__mro__}
        for file in map(sys.modules.__getitem__, sorted(files)):
            for name, function in _rotations_in(vars(file)).items():
                _replace(changes, file, name, record(running, function))
            if hasattr(file, _ATTENTION):
                attention = getattr(file, _ATTENTION)
                _replace(changes, file, _ATTENTION, _record_attention(calls, attention))
        # static methods that rotate, such as RoFormer's
        for cls in {type(module) for module in modules}:
            for name in _rotations_in(vars(cls)):
                if isinstance(getattr_static(cls, name), staticmethod):
                    rotation = _split_table(functools.partial(record, running), getattr(cls, name))
                    _replace(changes, cls, name, staticmethod(rotation))
        with torch.no_grad():
            model(**inputs)
    return calls


def _rotations_in(names: Mapping[str, Any]) -> dict[str, Any]:
    rotations = {name: value for name, value in names.items() if _ROTATION.fullmatch(name)}
    return {name: value for name, value in rotations.items() if callable(value)}


def _replace(changes: ExitStack, holder: Any, name: str, value: Any) -> None:
    """Another value of an attribute until the changes are undone."""
    changes.callback(setattr, holder, name, getattr_static(holder, name))
    setattr(holder, name, value)


def _watch_layers(model: nn.Module, changes: ExitStack) -> list[int]:
    """A list whose last item is the number of the layer that is running, filled by hooks."""
    running = [0]

    def leave(*_: Any) -> None:
        running.pop()

    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    for path, module in modules:
        numbers = _NUMBER.findall(path)
        # from the path first: a module that several layers share has a single layer_idx
        layer = int(numbers[-1]) if numbers else getattr(module, "layer_idx", None)

        def enter(*_: Any, layer: int = layer or 0) -> None:
            running.append(layer)

        changes.callback(module.register_forward_pre_hook(enter).remove)
        changes.callback(module.register_forward_hook(leave).remove)
    return running


def _split_table(record: Callable[[Any], Any], function: Any) -> Callable[..., Any]:
    """RoFormer's rotation, by a tensor of sines and then cosines, recorded as by two tensors."""

    def turn_by_rows(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return function(torch.cat((sin, cos), -1), query, key)

    def rotation(table: Tensor, query: Tensor, key: Tensor) -> Any:
        sin, cos = table.chunk(2, -1)
        return recorder(query, key, cos, sin)

    recorder = record(turn_by_rows)
    return rotation


def _record_rotation(
    calls: list[Call], running: Sequence[int], function: Callable[..., Any]
) -> Callable[..., Any]:
    """The rotation function, which also adds each of its calls to ``calls``."""
    names, tensors = tuple(parameters(function)), tensor_parameters(function)

    @functools.wraps(function)
    def recorder(*args: Any, **kwargs: Any) -> Any:
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        returned: Any = function(*args, **kwargs)
        outputs = [returned] if isinstance(returned, Tensor) else list(returned)
        rotated = [output for output in outputs[: len(tensors)] if isinstance(output, Tensor)]
        rows = [values[name] for name in ROWS if name in values]
        # [1, 1, seq, width] -> [seq, width]
        rows = [row.reshape(row.shape[-2:]) if row.dim() > 3 else row for row in rows]
        call = Call(
            layer=running[-1], function=function, rows=rows if len(rows) > 1 else rows[0],
            arguments=tensors[: len(rotated)], rotated=rotated,
        )  # fmt: skip
        calls.append(call)
        return returned

    return recorder


def _record_attention(calls: list[Call], function: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function, which also finds the places of earlier ``calls`` in its heads."""

    @functools.wraps(function)
    def recorder(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        for call in calls:
            for heads in (query, key):
                # a query that was multiplied after its rotation is not found, but its key is; and
                # some models put keys of other tokens beside the sequence
                if call.place is None and heads.shape[2] == call.tokens:
                    call.place = _find_in_head(call, heads[0, 0, -1])
        return function(module, query, key, *args, **kwargs)

    return recorder


def _find_in_head(call: Call, head: Tensor) -> tuple[int, int] | None:
    """The place of a call's vector in the first head of the last token, and the head's width."""
    for x in call.rotated:
        # the last token of the first head, with heads or tokens first
        for vector in (x[0, 0, -1], x[0, -1, 0]) if x.dim() == 4 else (x[0, -1],):
            for start in range(len(head) - call.width + 1):
                if torch.equal(head[start : start + call.width], vector):
                    return start, len(head)
    return None


# ---- comparison with the config ----


def _judge_kind(kind: str, ropes: LayerRopes, runs: Sequence[_Run]) -> KindVerdict:
    layers = tuple(layer for layer, its_kind in enumerate(ropes.layer_kinds) if its_kind == kind)
    loaded = ropes.kinds[kind]
    reports: list[Identification] = []
    errors: list[float] = []
    wrong: list[str] = []
    places: list[tuple[int, int]] = []
    for run in runs:
        calls = [call for call in run.attention_calls if call.layer in layers]
        if not calls:
            if loaded is not None:
                wrong.append("phasor.load states a rope, and nothing was turned")
            continue
        places += [call.place for call in calls if call.place and call.place[1] != call.width]
        if (identification := calls[0].identify(run.grid)) is None:
            wrong.append(f"{calls[0].function.__name__} turns no pairs that phasor knows")
            continue
        reports.append(identification)
        if loaded is None:
            wrong.append("phasor.load states no rope, and vectors were turned")
            continue
        error, differences = compare(loaded.at(int(run.grid.max()) + 1), calls, run.grid)
        errors.append(error)
        wrong += [f"phasor.load: {difference}" for difference in differences]
    return KindVerdict(
        kind=kind,
        layers=layers,
        loaded=loaded,
        found=reports[0] if reports else None,
        beyond=reports[1] if len(reports) > 1 else None,
        error=max(errors, default=None),
        place=places[0] if places else None,
        wrong=tuple(dict.fromkeys(wrong)),
    )


def _judge_other_calls(ropes: LayerRopes, runs: Sequence[_Run]) -> list[str]:
    """A sentence for each rotation beside attention that is no entry of its layer."""
    wrong: dict[str, None] = {}
    for run in runs:
        for call in run.other_calls:
            if call.tokens != run.grid.shape[1] or call.layer >= len(ropes):
                continue
            layer_rope, report = ropes[call.layer], call.identify(run.grid)
            rope = report and report.rope
            if (
                layer_rope is not None
                and rope is not None
                and rope.direction != layer_rope.direction
            ):
                continue  # the output of attention, turned back
            ropes_here = [rope for _, rope, layers in ropes.auxiliary_ropes if call.layer in layers]
            ropes_here += [] if layer_rope is None else [layer_rope]
            length = int(run.grid.max()) + 1
            if all(compare(rope.at(length), [call], run.grid)[1] for rope in ropes_here):
                vectors = ", ".join(_describe_vectors(call, run.grid))
                wrong[f"phasor.load has no entry for {vectors}"] = None
    return list(wrong)


def compare(rope: Rope, calls: Sequence[Call], grid: Grid) -> tuple[float, list[str]]:
    """The worst error of the calls as a share of what float32 explains, and all differences."""
    if len(grid) == 1:
        grid = np.tile(grid, (rope.axes.n_axes, 1))
    if rope.axes.n_axes != len(grid):
        return np.inf, [f"positions of {rope.axes.n_axes} axes, the model's have {len(grid)}"]
    worst, differences = 0.0, dict[str, None]()
    for call in calls:
        signature, width = call.signature, call.width
        start, head_dim = call.place or (None, None)
        if width == rope.head_dim:
            head_dim = width
            start = (
                width - rope.rotary_dim if signature is not None and signature.slice == "end" else 0
            )
        elif width != rope.rotary_dim:
            differences[f"heads of {rope.head_dim}, and vectors of {width} were turned"] = None
            continue
        # `place` tells the slice that a model cuts out itself
        if start not in (None, rope.rotary_start):
            differences[f"a slice from {rope.rotary_start}, the model's from {start}"] = None
        if head_dim not in (None, rope.head_dim):
            differences[f"heads of {rope.head_dim}, the model's are of {head_dim}"] = None
        error = np.inf
        if signature is not None and call.tokens == grid.shape[1]:
            error = rope_error(rope, signature, call.rows, grid)
        worst = max(worst, error)
    if worst > 1:
        differences[f"off by {worst:.3g} times what float32 angles explain"] = None
    return worst, list(differences)


def _describe_vectors(call: Call, grid: Grid) -> list[str]:
    """A sentence about each of the vectors that a call rotated beside attention."""
    report = call.identify(grid)
    rope = report and report.rope
    if call.tokens != grid.shape[1]:
        rotation = ", of other tokens"
    elif rope is None:
        rotation = ": not identified"
    else:
        direction = " backwards" if rope.direction < 0 else ""
        base = "frequencies of their own" if rope.base is None else f"base {rope.base:.15g}"
        rotation = f": {rope.pairing} pairs{direction}, {rope.rotary_dim} turned, {base}"
    name = call.function.__name__
    return [
        f"{name}({argument}) of {call.width} coordinates{rotation}" for argument in call.arguments
    ]


# ---- the table of architectures ----


def table_row(verdict: Verdict, kind: KindVerdict) -> str:
    """What phasor states of one kind of layer: pairs, slice, base, law, axes and the error."""
    rope = kind.loaded or (kind.found and kind.found.rope)
    facts = ["nothing turned"]
    if rope is not None:
        output = "" if rope.output_pairing == rope.pairing else f" to {rope.output_pairing}"
        start, width = rope.rotary_start, rope.head_dim
        if kind.place is not None and rope.rotary_dim == width:
            start, width = kind.place
        facts = [
            rope.pairing + output + (" backwards" if rope.direction < 0 else ""),
            f"{start}:{start + rope.rotary_dim} of {width}",
            "explicit" if rope.base is None else f"base {rope.base:.15g}",
            *([] if rope.scaling is None else [type(rope.scaling).__name__]),
            *([] if rope.axes.n_axes == 1 else [f"{type(rope.axes).__name__} {rope.axes.n_axes}"]),
        ]
    facts += [] if kind.error is None else [f"error {kind.error:.2g}"]
    name = f"{verdict.model_type} ({verdict.class_name})"
    return f"{name}, {len(kind.layers)} {kind.kind}: {', '.join(facts)}"


def main(names: Sequence[str]) -> int:
    """Print the verdict on each architecture of these names; 1 if phasor is wrong about one.

    The error is a share of what float32 angles allow, so that at most 1 is right.
    """
    verdicts: list[Verdict] = []
    for name in names or installed_model_types():
        try:
            verdicts.append(verdict(name))
        except ConfigError as error:
            verdicts.append(Verdict(model_type=name, not_built=str(error)))
        last = verdicts[-1]
        for kind in last.kinds:
            print(table_row(last, kind))
            for sentence in kind.wrong:
                print(f"  wrong: {sentence}")
        for sentence in last.wrong:
            print(f"  wrong: {sentence}")
        for sentence in (*last.other_rotations, *last.notes):
            print(f"  {sentence}")
    if not names:
        verdicts += [Verdict(model_type=name, not_built=why) for name, why in not_built().items()]
    for last in verdicts:
        if last.not_built is not None:
            print(f"{last.model_type}, not built: {last.not_built}")
    counts = Counter(last.right for last in verdicts if last.not_built is None)
    print(
        f"{counts.total()} architectures: {counts[True]} right, {counts[False]} wrong; "
        f"{len(verdicts) - counts.total()} not built."
    )
    return 1 if counts[False] or (names and counts.total() < len(names)) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
