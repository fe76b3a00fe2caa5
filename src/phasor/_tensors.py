"""What tensors of heads, their positions and rows must be, in any framework.

Told by shapes and dtypes, so that no framework is imported. Shapes are ``[..., seq, heads,
head_dim]``, also where heads came first: `swap_heads` is their way there. ``heads_first`` says how
the caller laid them out, for messages.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from phasor.errors import PositionError, SpecError, TensorError
from phasor.layers import rope_hint
from phasor.rope import Rope
from phasor.scaling import Rule

#: Shape of a tensor with heads, by ``heads_first``.
LAYOUTS = {False: "[..., seq, heads, head_dim]", True: "[..., heads, seq, head_dim]"}

#: The dtypes that are rotated, and those of positions, by the names that all frameworks have.
DTYPES = ("float64", "float32", "bfloat16", "float16")
POSITION_DTYPES = (
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "float64", "float32"),
)
_REFUSED_DTYPES = {
    "uint64": "those from 2**63 on are not int64; cast them to int64",
    "bool": "a bool is a mask; phasor.positions.padded makes positions of one",
    "bfloat16": "bfloat16 cannot tell 256 from 257",
    "float16": "float16 cannot tell 2048 from 2049",
}


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
    """What ``shape`` does not broadcast to, the first ``dims`` dimensions of ``x``; else ""."""
    if broadcasts(shape, x[:dims]):
        return ""
    fits_other = broadcasts(shape, swap_heads(x)[:dims])
    return (
        f"the leading dimensions {list(x[:dims])} of x {LAYOUTS[heads_first]}, got {list(shape)}"
        f"{_other_layout('x is', heads_first) if fits_other else ''}"
    )


def check_rope(rope: Any, name: str = "rope") -> None:
    """Refuse anything but a Rope whose law is known."""
    if not isinstance(rope, Rope):
        raise SpecError(f"{name} must be a phasor.Rope, got {type(rope).__name__}{rope_hint(rope)}")
    if isinstance(rope.scaling, Rule):
        rope.law()  # which says that the rule has to pick it first


def check_counts_tokens(rope: Rope) -> None:
    """Refuse to count positions for a Rope of several axes."""
    if rope.axes.n_axes > 1:
        raise PositionError(
            f"positions must be given for a Rope of {rope.axes.n_axes} axes, got None; "
            "phasor.positions.grid makes those of images and videos, multimodal those of text with "
            "images in it, every_axis those of text"
        )


def check_floating(
    name: str, dtype: Any, dtypes: Sequence[Any], shape: Sequence[int], layout: str, least: int
) -> None:
    """Refuse a dtype that is none of ``dtypes``, and fewer dimensions than ``least``."""
    if dtype not in dtypes:
        *most, last = (str(one).rpartition(".")[2] for one in dtypes)
        raise TensorError(f"{name} must be {', '.join(most)} or {last}, got {dtype}")
    if len(shape) < least:
        raise TensorError(f"{name} must be {layout}, got shape {list(shape)}")


def check_width(name: str, shape: Sequence[int], rope: Rope) -> None:
    """Refuse a tensor whose heads are not those of ``rope``."""
    if shape[-1] != rope.head_dim:
        raise TensorError(f"{name} must end in head_dim ({rope.head_dim}), got {shape[-1]}")


def check_shared_tokens(q: Sequence[int], k: Sequence[int], heads_first: bool) -> None:
    """Refuse a query and a key of different tokens."""
    if q[:-2] != k[:-2]:
        fits_other = swap_heads(q)[:-2] == swap_heads(k)[:-2]
        raise TensorError(
            f"q and k must share their tokens [..., seq], got {list(q[:-2])} and {list(k[:-2])}; "
            f"rotate them one by one"
            f"{_other_layout('q and k are', heads_first) if fits_other else ''}"
        )


def check_position_dtype(dtype: Any, dtypes: Container[Any]) -> None:
    """Refuse positions of a dtype that is none of ``dtypes``."""
    if dtype not in dtypes:
        name = str(dtype).rpartition(".")[2]
        reason = _REFUSED_DTYPES.get(
            name, "a position is a real number that int64 or float64 holds"
        )
        raise PositionError(
            f"positions must be integers, float32 or float64, got {dtype}: {reason}"
        )


def position_gradient_error() -> PositionError:
    """The refusal of positions that want a gradient."""
    return PositionError(
        "positions must not require a gradient, for none is computed; "
        "rotate_by differentiates with respect to cos and sin"
    )


def check_coordinates(shape: Sequence[int], rope: Rope) -> None:
    """Refuse positions without a coordinate for each axis of ``rope``."""
    n_axes = rope.axes.n_axes
    if n_axes > 1 and (len(shape) == 0 or shape[-1] != n_axes):
        hint = "phasor.positions.every_axis repeats text positions"
        if len(shape) > 1 and shape[0] == n_axes:
            hint = (
                "if the axes come first, as in transformers, move them to the end: movedim(0, -1) "
                "of a tensor, np.moveaxis(positions, 0, -1) of an array"
            )
        raise PositionError(
            f"positions must end in one coordinate per axis ({n_axes}) for "
            f"{type(rope.axes).__name__} axes, got shape {list(shape)}; {hint}"
        )


def check_placed(shape: Sequence[int], x: Sequence[int], rope: Rope, heads_first: bool) -> None:
    """Refuse positions that do not broadcast to the tokens of ``x``."""
    wrong = misfit(shape[:-1] if rope.axes.n_axes > 1 else shape, x, heads_first)
    if wrong:
        raise PositionError(f"positions must broadcast to {wrong}")


def check_rows(
    cos: Sequence[int], sin: Sequence[int], x: Sequence[int], rotary_start: int, heads_first: bool
) -> bool:
    """Whether rows are by head; refuse those that do not fit ``x`` or each other."""
    if cos != sin:
        raise TensorError(f"sin must have the shape of cos {list(cos)}, got {list(sin)}")
    if rotary_start + 2 * cos[-1] > x[-1]:
        raise TensorError(
            f"cos must hold one entry per pair: rotary_start + 2 * num_pairs is at most head_dim "
            f"({x[-1]}), got {rotary_start} + 2 * {cos[-1]}; of a full-width table take the "
            "first half"
        )
    by_head = len(cos) >= len(x)
    wrong = misfit(cos[:-1], x, heads_first, -1 if by_head else -2)
    if wrong:
        raise TensorError(f"cos and sin{' by head' if by_head else ''} must broadcast to {wrong}")
    return by_head


def _other_layout(who: str, heads_first: bool) -> str:
    """The hint at the end of an error about a tensor whose shape fits the other layout."""
    advice = "leave heads_first out" if heads_first else "pass heads_first=True"
    return f"; if {who} {LAYOUTS[not heads_first]}, {advice}"
