"""The rotary embeddings of a model of transformers, each with the rope that its config states.

The rope is compared with the output of a new module of the class, because a live one may have been
cast, moved or changed.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phasor._checks import short_repr
from phasor.angles import cos_sin
from phasor.axes import Axial
from phasor.errors import ConfigError, PhasorError, PhasorWarning
from phasor.files.reading import load, model_types
from phasor.layers import LayerRopes
from phasor.numpy import rotate
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch._operator.internals import outside_modes, outside_transforms

#: Errors that other code may raise if it is called in an unexpected way.
_FOREIGN_ERRORS = (
    TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError,
    AssertionError, ImportError,
)  # fmt: skip
PARAMETERS = ("x", "position_ids", "layer_type")
#: The buffer in which attention in GPT-J and CodeGen keeps its table of sines and cosines, and the
#: function in its file that makes the table.
TABLE, _TABLE_MAKER = "embed_positions", "create_sinusoidal_positions"
_ROTATION = re.compile(r"\w*apply_\w*(rotary|rope)\w*")
#: Parts of names of classes and buffers that indicate a rotation.
_ROTARY = re.compile(r"(?i)rotary|rotate|(?<![a-z])rope(?![a-z])|inv_freq|freqs_cis|sinusoid")
#: Positions to test fast pairs, and positions far enough apart to test slow pairs.
_PROBES = ((0, 1, 2, 3), (1, 64, 4096, 65536))
_FLOAT32_ROUNDING = 2.0**-24

Kind = str | None  # the kind of layer, if a module computes cos and sin for several
#: How a module lays out one number per pair: followed by a copy, each number repeated, each number
#: once, or cos and sin as a complex number.
Layout = Literal["twice", "repeated", "half", "complex"]
_LAYOUTS: tuple[Layout, ...] = ("twice", "repeated", "half", "complex")
_Grid = NDArray[np.int64]  # positions [axes, seq]


class RotaryEmbedding(NamedTuple):
    """A rotary embedding of a model, with the rope and layout that its class was seen to use."""

    path: str
    module: nn.Module
    fresh: nn.Module  # a new instance, because the live one may have been cast, moved or changed
    layers: LayerRopes  # the ropes of the model, from its config
    ropes: Mapping[Kind, Rope]  # the rope of the module, for each kind of layer
    layout: Layout


def read(model: nn.Module) -> tuple[list[RotaryEmbedding], list[str]]:
    """The rotary embeddings of a model that phasor can make exact, and paths of the others."""
    embeddings: list[RotaryEmbedding] = []
    unchanged: list[str] = []
    refusals: list[ConfigError] = []
    reason = ""
    proved: dict[tuple[type, str], RotaryEmbedding] = {}
    for path, module, config in _rotary_modules(model):
        values = config.to_dict()
        key = type(module), repr(values)
        try:
            layers = proved[key].layers if key in proved else _load(path, module, values)
            if isinstance(layers, str):
                reason = reason or f"{path} ({type(module).__name__}) is not changed: {layers}"
                unchanged.append(path)
                continue
            if key not in proved:
                proved[key] = _prove(path, module, config, layers)
            embeddings.append(proved[key]._replace(path=path, module=module))
        except ConfigError as error:
            refusals.append(error)
    if refusals:
        hint = "; or pass a submodule without it" if embeddings else ""
        raise ConfigError(f"{refusals[0]}{hint}")
    if not embeddings:
        raise ConfigError(reason) if unchanged else _no_rotation(model)
    return embeddings, unchanged


def _load(path: str, module: nn.Module, values: Mapping[str, Any]) -> LayerRopes | str:
    """The ropes of a config, or the reason if it is not a language model that phasor knows."""
    model_type = values.get("model_type")
    if model_type not in model_types():
        return f"phasor.load does not know the model type {model_type!r}"
    try:
        with warnings.catch_warnings():
            # warnings about the file do not matter here, because the output of the class is
            # compared
            warnings.simplefilter("ignore", PhasorWarning)
            layers = load(values, strict=False)
    except PhasorError as error:
        raise _refusal(path, module, f"its config cannot be read ({error})") from None
    if any(isinstance(rope.axes, Axial) or rope.base is None for rope in layers.ropes if rope):
        return "positions in images are small, so exact angles change nothing"
    return layers


def _rotary_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Modules that compute cos and sin, each with its own config or its parent's."""
    configs: dict[str, Any] = {}
    for path, module in named_modules(model):
        config = getattr(module, "config", None)
        if not hasattr(config, "to_dict"):
            config = configs.get(path.rpartition(".")[0])
        configs[path] = config
        is_rotary = "Rotary" in type(module).__name__ or holds_table(module)
        if is_rotary and config is not None:
            yield path or type(module).__name__, module, config


def named_modules(model: object) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "model must be a torch.nn.Module, such as a model of transformers, "
            f"got {short_repr(model)}"
        )
    return list(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))


def holds_table(module: nn.Module) -> bool:
    has_table = TABLE in dict(module.named_buffers(recurse=False))
    return has_table and hasattr(sys.modules[type(module).__module__], _TABLE_MAKER)


class _Table(nn.Module):
    """A rotary embedding that looks up a table of sines and cosines ``[positions, width]``."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer(TABLE, table)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        del x
        sin, cos = self.get_buffer(TABLE)[position_ids].chunk(2, -1)
        return cos, sin


def end_of(fresh: nn.Module) -> int:
    """Positions are below this."""
    return len(fresh.get_buffer(TABLE)) if isinstance(fresh, _Table) else 1 << 62


# ---- comparison with the config ----


@contextmanager
def isolated_torch_state() -> Generator[None]:
    """Compute on the CPU in float32, whatever device, dtype, mode or transformation is active."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            outside_modes(), outside_transforms(), torch.inference_mode(mode=False),
            torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"),
        ):  # fmt: skip
            yield
    finally:
        torch.set_default_dtype(usual)


@isolated_torch_state()
def _prove(path: str, module: nn.Module, config: Any, layers: LayerRopes) -> RotaryEmbedding:
    """The ropes that a config states for a rotary embedding, confirmed by a new instance."""
    cls = cast(Any, type(module))
    parameters = tuple(inspect.signature(cls.forward).parameters)[1:]
    if not holds_table(module) and parameters not in (PARAMETERS, PARAMETERS[:2]):
        raise _refusal(path, module, f"its forward takes ({', '.join(parameters)})")
    rope_types = getattr(module, "rope_type", None)
    kinds: list[Kind] = (isinstance(rope_types, dict) and [*rope_types]) or [None]
    try:
        if holds_table(module):
            make = getattr(sys.modules[cls.__module__], _TABLE_MAKER)
            fresh: nn.Module = _Table(make(*module.get_buffer(TABLE).shape))
        else:
            fresh = cls(copy.deepcopy(config))  # a copy, because the class may write into it
        matches = {kind: _find_rope(fresh, kind, layers) for kind in kinds}
    except PhasorError:
        raise
    except _FOREIGN_ERRORS as error:
        reason = f"calling a new instance raises {' '.join(str(error).split()) or repr(error)}"
        raise _refusal(path, module, reason) from None
    ropes: dict[Kind, Rope] = {}
    layouts: list[Layout] = []
    for kind, match in matches.items():
        if match is None:
            cosines = "cosines" if kind is None else f"cosines for {kind} layers"
            reason = f"its {cosines} differ from those that its config describes"
            raise _refusal(path, module, reason)
        rope, layout = match
        ropes[kind] = rope
        layouts.append(layout)
    (layout,) = set(layouts)
    functions = _rotation_functions(cls, config)
    for rope in ropes.values():
        if not any(_turns_as(function, rope, layout) for function in functions):
            reason = f"no function in its file turns {rope.pairing} pairs as its config describes"
            raise _refusal(path, module, reason)
    return RotaryEmbedding(path, module, fresh, layers, ropes, layout)


def _find_rope(fresh: nn.Module, kind: Kind, layers: LayerRopes) -> tuple[Rope, Layout] | None:
    """The rope in a config that matches a module's cos and sin for a kind, and their layout."""
    candidates: list[Rope | None] = [layers.kinds.get(cast(str, kind))]
    if kind not in layers.kinds:  # the class has its own name for it, or no layer here uses it
        candidates = [*layers.ropes, *layers.in_config.unused_blocks.values()]
        candidates += [rotation.rope for rotation in layers.auxiliary_ropes]
    for rope in dict.fromkeys(candidates):
        layout = None if rope is None else _find_layout(fresh, kind, rope)
        if rope is not None and layout is not None:
            return rope, layout
    return None


def _find_layout(fresh: nn.Module, kind: Kind, rope: Rope) -> Layout | None:
    """How a module lays out the cos and sin of ``rope``; None if it computes different ones."""
    n_axes = rope.axes.n_axes
    if n_axes == 1 and _takes_axes(fresh, kind):
        return None
    layouts = list(_LAYOUTS)
    for probe in _PROBES:
        positions = np.minimum(probe, end_of(fresh) - 1)
        grid = np.stack([np.roll(positions, axis) for axis in range(n_axes)])
        answer = call(fresh, grid, kind, torch.empty(0))
        law = replace(rope, direction=1).at(int(grid.max()) + 1)
        allowed = _float32_error(law, grid)  # [seq, num_pairs]
        for layout in layouts[:]:
            distance = distance_from_exact(answer, layout, law, grid)
            # NaN is not close
            if distance is None or not (distance <= lay_out(allowed, layout)).all():
                layouts.remove(layout)
    return layouts[0] if layouts else None


def _takes_axes(fresh: nn.Module, kind: Kind) -> bool:
    """Whether a module takes positions with several coordinates ``[axes, batch, seq]``."""
    for count in (2, 3, 4):
        try:
            answer = call(fresh, np.zeros((count, 1), np.int64), kind, torch.empty(0))
        except _FOREIGN_ERRORS:
            continue
        if (answer if isinstance(answer, Tensor) else answer[0]).dim() == 3:
            return True
    return False


def call(module: nn.Module, grid: _Grid, kind: Kind, weight: Tensor) -> Any:
    """A module's output at positions ``[axes, seq]``, for the dtype and device of ``weight``."""
    if holds_table(module):
        module = _Table(module.get_buffer(TABLE))
    hidden = weight.new_zeros(1, grid.shape[1], 1)
    ids = torch.tensor(grid if len(grid) == 1 else grid[:, None], device=weight.device)
    # call a copy, because some modules remember their last call
    return copy.deepcopy(module)(hidden, ids, *([] if kind is None else [kind]))


def distance_from_exact(answer: Any, layout: Layout, law: Rope, grid: _Grid) -> Tensor | None:
    """The errors of cos and sin, ``[2, seq, width]``; None if their layout does not match."""
    is_complex = isinstance(answer, Tensor) and answer.is_complex()
    if is_complex is not (layout == "complex"):
        return None
    rows = torch.view_as_real(answer).unbind(-1) if is_complex else answer
    exact = cos_sin(grid[0] if len(grid) == 1 else grid.T, law)
    expected = [lay_out(torch.from_numpy(row * law.attention_factor), layout) for row in exact]
    if [row.shape for row in rows] != [(1, *exact_row.shape) for exact_row in expected]:
        return None
    pairs = zip(rows, expected, strict=True)
    return torch.stack([(row[0].cpu().double() - exact_row).abs() for row, exact_row in pairs])


def _float32_error(law: Rope, grid: _Grid) -> Tensor:
    """The error that float32 arithmetic can cause, ``[seq, num_pairs]``."""
    pairs = law.num_pairs
    angles = grid[list(law.axes.axis_of_pair(pairs))].T * law.inv_freq
    # the logarithm of a frequency is ln(base) times an exponent, and rounding it is a relative
    # error; the law, the angle, the cosine and its factor add a few roundings
    roundings = np.log(law.base or 1e4) * np.arange(pairs) / pairs + 8
    error = (np.abs(angles) * roundings + 8) * _FLOAT32_ROUNDING
    return torch.from_numpy(law.attention_factor * error)


def _rotation_functions(cls: type, config: Any) -> list[Callable[..., Any]]:
    """The rotation functions in the files of a class and of its base classes."""
    files = [vars(sys.modules[base.__module__]) for base in cls.__mro__ if base is not nn.Module]
    functions = {
        name: function
        for names in files
        for name, function in names.items()
        if _ROTATION.fullmatch(name)
    }
    suffix = "_interleave"
    is_latent = getattr(config, "qk_rope_head_dim", None) is not None
    if is_latent and any(name.endswith(suffix) for name in functions):
        # latent attention uses this one of the file's two functions by default
        is_used = getattr(config, "rope_interleave", True)
        functions = {
            name: function
            for name, function in functions.items()
            if name.endswith(suffix) is is_used
        }
    return list(functions.values())


def _turns_as(function: Callable[..., Any], rope: Rope, layout: Layout) -> bool:
    """Whether a rotation function, called with cos and sin, turns a token as ``rope`` does."""
    pairs = rope.num_pairs
    # a row as wide as the rotated slice, with a different angle for each pair
    inv_freq = np.linspace(0.1, 1.0, pairs)
    plain = Rope(
        head_dim=2 * pairs,
        pairing=rope.pairing,
        pairing_out=rope.pairing_out,
        direction=rope.direction,
        explicit_inv_freq=tuple(map(float, inv_freq)),
    )
    x = torch.linspace(0.5, 2.0, 2 * pairs).view(1, 1, 1, -1)  # one token with one head
    # at position 1: [1, 1, num_pairs]
    angles = torch.from_numpy(inv_freq[None, None])
    cos, sin = angles.cos().float(), angles.sin().float()
    arguments = {"cos": lay_out(cos, layout), "sin": lay_out(sin, layout)}
    arguments |= dict.fromkeys(("freqs_cis", "freqs_ci"), torch.complex(cos, sin))
    forward = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(forward).parameters
    names = [
        name
        for name, parameter in parameters.items()
        if name in arguments or parameter.default is parameter.empty
    ]
    try:
        answer: Any = function(**{name: arguments.get(name, x) for name in names})
    except _FOREIGN_ERRORS:
        return False
    y = cast(Tensor, answer[0] if isinstance(answer, tuple) else answer)
    expected = torch.from_numpy(rotate(x.double().numpy(), 1, plain))
    return y.shape == x.shape and torch.allclose(y.double(), expected, rtol=0, atol=1e-6)


def lay_out(values: Tensor, layout: Layout) -> Tensor:
    """One number per pair, ``[..., num_pairs]``, in the layout of a module."""
    if layout == "twice":
        return torch.cat((values, values), -1)
    if layout == "repeated":
        return values.repeat_interleave(2, -1)
    return values


# ---- buffers of the live module ----


@isolated_torch_state()
def lost_buffers(embedding: RotaryEmbedding) -> dict[str, Tensor]:
    """The right contents of lost buffers of a live module; changed buffers are an error."""
    # a rule writes the frequencies of its last call here; it reads them from another buffer
    rewritten = {
        "inv_freq" if kind is None else f"{kind}_inv_freq"
        for kind, rope in embedding.ropes.items()
        if isinstance(rope.scaling, Rule)
    }
    lost: dict[str, Tensor] = {}
    live_values = buffers_and_factors(embedding.module)
    for name, expected in buffers_and_factors(embedding.fresh).items():
        live = live_values.get(name, expected)
        if is_lost(live, expected):
            lost[name] = expected.clone()
        elif name not in rewritten and not _is_same(live, expected):
            reason = f"its {name} differs from its config"
            if live.dim():
                reason += f'; if it was lost, not changed, move {embedding.path} to "meta" '
                reason += "and patch repairs it"
            raise _refusal(embedding.path, embedding.module, reason)
    return lost


def buffers_and_factors(module: nn.Module) -> dict[str, Tensor]:
    """A module's buffers and attention factors, which determine its cosines."""
    factors = {
        name: torch.as_tensor(value)
        for name, value in vars(module).items()
        if name.endswith("attention_scaling") and isinstance(value, (int, float, Tensor))
    }
    return factors | dict(module.named_buffers(recurse=False))


def _is_same(live: Tensor, expected: Tensor) -> bool:
    """Whether a buffer holds the expected numbers, perhaps cast to 16 bits."""
    # float16 steps by 6e-8 near zero
    rtol, atol = (0.01, 1e-7) if live.element_size() < 4 else (1e-5, 0.0)
    if live.dim() == 2:  # a table, whose last angle is off by a few roundings of its position
        atol = max(rtol, len(live) * 8 * _FLOAT32_ROUNDING)
    return torch.allclose(live.cpu().float(), expected.float(), rtol=rtol, atol=atol)


def is_lost(live: Tensor, expected: Tensor) -> bool:
    """Whether a buffer has no memory, or holds numbers that cannot be frequencies.

    Changed frequencies are still positive and decrease from pair to pair, and cosines and sines
    still lie on a circle. Uninitialized memory has zeros, NaN, infinities, denormals, or numbers in
    any order.
    """
    if live.is_meta:
        return True
    if live.dim() == 0 or _is_same(live, expected):
        return False
    values = live.cpu().float()
    tiny = torch.finfo(torch.float32).tiny
    if live.dim() == 2:
        sin, cos = values.chunk(2, -1)
        radius = torch.hypot(sin, cos)
        is_circle = radius.isfinite().all() and torch.allclose(radius, radius[0, 0], 0.02, 0.0)
        return not (is_circle and radius[0, 0] >= tiny and not sin[0].any())
    is_normal = values.isfinite() & (values >= tiny)
    falls = values.diff() < 0
    exact = expected.float()
    return not bool(is_normal[exact > 0].all() and falls[exact.diff() < 0].all())


def _refusal(path: str, module: nn.Module, reason: str) -> ConfigError:
    name = type(module).__name__
    return ConfigError(f"{path} ({name}) cannot be made exact: {reason}; nothing was changed")


def _no_rotation(model: nn.Module) -> ConfigError:
    """The error for a model with its own rotation code, or without any."""
    name = type(model).__name__
    for path, module in named_modules(model):
        buffers = module.named_buffers(recurse=False)
        names = [type(module).__name__, *(buffer for buffer, _ in buffers)]
        if evidence := next(filter(_ROTARY.search, names), ""):
            return ConfigError(
                f"model must rotate as in transformers, but {path or name} "
                f"({type(module).__name__}) of {name} has its own rotation ({evidence}): call "
                "phasor.torch.rotate_qk(q, k, positions, rope) instead; phasor.identify finds "
                "the rope"
            )
    return ConfigError(
        f"model must have a rotary embedding, but no module of {name} is one: there is nothing to "
        "make exact"
    )
