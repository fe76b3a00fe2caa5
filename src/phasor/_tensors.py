"""Checks of tensors, positions, cos and sin, for every framework.

They look at shapes and dtypes only, so no framework is imported. Shapes are ``[..., seq, heads,
head_dim]`` here; `swap_heads` converts those with heads first. ``heads_first`` is the caller's
layout, which messages need.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from phasor._checks import ErrorType, boolean, number, whole
from phasor.errors import PositionError, SpecError, TensorError
from phasor.layers import rope_hint
from phasor.pairings import Pairing
from phasor.rope import Rope
from phasor.scaling import Rule

#: Shape of a tensor with heads, by ``heads_first``.
LAYOUTS = {False: "[..., seq, heads, head_dim]", True: "[..., heads, seq, head_dim]"}

#: The dtypes that can be rotated, and the dtypes of positions, by the names of all frameworks.
DTYPES = ("float64", "float32", "bfloat16", "float16")
POSITION_DTYPES = (
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "float64", "float32"),
)
_REFUSED_DTYPES = {
    "uint64": "it holds numbers above int64; cast to int64",
    "bool": "this is a mask; phasor.positions.padded turns a mask into positions",
    "bfloat16": "bfloat16 cannot tell 256 from 257",
    "float16": "float16 cannot tell 2048 from 2049",
    "float128": "cast to float64",
    "object": "some are not integers or floats of at most 64 bits",
}
_NO_GRADIENT = "positions must not require a gradient, because none is computed"


@dataclass(frozen=True)
class Arrays:
    """A framework's arrays: their type and dtypes, and how to read positions."""

    kind: type
    name: str  # with its article
    dtypes: Sequence[Any]  # the dtypes that can be rotated
    position_dtypes: Container[Any]
    #: Detaches positions; asking for their gradient is an error.
    stop_gradient: Callable[[Any], Any]
    #: Reads positions that are not arrays of this framework, such as lists, onto a device.
    read_host: Callable[[Any, Any], Any]
    #: The fault of an array of the right type; "" if it has none.
    find_fault: Callable[[Any], str] = lambda _: ""
    #: Where an array is; None in frameworks that move arrays themselves.
    get_device: Callable[[Any], Any] = lambda _: None

    def check_call(
        self,
        xs: Sequence[Any],
        positions: Any,
        rope: Rope,
        inverse: bool,
        gain: float | None,
        heads_first: bool,
    ) -> tuple[Any, float, Pairing, Pairing]:
        """Check a call; return positions, gain, and the pairings of the input and the output."""
        check_rope(rope, positions=positions)
        positions = self.fit_positions(positions, xs, rope, heads_first)
        gain = rope.attention_factor if gain is None else number("gain", gain)
        if not boolean("inverse", inverse):
            return positions, gain, rope.pairing, rope.output_pairing
        return positions, undone_gain(gain), rope.output_pairing, rope.pairing

    def fit_positions(
        self,
        positions: Any,
        xs: Sequence[Any],
        rope: Rope,
        heads_first: bool = False,
        names: Sequence[str] | None = None,
    ) -> Any:
        """Check positions, and that ``xs`` fit them, ``rope`` and each other; return positions."""
        shapes = self._check_all(xs, heads_first, rope.head_dim, names)
        device = self.get_device(xs[0])
        check_shared_tokens(shapes[0], shapes[-1], heads_first)
        positions = self.read_positions(positions, rope, device)
        check_placed(positions.shape, shapes[0], rope, heads_first)
        return positions

    def check_rows(self, cos: Any, sin: Any) -> None:
        """Refuse cos and sin unless both are floating-point arrays of the same shape."""
        for name, row in (("cos", cos), ("sin", sin)):
            self.check_array(name, row, "[..., seq, num_pairs]", 1)
        self.check_device("sin", sin, self.get_device(cos))
        check_same_shape(cos.shape, sin.shape)

    def check_turn(
        self,
        xs: Sequence[Any],
        cos: Any,
        rotary_start: int,
        head_dim: int | None,
        heads_first: bool,
    ) -> bool:
        """Whether cos is by head; arrays that do not fit cos or each other are refused."""
        check_one_or_two("a Rotation", len(xs))
        shapes = self._check_all(xs, heads_first, head_dim)
        self.check_device("rotation", cos, self.get_device(xs[0]))
        check_shared_tokens(shapes[0], shapes[-1], heads_first)
        has_heads = [check_rows(cos.shape, shape, rotary_start, heads_first) for shape in shapes]
        return has_heads[0]

    def read_positions(self, positions: Any, rope: Rope, device: Any = None) -> Any:
        """Positions with a coordinate for each axis of ``rope``."""
        if isinstance(positions, self.kind):
            self.check_kind("positions", positions, PositionError)
            check_position_dtype(positions.dtype, self.position_dtypes)
            self.check_device("positions", positions, device, PositionError)
            readable = self.stop_gradient(positions)
        else:
            readable = self.read_host(positions, device)
        check_coordinates(readable.shape, rope)
        return readable

    def check_heads(
        self, name: str, x: Any, heads_first: bool = False, head_dim: int | None = None
    ) -> Sequence[int]:
        """The shape of ``x`` with tokens before heads; its heads must be ``head_dim`` wide."""
        self.check_array(name, x, LAYOUTS[boolean("heads_first", heads_first)], 3)
        if head_dim is not None:
            check_width(name, x.shape, head_dim)
        return swap_heads(x.shape) if heads_first else x.shape

    def check_array(self, name: str, x: Any, layout: str, least: int) -> None:
        """Refuse anything but an array of a supported dtype with at least ``least`` dimensions."""
        self.check_kind(name, x)
        check_floating(name, x.dtype, self.dtypes, x.shape, layout, least)

    def check_kind(self, name: str, x: Any, error: ErrorType = TensorError) -> None:
        """Refuse anything but a usable array of this framework."""
        is_array = isinstance(x, self.kind)
        fault = self.find_fault(x) if is_array else type(x).__name__
        if x is None and name in ("q", "k"):
            fault += "; to rotate a single tensor use rotate"
        if fault:
            raise error(f"{name} must be {self.name}, got {fault}")

    def check_device(self, name: str, x: Any, device: Any, error: ErrorType = TensorError) -> None:
        """Refuse an array that is not where the others are."""
        if self.get_device(x) != device:
            where = self.get_device(x)
            raise error(f"{name} must be on the device of the tensors ({device}), got {where}")

    def _check_all(
        self,
        xs: Sequence[Any],
        heads_first: bool,
        head_dim: int | None,
        names: Sequence[str] | None = None,
    ) -> Sequence[Sequence[int]]:
        """The shapes of ``xs`` with tokens before heads; all are on one device."""
        shapes: list[Sequence[int]] = []
        for name, x in zip(names or names_of(xs), xs, strict=True):
            shapes.append(self.check_heads(name, x, heads_first, head_dim))
            self.check_device(name, x, self.get_device(xs[0]))
        return shapes

    def count_positions(self, x: Any, rope: Rope, offset: Any, xp: Any) -> Any:
        """Positions ``offset, offset + 1, ...`` of the tokens of ``x``, which has heads first."""
        check_counts_tokens(rope)
        length = max(1, self.check_heads("x", x, True, rope.head_dim)[-3])
        if not isinstance(offset, self.kind):
            bounds: Any = {"least": -(2**63), "most": 2**63 - length}
            offset = xp.array(whole("offset", offset, **bounds, error=PositionError), xp.int64)
        elif not xp.issubdtype(offset.dtype, xp.integer):
            raise PositionError(
                f"offset must be a whole number, or an array of them, got {offset.dtype}; "
                "pass fractional positions as positions"
            )
        first = offset.astype(xp.int64)[..., None]
        # another kernel launch would cost a tenth of the time of decoding a token
        return first if length == 1 else first + xp.arange(length)


def names_of(xs: Sequence[Any]) -> tuple[str, ...]:
    """The names of the arrays in the public functions."""
    return ("x",) if len(xs) == 1 else ("q", "k")


def swap_heads(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape with its dimensions of tokens and heads exchanged, if it has both."""
    return *shape[:-3], *shape[-2:-1], *shape[-3:-2], *shape[-1:]


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether ``shape`` broadcasts to ``target`` without changing ``target``."""
    if len(shape) > len(target):
        return False
    lengths = zip(reversed(shape), reversed(target), strict=False)
    # n == m first: under torch.compile, comparing a dynamic length with 1 would add a guard
    return all(n == m or n == 1 for n, m in lengths)


def misfit(shape: Sequence[int], x: Sequence[int], heads_first: bool, dims: int = -2) -> str:
    """The end of an error if ``shape`` does not broadcast to ``x[:dims]``, else ""."""
    if broadcasts(shape, x[:dims]):
        return ""
    fits_other = broadcasts(shape, swap_heads(x)[:dims])
    return (
        f"the leading dimensions {list(x[:dims])} of x {LAYOUTS[heads_first]}, got {list(shape)}"
        f"{_other_layout('x is', heads_first) if fits_other else ''}"
    )


def check_rope(rope: Any, name: str = "rope", *, positions: Any = 0) -> None:
    """Refuse anything but a Rope with a static law; and positions that are None or a Rope."""
    if isinstance(positions, Rope):
        raise SpecError(
            f"positions come before {name}, got them in the opposite order: pass the tensor, then "
            f"positions, then {name}"
        )
    if not isinstance(rope, Rope):
        raise SpecError(f"{name} must be a phasor.Rope, got {type(rope).__name__}{rope_hint(rope)}")
    if positions is None:
        raise PositionError(
            "positions must be given, got None; for one sequence pass torch.arange(seq), or use "
            "phasor.torch.RotaryEmbedding, which counts them itself"
        )
    if isinstance(rope.scaling, Rule):
        rope.law()  # raises the error that asks for rope.at(seq_len)


def check_counts_tokens(rope: Rope) -> None:
    """Refuse to count positions for a Rope of several axes."""
    if rope.axes.n_axes > 1:
        raise PositionError(
            f"positions must be given for a Rope of {rope.axes.n_axes} axes, got None; "
            "phasor.positions has grid for images and videos, multimodal for text with images, "
            "and every_axis for text"
        )


def check_no_other(offset: Any, cu_seqlens: Any = None) -> None:
    """Refuse an offset other than 0, or cu_seqlens, if positions are given."""
    if cu_seqlens is not None or not (type(offset) is int and offset == 0):
        name = "offset" if cu_seqlens is None else "cu_seqlens"
        raise PositionError(
            f"positions and {name} exclude each other; pass only one: positions are final, "
            "nothing is added to them"
        )


def check_floating(
    name: str, dtype: Any, dtypes: Sequence[Any], shape: Sequence[int], layout: str, least: int
) -> None:
    """Refuse a dtype outside ``dtypes``, and fewer dimensions than ``least``."""
    if dtype not in dtypes:
        *names, last = (str(supported).rpartition(".")[2] for supported in dtypes)
        raise TensorError(f"{name} must be {', '.join(names)} or {last}, got {dtype}")
    if len(shape) < least:
        raise TensorError(f"{name} must be {layout}, got shape {list(shape)}")


def check_width(name: str, shape: Sequence[int], head_dim: int) -> None:
    """Refuse a tensor whose heads are not ``head_dim`` wide."""
    if shape[-1] != head_dim:
        raise TensorError(f"{name} must end in head_dim ({head_dim}), got {shape[-1]}")


def check_shared_tokens(q: Sequence[int], k: Sequence[int], heads_first: bool) -> None:
    """Refuse a query and a key that do not belong to the same tokens."""
    if q[:-2] != k[:-2]:
        fits_other = swap_heads(q)[:-2] == swap_heads(k)[:-2]
        raise TensorError(
            f"q and k must share their tokens [..., seq], got {list(q[:-2])} and {list(k[:-2])}; "
            f"rotate each with its own positions"
            f"{_other_layout('q and k are', heads_first) if fits_other else ''}"
        )


def check_position_dtype(dtype: Any, dtypes: Container[Any]) -> None:
    """Refuse positions of a dtype outside ``dtypes``."""
    if dtype not in dtypes:
        raise position_dtype_error(dtype)


def position_dtype_error(dtype: Any) -> PositionError:
    """The error for positions of an unsupported dtype, in any framework."""
    name = str(dtype).rpartition(".")[2]
    reason = _REFUSED_DTYPES.get(name, "a position is a real number that fits in int64 or float64")
    return PositionError(f"positions must be integers, float32 or float64, got {dtype}: {reason}")


def position_gradient_error() -> PositionError:
    """The error for positions that require a gradient."""
    return PositionError(
        f"{_NO_GRADIENT}; to learn angles, make a Rotation from your own cos and sin: these get "
        "gradients"
    )


def refuse_position_gradient(*_: Any) -> NoReturn:
    """Raise `position_gradient_error` where a derivative of positions would be computed."""
    raise position_gradient_error()


def check_coordinates(shape: Sequence[int], rope: Rope) -> None:
    """Refuse positions without a coordinate for each axis of ``rope``."""
    n_axes = rope.axes.n_axes
    if n_axes > 1 and (len(shape) == 0 or shape[-1] != n_axes):
        hint = "phasor.positions.every_axis repeats text positions"
        if len(shape) > 1 and shape[0] == n_axes:
            hint = (
                "if the axes come first, as in transformers, move them to the end: "
                "positions.movedim(0, -1) for a tensor, np.moveaxis(positions, 0, -1) for an array"
            )
        raise PositionError(
            f"positions must end in one coordinate per axis ({n_axes}) for "
            f"{type(rope.axes).__name__} axes, got shape {list(shape)}; {hint}"
        )


def check_placed(shape: Sequence[int], x: Sequence[int], rope: Rope, heads_first: bool) -> None:
    """Refuse positions that do not broadcast to the tokens of ``x``."""
    problem = misfit(shape[:-1] if rope.axes.n_axes > 1 else shape, x, heads_first)
    if problem:
        raise PositionError(f"positions must broadcast to {problem}")


def check_same_shape(cos: Sequence[int], sin: Sequence[int]) -> None:
    """Refuse cos and sin of different shapes."""
    if cos != sin:
        raise TensorError(f"sin must have the shape of cos {list(cos)}, got {list(sin)}")


def check_rows(cos: Sequence[int], x: Sequence[int], rotary_start: int, heads_first: bool) -> bool:
    """Whether cos and sin are by head; an error if they do not fit ``x``."""
    if rotary_start + 2 * cos[-1] > x[-1]:
        raise TensorError(
            f"cos must hold one entry per pair: rotary_start + 2 * num_pairs is at most head_dim "
            f"({x[-1]}), got {rotary_start} + 2 * {cos[-1]}; if cos repeats every entry, pass "
            "its first half"
        )
    has_heads = len(cos) >= len(x)
    problem = misfit(cos[:-1], x, heads_first, -1 if has_heads else -2)
    if problem:
        raise TensorError(
            f"cos and sin{' by head' if has_heads else ''} must broadcast to {problem}"
        )
    return has_heads


def check_one_or_two(name: str, count: int) -> None:
    """Refuse to rotate anything but one tensor, or a query and a key."""
    if count not in (1, 2):
        raise TensorError(
            f"{name} takes one tensor, or a query and a key, got {count}; values are not rotated"
        )


def undone_gain(gain: float) -> float:
    """The gain of the inverse rotation."""
    if gain == 0.0:
        raise SpecError("gain must not be 0 with inverse=True: nothing undoes it")
    return 1.0 / gain


def _other_layout(subject: str, heads_first: bool) -> str:
    """A hint for an error about a tensor whose shape would fit the other layout."""
    advice = "leave heads_first out" if heads_first else "pass heads_first=True"
    return f"; if {subject} {LAYOUTS[not heads_first]}, {advice}"
