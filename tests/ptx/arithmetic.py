"""What PTX instructions compute, on NumPy arrays with a number for each thread.

After NVIDIA's *Parallel Thread Execution ISA*. Where that allows an error, the result is off by
all of it, one way or the other, as it falls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

TYPES: dict[str, Any] = {
    "pred": np.dtype(bool),
    **{f"{kind}{8 * size}": np.dtype(f"{letter}{size}")
       for kind, letter in (("b", "u"), ("u", "u"), ("s", "i")) for size in (1, 2, 4, 8)},
    "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"),
    "bf16": np.dtype("u2"),  # NumPy has none: these are its bits
}  # fmt: skip
COMPARED: dict[str, Callable[..., NDArray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def fma(a: NDArray, b: NDArray, c: NDArray) -> NDArray:
    """``a * b + c``, rounded once; in float64 of finite numbers (Boldo and Melquiond 2008)."""
    if a.dtype == np.float32:
        # a product of two float32 is a float64
        exact = a.astype(np.float64) * b.astype(np.float64)
        return _odd(exact, c.astype(np.float64)).astype(np.float32)
    high, low = _product(a, b)
    total, lower = _sum(c, low)
    higher, middle = _sum(high, total)
    return higher + _odd(lower, middle)


def _sum(a: NDArray, b: NDArray) -> tuple[NDArray, NDArray]:
    """Rounded, and what is lost (Knuth)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _product(a: NDArray, b: NDArray) -> tuple[NDArray, NDArray]:
    """Rounded, and what is lost (Dekker, Veltkamp)."""

    def halves(x: NDArray) -> tuple[NDArray, NDArray]:
        wide = x * 134217729.0
        high = wide - (wide - x)
        return high, x - high

    whole = a * b
    (a1, a2), (b1, b2) = halves(a), halves(b)
    return whole, a2 * b2 - (((whole - a1 * b1) - a2 * b1) - a1 * b2)


def _odd(a: NDArray, b: NDArray) -> NDArray:
    """``a + b``; where it is not exact, the neighbour whose last bit is 1."""
    total, lost = _sum(a, b)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    toward = np.where(lost > 0, np.inf, -np.inf)
    inexact = (lost != 0) & np.isfinite(lost) & np.isfinite(total) & even
    return np.where(inexact, np.nextafter(total, toward), total)


def _off(exact: NDArray, units: int) -> NDArray:
    """float32 as far from exact as is allowed."""
    rounded = exact.astype(np.float32)
    up = (rounded.view(np.uint32) * np.uint32(2654435761)) >> np.uint32(31) == 1
    for _ in range(units):
        further = np.nextafter(rounded, np.where(up, np.float32(np.inf), np.float32(-np.inf)))
        rounded = np.where(np.isfinite(rounded) & (rounded != 0), further, rounded)
    return rounded


def _quotient(a: NDArray, b: NDArray) -> NDArray:
    """Towards zero."""
    if a.dtype.kind == "u":
        return a // b
    return np.where((a < 0) != (b < 0), -(abs(a) // abs(b)), abs(a) // abs(b))


def shifted(x: NDArray, by: NDArray, *, left: bool) -> NDArray:
    """A shift of all bits or more leaves zeros, or signs."""
    most = 8 * x.itemsize
    some = np.minimum(by, most - 1).astype(x.dtype)
    if left:
        return np.where(by >= most, x.dtype.type(0), x << some)
    gone = x >> x.dtype.type(most - 1) if x.dtype.kind == "i" else np.zeros_like(x)
    return np.where(by >= most, gone, x >> some)


def _permuted(a: NDArray, b: NDArray, by: NDArray) -> NDArray:
    """Bytes 0 to 3 are of ``a``, 4 to 7 of ``b``; beyond, what is counted from 8 is a sign."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    found = np.zeros_like(a)
    for i in range(4):
        digit = (by >> np.uint32(4 * i)).astype(np.uint64) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (digit & np.uint64(7)))).astype(np.uint8)
        byte = np.where(digit > 7, np.where(byte > 127, 255, 0), byte).astype(np.uint32)
        found |= byte << np.uint32(8 * i)
    return found


def bfloat16(x: NDArray) -> NDArray:
    """Bits of float32 numbers rounded to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def widened(bits: NDArray) -> NDArray:
    """bfloat16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def convert(target: str, source: str, x: NDArray) -> NDArray:
    """``cvt`` of one number."""
    x = widened(x) if source == "bf16" else x
    if target != "bf16":
        return x.astype(TYPES[target])
    if x.dtype == np.float64:
        # rounded once: to odd first, which no second rounding takes for a middle
        near = x.astype(np.float32)
        beyond = np.nextafter(near, np.where(x > near, np.float32(np.inf), np.float32(-np.inf)))
        even = (near.view(np.uint32) & np.uint32(1)) == 0
        x = np.where((near != x) & np.isfinite(near) & even, beyond, near)
    return bfloat16(x)


def canonical(x: NDArray) -> NDArray:
    """float32 arithmetic makes one NaN."""
    if x.dtype != np.float32:
        return x
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF).view(np.float32), x)


def pack(target: str, high: NDArray, low: NDArray) -> NDArray:
    """``cvt`` of two float32 into one register."""
    half = bfloat16 if target == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16)
    return half(high).astype(np.uint32) << np.uint32(16) | half(low)


#: By form: what is not here is not known, and a KeyError.
OPERATIONS: dict[str, Callable[..., NDArray]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma.rn": fma,
    "div": _quotient,
    "div.full": lambda a, b: _off(a.astype(np.float64) / b, 2),
    "div.rn": lambda a, b: a / b,
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "neg": lambda x: -x,
    "abs": abs,
    "min": np.fmin,
    "max": np.fmax,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda x: ~x,
    "prmt": _permuted,
    "sqrt.rn": np.sqrt,
}
