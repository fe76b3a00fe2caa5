"""Live models of transformers, made exact by hooks on their rotary embeddings.

Such a model makes cos and sin in a small module, its rotary embedding, and hands them to every
layer. `patch` reads from the model's config what that module computes, proves it by calling a new
one, and hooks the live one: from then on it returns the same cos and sin, from exact angles. They
are plain tensors, so all that the model does with them stays as it was.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phasor._checks import short_repr, whole
from phasor.angles import cos_sin as exact_cos_sin
from phasor.errors import ConfigError, PhasorError
from phasor.files.configs import load, model_types
from phasor.layers import LayerRopes
from phasor.numpy import rotate
from phasor.rope import Rope
from phasor.scaling import Rule
from phasor.torch._operator.internals import outside_modes, outside_transforms
from phasor.torch.functional import cos_sin

__all__ = ["Checked", "CheckedModule", "Patched", "check", "from_model", "patch", "unpatch"]

#: What foreign code may raise when it is called in a way that it was not written for.
_FOREIGN_ERRORS = (
    TypeError, ValueError, RuntimeError, AttributeError, LookupError, ArithmeticError,
    AssertionError, ImportError,
)  # fmt: skip
_HOOK = "_phasor_hook"  # the attribute in which a patched module keeps its hook
_PARAMETERS = ("x", "position_ids", "layer_type")
#: The buffer in which attention of GPT-J and CodeGen keeps its table of sines and cosines, and the
#: function of its file that makes the table.
_TABLE, _TABLE_MAKER = "embed_positions", "create_sinusoidal_positions"
_ROTATION = re.compile(r"\w*apply_\w*(rotary|rope)\w*")
#: Parts of the names of classes and buffers that speak of a rotation.
_ROTARY = re.compile(r"(?i)rotary|rotate|(?<![a-z])rope(?![a-z])|inv_freq|freqs_cis|sinusoid")
#: Positions for fast pairs, and positions far enough to show slow pairs.
_PROBES = ((0, 1, 2, 3), (1, 64, 4096, 65536))
_MAX_CHECKED = 1 << 16  # positions that `check` compares
_FLOAT32_ROUNDING = 2.0**-24

_Kind = str | None  # of layer, where a module makes cos and sin for several
#: How a module lays out the numbers of pairs: with a copy after them, each twice in a row, or once;
#: or cos and sin as one complex number.
_Layout = Literal["twice", "repeated", "half", "complex"]
_LAYOUTS: tuple[_Layout, ...] = ("twice", "repeated", "half", "complex")
_Grid = NDArray[np.int64]  # positions [axes, seq]


@dataclass(frozen=True, kw_only=True)
class Patched:
    """What `patch` changed; as text, one line."""

    model: str  # the name of its class
    modules: tuple[str, ...]  # paths of the modules whose cos and sin are exact now
    left: tuple[str, ...] = ()  # those of rotary embeddings of pictures and sounds
    already: bool = False  # whether all were patched before, so that nothing has changed

    def __str__(self) -> str:
        state = "are exact already; nothing has changed" if self.already else "are exact now"
        left = f"; left as they are: {_listed(self.left)}" if self.left else ""
        return f"{self.model}: cos and sin of {_listed(self.modules)} {state}{left}"


@dataclass(frozen=True, kw_only=True)
class CheckedModule:
    """The cos and sin of one module, for one kind of layer; as text, a line."""

    path: str
    class_name: str
    kind: str | None  # of layer, where the module makes cos and sin for several
    context: int  # checked positions are below this, evenly spread, and at most 65,536
    error: float  # the largest distance of a cosine or a sine from its exact value; NaN if lost
    dtype: torch.dtype
    rounding: float  # to that dtype: half a unit in the last place of the attention factor
    beyond: int | None  # the first checked position where the distance exceeds that, if any
    lost: str = ""  # a buffer that has lost its numbers, such as ``inv_freq``

    def __str__(self) -> str:
        name = f"{self.path} ({self.class_name})" + (f", {self.kind}" if self.kind else "")
        if self.lost:
            return f"{name}: no cosines, for its {self.lost} is lost; patch repairs it"
        excess = "never" if self.beyond is None else f"from position {self.beyond}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{name}: cosines within {self.error:.1e} of exact over {self.context} positions, "
            f"beyond the rounding of {dtype} ({self.rounding:.1e}) {excess}"
        )


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What `check` found; as text, a line for each module that makes cos and sin."""

    modules: tuple[CheckedModule, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.modules))


def patch(model: nn.Module, *, seq_len: int | None = None) -> Patched:
    """Make the cos and sin of ``model`` exact from now on; prints and returns what changed.

    They come from exact angles, correct to float32 at every position, and are then rounded to the
    dtype that the model computes in. The law of a rule (dynamic NTK, LongRoPE) is picked by the
    positions of each call alone, whatever was called before. Buffers that lost their frequencies
    are written again. No other model changes.

    Args:
        model: A model of transformers, or a part of one.
        seq_len: Pick the law of a rule once, for sequences of this many tokens, so that cached keys
            match all later queries. Without it cached keys keep the law of the call that made them,
            as in transformers.

    Raises:
        ConfigError: If nothing rotates, a rotary embedding is not what its config says, or the
            model is patched already for another ``seq_len``. Nothing has been changed then.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     model = LlamaModel(LlamaConfig(num_hidden_layers=1))
    >>> patched = patch(model)
    LlamaModel: cos and sin of rotary_emb are exact now
    >>> unpatch(model)
    """
    if seq_len is not None:
        whole("seq_len", seq_len, least=1)
    found, left = _read(model)
    hooks = [it.hook if seq_len is None else it.hook.at(seq_len) for it in found]
    for it, hook in zip(found, hooks, strict=True):
        earlier = _hook_of(it.module)
        if earlier is not None and earlier.ropes != hook.ropes:
            raise ConfigError(
                f"seq_len must be as before, and {it.path} was patched for another; "
                "call unpatch(model) first"
            )
    lost = [_lost_buffers(it) for it in found]
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    already = True
    for it, hook, buffers in zip(found, hooks, lost, strict=True):
        for name, buffer in buffers.items():
            setattr(it.module, name, buffer.to(device))
        if _hook_of(it.module) is None:
            hook.register(it.module)
            already = False
    if not already:
        _forget_compiled_code()
    paths = tuple(it.path for it in found)
    report = Patched(model=type(model).__name__, modules=paths, left=tuple(left), already=already)
    print(report)
    return report


def unpatch(model: nn.Module) -> None:
    """Take away what `patch` put into ``model``.

    Raises:
        ConfigError: If no module of the model is patched.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     model = LlamaModel(LlamaConfig(num_hidden_layers=1))
    >>> _ = patch(model)
    LlamaModel: cos and sin of rotary_emb are exact now
    >>> unpatch(model)
    """
    modules = [module for _, module in _named_modules(model) if _hook_of(module) is not None]
    if not modules:
        raise ConfigError(f"model must be patched, and no module of {type(model).__name__} is")
    for module in modules:
        hook: ExactCosSin = module.__dict__.pop(_HOOK)
        hook.remove(module)
    _forget_compiled_code()


def from_model(model: nn.Module) -> LayerRopes:
    """The rope of every layer of a live model, patched or not.

    They are read from the model's config and proved: a new rotary embedding of its class must make
    their cos and sin, and a rotation function of its file must turn by these as they say.

    Args:
        model: A model of transformers, or a part of one.

    Raises:
        ConfigError: As `patch`; also if the model contains several language models.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> with torch.device("meta"):
    ...     ropes = from_model(LlamaModel(LlamaConfig()))
    >>> len(ropes), ropes[0].head_dim, ropes[0].pairing, ropes[0].base
    (32, 128, 'half', 10000.0)
    """
    found, _ = _read(model)
    layers = found[0].layers
    for it in found:
        _lost_buffers(it)
        if it.layers != layers:
            raise ConfigError(
                f"model must be one language model, and {it.path} rotates otherwise than "
                f"{found[0].path}; give the part of it that is meant"
            )
    return layers


def check(model: nn.Module) -> Checked:
    """How far the cosines that ``model`` rotates by, in its present state, are from exact.

    ``model.to(torch.bfloat16)`` rounds frequencies, ``to_empty`` loses them, and the product with
    positions in float32 makes the error of an angle grow with the position. `patch` mends all
    three.

    Args:
        model: A model of transformers, or a part of one, patched or not. It is not changed.

    Raises:
        ConfigError: As `patch`.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> print(check(LlamaModel(small).to(torch.bfloat16)))  # doctest: +ELLIPSIS
    rotary_emb (LlamaRotaryEmbedding): cosines within 3.6e-01 of exact over 2048 positions, ...
    """
    weights = (p for p in model.parameters() if p.is_floating_point() and not p.is_meta)
    weight = next(weights, torch.empty(0))
    found, _ = _read(model)
    checked = [_check_module(it, kind, weight) for it in found for kind in it.hook.ropes]
    return Checked(modules=tuple(checked))


# ---- what a patched module does ----


class ExactCosSin:
    """A forward hook of a rotary embedding: the same cos and sin, from exact angles."""

    _handle: Any = None  # of torch, which removes the hook
    _table: Tensor | None = None  # in place of which an exact one stands now

    def __init__(self, ropes: Mapping[_Kind, Rope], layout: _Layout) -> None:
        # where a Rope turns the other way the rotation function does so, not its sine
        self.ropes = {kind: replace(rope, direction=1) for kind, rope in ropes.items()}
        self.layout: _Layout = layout

    def at(self, seq_len: int) -> ExactCosSin:
        """The same with the laws for ``seq_len`` tokens."""
        return ExactCosSin({k: rope.at(seq_len) for k, rope in self.ropes.items()}, self.layout)

    def register(self, module: nn.Module) -> None:
        """Hook ``module``, or put an exact table into it; the module keeps this."""
        module.__dict__[_HOOK] = self
        if not _holds_table(module):
            self._handle = module.register_forward_hook(self, with_kwargs=True)
            return
        self._table = table = module.get_buffer(_TABLE)
        positions = torch.arange(len(table), device=table.device)
        cos, sin = _make_cos_sin(positions, self.ropes[None], torch.float64)
        setattr(module, _TABLE, torch.cat((sin, cos), -1).to(table.dtype))

    def remove(self, module: nn.Module) -> None:
        """Undo `register`."""
        if self._table is None:
            self._handle.remove()
        else:
            setattr(module, _TABLE, self._table.to(module.get_buffer(_TABLE)))

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        given = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
        rope = self.ropes[given.get("layer_type")]
        like = output if isinstance(output, Tensor) else output[0]
        positions = _positions(given["position_ids"].to(like.device), rope.axes.n_axes)
        is_double = like.dtype in (torch.float64, torch.complex128)
        dtype = torch.float64 if is_double else torch.float32
        cos, sin = _make_cos_sin(positions, rope, dtype)
        if self.layout == "complex":
            return torch.complex(cos, sin)
        return tuple(_lay_out(values, self.layout).to(like.dtype) for values in (cos, sin))


def _positions(position_ids: Tensor, n_axes: int) -> Tensor:
    """A model's positions as a Rope takes them: ``[batch, seq]``, or ``[batch, seq, n_axes]``."""
    if n_axes == 1:
        return position_ids
    # [n_axes, batch, seq], or [batch, seq] where one coordinate stands for all
    by_axis = position_ids if position_ids.dim() == 3 else position_ids[None]
    by_token = by_axis.movedim(0, -1)
    return by_token.expand(*by_token.shape[:-1], n_axes)


def _make_cos_sin(positions: Tensor, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin ``[..., seq, num_pairs]`` with the attention factor."""
    if isinstance(rope.scaling, Rule):
        return _cos_sin_by_rule(positions, rope, rope.scaling, dtype)
    cos, sin = cos_sin(positions, rope, dtype=dtype)
    factor = rope.attention_factor
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def _cos_sin_by_rule(
    positions: Tensor, rope: Rope, rule: Rule, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same under the law for the largest position, without reading that from the device."""
    length = (positions.max() + 1).double()
    plain = length.new_tensor(replace(rope, scaling=None).inv_freq.tolist())
    law = rule.at_lengths(length, plain, torch)
    assert law is not None, "every rule in a config of transformers has it"
    inv_freq, factor = law
    # frequencies that only the device knows are float64, which holds no fixed-point fraction
    angles = positions.unsqueeze(-1).double() * inv_freq
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _lay_out(values: Tensor, layout: _Layout) -> Tensor:
    """Numbers ``[..., num_pairs]`` of pairs as a module returns them."""
    if layout == "twice":
        return torch.cat((values, values), -1)
    if layout == "repeated":
        return values.repeat_interleave(2, -1)
    return values


def _hook_of(module: nn.Module) -> ExactCosSin | None:
    return module.__dict__.get(_HOOK)


def _forget_compiled_code() -> None:
    """Let compiled code see that hooks came or went: once compiled, it does not look again."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


# ---- the rotary embeddings of a model ----


class _Embedding(NamedTuple):
    """A rotary embedding of a model, and what was proved of its class with its config."""

    path: str
    module: nn.Module
    fresh: nn.Module  # a new one: the live one may have been cast, moved or changed
    layers: LayerRopes
    hook: ExactCosSin


def _read(model: nn.Module) -> tuple[list[_Embedding], list[str]]:
    """The proved rotary embeddings of a model, and paths of those of pictures and sounds."""
    known_types = set(model_types())
    found: list[_Embedding] = []
    left: list[str] = []
    unknown: ConfigError | None = None
    proved: dict[tuple[type, str], _Embedding] = {}
    for path, module, config in _rotary_modules(model):
        values = config.to_dict()
        key = type(module), repr(values)
        if values.get("model_type") not in known_types:
            left.append(path)
            says = f"phasor.load knows no model type {values.get('model_type')!r}"
            unknown = unknown or _refusal(path, module, says)
            continue
        if key not in proved:
            proved[key] = _prove(path, module, config)
        found.append(proved[key]._replace(path=path, module=module))
    if not found:
        raise unknown or _no_rotation(model)
    return found, left


def _rotary_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Modules that make cos and sin, each with its config or that of the model around it."""
    configs: dict[str, Any] = {}
    for path, module in _named_modules(model):
        around = configs.get(path.rpartition(".")[0])
        own = getattr(module, "config", None)
        config = configs[path] = own if hasattr(own, "to_dict") else around
        is_rotary = "Rotary" in type(module).__name__ or _holds_table(module)
        if is_rotary and config is not None:
            yield path or type(module).__name__, module, config


def _named_modules(model: object) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "model must be a torch.nn.Module, such as a model of transformers or a part of one, "
            f"got {short_repr(model)}"
        )
    return list(model.named_modules())


def _holds_table(module: nn.Module) -> bool:
    has_table = _TABLE in dict(module.named_buffers(recurse=False))
    return has_table and hasattr(sys.modules[type(module).__module__], _TABLE_MAKER)


class _Table(nn.Module):
    """Answers as a rotary embedding, from a table of sines and cosines ``[positions, width]``."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer(_TABLE, table)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        del x
        sin, cos = self.get_buffer(_TABLE)[position_ids].chunk(2, -1)
        return cos, sin


def _end_of(fresh: nn.Module) -> int:
    """Positions are below this."""
    return len(fresh.get_buffer(_TABLE)) if isinstance(fresh, _Table) else 1 << 62


# ---- the proof ----


@contextmanager
def _isolated_torch_state() -> Generator[None]:
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


@_isolated_torch_state()
def _prove(path: str, module: nn.Module, config: Any) -> _Embedding:
    """The ropes that a config states for a rotary embedding, compared with a new one."""
    cls = cast(Any, type(module))
    taken = tuple(inspect.signature(cls.forward).parameters)[1:]
    if not _holds_table(module) and taken not in (_PARAMETERS, _PARAMETERS[:2]):
        raise _refusal(path, module, f"its forward takes ({', '.join(taken)})")
    try:
        # a key that the class does not read may stay: what it computes is compared
        layers = load(config.to_dict(), strict=False)
    except PhasorError as error:
        raise _refusal(path, module, f"its config cannot be read ({error})") from None
    by_kind = getattr(module, "rope_type", None)
    kinds: list[_Kind] = (isinstance(by_kind, dict) and [*by_kind]) or [None]
    try:
        if _holds_table(module):
            make = getattr(sys.modules[cls.__module__], _TABLE_MAKER)
            fresh: nn.Module = _Table(make(*module.get_buffer(_TABLE).shape))
        else:
            fresh = cls(copy.deepcopy(config))  # a copy, because the class may write into it
        found = {kind: _find_rope(fresh, kind, layers) for kind in kinds}
    except PhasorError:
        raise
    except _FOREIGN_ERRORS as error:
        says = f"a new one, asked for cosines, says {' '.join(str(error).split()) or repr(error)}"
        raise _refusal(path, module, says) from None
    for kind, match in found.items():
        if match is None:
            which = "cosines" if kind is None else f"cosines for {kind} layers"
            says = f"its {which} are not those that its config describes"
            raise _refusal(path, module, says)
    ropes = {kind: match[0] for kind, match in found.items() if match}
    layout = next(match[1] for match in found.values() if match)
    functions = _rotations_beside(cls)
    for rope in ropes.values():
        if not any(_turns_as(it, rope, layout) for it in functions):
            says = f"no rotation of its file turns {rope.pairing} pairs as its config describes"
            raise _refusal(path, module, says)
    return _Embedding(path, module, fresh, layers, ExactCosSin(ropes, layout))


def _find_rope(fresh: nn.Module, kind: _Kind, layers: LayerRopes) -> tuple[Rope, _Layout] | None:
    """The rope of a config whose cos and sin a module makes for a kind of layer, and how."""
    candidates: list[Rope | None] = [layers.kinds.get(cast(str, kind))]
    if kind not in layers.kinds:  # only the class names it so, or no layer here uses it
        candidates = [*layers.ropes, *layers.in_config.unused_blocks.values()]
        candidates += [it.rope for it in layers.beside]
    for rope in dict.fromkeys(candidates):
        layout = None if rope is None else _find_layout(fresh, kind, rope)
        if rope is not None and layout is not None:
            return rope, layout
    return None


def _find_layout(fresh: nn.Module, kind: _Kind, rope: Rope) -> _Layout | None:
    """How a module lays out the cos and sin of ``rope``; None if it makes others."""
    n_axes = rope.axes.n_axes
    if n_axes == 1 and _takes_axes(fresh, kind):
        return None
    layouts = list(_LAYOUTS)
    for probe in _PROBES:
        positions = np.minimum(probe, _end_of(fresh) - 1)
        grid = np.stack([np.roll(positions, axis) for axis in range(n_axes)])
        answer = _call(fresh, grid, kind, torch.empty(0))
        law = replace(rope, direction=1).at(int(grid.max()) + 1)
        allowed = _float32_error(law, grid)  # [seq, num_pairs]
        for layout in layouts[:]:
            distance = _distance(answer, layout, law, grid)
            # a NaN is not close
            if distance is None or not (distance <= _lay_out(allowed, layout)).all():
                layouts.remove(layout)
    return layouts[0] if layouts else None


def _takes_axes(fresh: nn.Module, kind: _Kind) -> bool:
    """Whether a module takes positions of several coordinates ``[axes, batch, seq]``."""
    for count in (2, 3, 4):
        try:
            answer = _call(fresh, np.zeros((count, 1), np.int64), kind, torch.empty(0))
        except _FOREIGN_ERRORS:
            continue
        if (answer if isinstance(answer, Tensor) else answer[0]).dim() == 3:
            return True
    return False


def _call(module: nn.Module, grid: _Grid, kind: _Kind, like: Tensor) -> Any:
    """A module's answer at positions ``[axes, seq]``, for hidden states of a dtype and device."""
    if _holds_table(module):
        module = _Table(module.get_buffer(_TABLE))
    hidden = like.new_zeros(1, grid.shape[1], 1)
    ids = torch.tensor(grid if len(grid) == 1 else grid[:, None], device=like.device)
    # a copy is called, because some modules keep what they were called with
    return copy.deepcopy(module)(hidden, ids, *([] if kind is None else [kind]))


def _distance(answer: Any, layout: _Layout, law: Rope, grid: _Grid) -> Tensor | None:
    """How far cos and sin are from exact, ``[2, seq, width]``; None if they are laid out so not."""
    is_complex = isinstance(answer, Tensor) and answer.is_complex()
    if is_complex is not (layout == "complex"):
        return None
    rows = torch.view_as_real(answer).unbind(-1) if is_complex else answer
    exact = exact_cos_sin(law, grid[0] if len(grid) == 1 else grid.T)
    expected = [_lay_out(torch.from_numpy(it * law.attention_factor), layout) for it in exact]
    if [row.shape for row in rows] != [(1, *it.shape) for it in expected]:
        return None
    pairs = zip(rows, expected, strict=True)
    return torch.stack([(row[0].cpu().double() - it).abs() for row, it in pairs])


def _float32_error(law: Rope, grid: _Grid) -> Tensor:
    """What float32 explains of a distance, ``[seq, num_pairs]``."""
    pairs = law.num_pairs
    angles = grid[list(law.axes.axis_of_pair(pairs))].T * law.inv_freq
    # the logarithm of a frequency is ln(base) times an exponent, and a rounding of that is a
    # relative error; the law, the angle, the cosine and its factor add some roundings more
    roundings = np.log(law.base or 1e4) * np.arange(pairs) / pairs + 8
    error = (np.abs(angles) * roundings + 8) * _FLOAT32_ROUNDING
    return torch.from_numpy(law.attention_factor * error)


def _rotations_beside(cls: type) -> list[Callable[..., Any]]:
    """The rotation functions in the file of a class, and of those that it inherits from."""
    files = [vars(sys.modules[base.__module__]) for base in cls.__mro__ if base is not nn.Module]
    return [it for names in files for name, it in names.items() if _ROTATION.fullmatch(name)]


def _turns_as(function: Callable[..., Any], rope: Rope, layout: _Layout) -> bool:
    """Whether a rotation function, given cos and sin of one token, turns it as ``rope`` does."""
    pairs = rope.num_pairs
    # as wide as what is rotated, with angles that tell pairs apart
    plain = Rope(
        head_dim=2 * pairs,
        pairing=rope.pairing,
        pairing_out=rope.pairing_out,
        direction=rope.direction,
        explicit_inv_freq=tuple(np.linspace(0.1, 1.0, pairs).tolist()),
    )
    x = torch.linspace(0.5, 2.0, 2 * pairs).view(1, 1, 1, -1)  # one token with one head
    angles = torch.from_numpy(plain.inv_freq).float().view(1, 1, -1)
    cos, sin = angles.cos(), angles.sin()
    given = {"cos": _lay_out(cos, layout), "sin": _lay_out(sin, layout)}
    given |= dict.fromkeys(("freqs_cis", "freqs_ci"), torch.complex(cos, sin))
    called = function.forward if isinstance(function, nn.Module) else function
    taken = inspect.signature(called).parameters
    names = [name for name, it in taken.items() if name in given or it.default is it.empty]
    try:
        y = function(**{name: given.get(name, x) for name in names})
    except _FOREIGN_ERRORS:
        return False
    y = y[0] if isinstance(y, tuple) else y
    expected = torch.from_numpy(rotate(x.double().numpy(), 1, plain))
    return y.shape == x.shape and torch.allclose(y.double(), expected, rtol=0, atol=1e-6)


# ---- the live module ----


@_isolated_torch_state()
def _check_module(it: _Embedding, kind: _Kind, weight: Tensor) -> CheckedModule:
    """Compare a module's cosines for hidden states in the dtype and on the device of ``weight``."""
    context = min(it.layers.context or 4096, _end_of(it.fresh))
    count = min(context, _MAX_CHECKED)
    positions = np.linspace(0, context - 1, count).round().astype(np.int64)
    law = it.hook.ropes[kind].at(context)
    live, expected = _buffers_and_factors(it.module), _buffers_and_factors(it.fresh)
    of_kind = [name for name in expected if name in live and name.startswith(kind or "")]
    lost = [name for name in of_kind if _is_lost(live[name], expected[name])]
    dtype, error = weight.dtype, np.full(count, np.nan)
    if not lost:
        grid = np.tile(positions, (law.axes.n_axes, 1))
        answer = _call(it.module, grid, kind, weight)
        row = answer.real if it.hook.layout == "complex" else answer[0]
        distance = _distance(answer, it.hook.layout, law, grid)
        assert distance is not None, "a live module lays out as a new one"
        dtype, error = row.dtype, distance.amax((0, -1)).numpy()
    rounding = torch.finfo(dtype).eps / 2 * law.attention_factor
    # a NaN is not within the rounding either
    inexact = np.flatnonzero(~(error <= rounding))
    return CheckedModule(
        path=it.path,
        class_name=type(it.module).__name__,
        kind=kind,
        context=context,
        error=float(error.max()),
        dtype=dtype,
        rounding=rounding,
        beyond=int(positions[inexact[0]]) if len(inexact) else None,
        lost=lost[0] if lost else "",
    )


@_isolated_torch_state()
def _lost_buffers(it: _Embedding) -> dict[str, Tensor]:
    """What the lost buffers of a live module must hold; changed ones are refused."""
    # a rule writes the frequencies of its last call here; their source is another buffer
    rewritten = {
        "inv_freq" if kind is None else f"{kind}_inv_freq"
        for kind, rope in it.hook.ropes.items()
        if isinstance(rope.scaling, Rule)
    }
    lost: dict[str, Tensor] = {}
    live_values = _buffers_and_factors(it.module)
    for name, expected in _buffers_and_factors(it.fresh).items():
        live = live_values.get(name, expected)
        if _is_lost(live, expected):
            lost[name] = expected.clone()
        elif name not in rewritten and not _is_same(live, expected):
            way_out = f'; if it was lost and not changed, move {it.path} to "meta": patch repairs '
            says = f"its {name} is not what its config says{way_out + 'it' if live.dim() else ''}"
            raise _refusal(it.path, it.module, says)
    return lost


def _buffers_and_factors(module: nn.Module) -> dict[str, Tensor]:
    """What a module multiplies positions and cosines by: its buffers and attention factors."""
    factors = {
        name: torch.as_tensor(value)
        for name, value in vars(module).items()
        if name.endswith("attention_scaling") and isinstance(value, (int, float, Tensor))
    }
    return factors | dict(module.named_buffers(recurse=False))


def _is_same(live: Tensor, expected: Tensor) -> bool:
    """Whether a buffer holds the expected numbers, or these cast to 16 bits."""
    # float16 steps by 6e-8 near zero
    rtol, atol = (0.01, 1e-7) if live.element_size() < 4 else (1e-5, 0.0)
    if live.dim() == 2:  # of a table, whose last angle is off by some roundings of its position
        atol = max(rtol, len(live) * 8 * _FLOAT32_ROUNDING)
    return torch.allclose(live.cpu().float(), expected.float(), rtol=rtol, atol=atol)


def _is_lost(live: Tensor, expected: Tensor) -> bool:
    """Whether a buffer has no memory, or holds what somebody's frequencies never are.

    Frequencies that were changed are still positive and fall from pair to pair, and cosines and
    sines still lie on a circle. Memory that nobody wrote has zeros, NaN, infinities, denormals, or
    numbers in any order.
    """
    if live.is_meta:
        return True
    if live.dim() == 0 or _is_same(live, expected):
        return False
    held, meant = live.cpu().float(), expected.float()
    if live.dim() == 2:
        radius = torch.hypot(*held.chunk(2, -1))
        return not (radius[0, 0] > 0 and torch.allclose(radius, radius[0, 0], rtol=0.02))
    is_normal = held.isfinite() & (held >= torch.finfo(torch.float32).tiny)
    falls = held.diff() < 0
    return not bool(is_normal[meant > 0].all() and falls[meant.diff() < 0].all())


def _refusal(path: str, module: nn.Module, reason: str) -> ConfigError:
    name = type(module).__name__
    return ConfigError(f"{path} ({name}) is not understood: {reason}; nothing was changed")


def _no_rotation(model: nn.Module) -> ConfigError:
    """The error for a model with a rotation of its own, or without any."""
    name = type(model).__name__
    for path, module in _named_modules(model):
        if type(module).__module__.startswith("torch.nn."):
            continue
        names = [type(module).__name__, *(it for it, _ in module.named_buffers(recurse=False))]
        if evidence := next(filter(_ROTARY.search, names), ""):
            return ConfigError(
                f"model must rotate as those of transformers do, and {path or name} "
                f"({type(module).__name__}) of {name} has a rotation of its own ({evidence}): call "
                "phasor.torch.rotate_qk(q, k, positions, rope) in its place; phasor.identify says "
                "which rope that is"
            )
    return ConfigError(
        f"model must have a rotary embedding, and no module of {name} is one: there is nothing to "
        "make exact"
    )


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if paths[3:] else "")
