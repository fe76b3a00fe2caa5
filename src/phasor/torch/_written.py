"""Whether what a kernel writes in place is written once: no two elements are one.

Conservative: a view that no dense slice looks like is refused, as are rows near what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from phasor.errors import TensorError


class Apart(NamedTuple):
    """How far two tensors reach, in bytes, and the tokens between which they may take turns."""

    q: int
    k: int
    q_token: int
    k_token: int
    token: int  # from one token to the next; 0 where query and key differ in that

    def check(self, q: int, k: int) -> None:
        """Refuse a query and a key, at these addresses, of which an element is one."""
        if q + self.q <= k or k + self.k <= q:
            return
        # slices of one projection lie side by side in every token
        behind = (k - q) % self.token if self.token else 0
        if not self.token or behind < self.q_token or behind + self.k_token > self.token:
            raise TensorError(
                "q and k must not share memory to be written in place; rotate copies, or use the "
                "verb without the underscore"
            )


def apart(q: Tensor, k: Tensor) -> Apart:
    """What there is to know of two tensors but for where they begin."""
    strides = [(step, k.stride(d)) for d, step in enumerate(q.stride()[:-2]) if q.shape[d] > 1]
    token = min((step for step, _ in strides), default=0)
    alike = q.dtype == k.dtype and all(a == b and a % token == 0 for a, b in strides if token)
    return Apart(
        _bytes(q, 0), _bytes(k, 0), _bytes(q, -2), _bytes(k, -2), alike * q.element_size() * token
    )


def check_alone(xs: Sequence[Tensor]) -> None:
    """Refuse tensors that share memory with themselves."""
    for x in xs:
        reach = 1
        for step, n in sorted(zip(x.stride(), x.shape, strict=True)):
            if n > 1 and step < reach and x.numel():
                raise TensorError(
                    "x must not share memory with itself to be written in place; use "
                    "x.contiguous() or the verb without the underscore"
                )
            reach += step * (n - 1)


def check_rows(xs: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Refuse rows of cos and sin where something is written."""
    for x in xs:
        for row in rows:
            behind = row.data_ptr() - x.data_ptr()
            if -_bytes(row, 0) < behind < _bytes(x, 0):
                raise TensorError(
                    "cos and sin must not share memory with x to be written in place; pass clones"
                )


def _bytes(t: Tensor, start: int) -> int:
    """From the first element to the last of the dimensions from ``start`` on."""
    if t.numel() == 0:
        return 0
    sizes = zip(t.stride()[start:], t.shape[start:], strict=True)
    return t.element_size() * (1 + sum(step * (n - 1) for step, n in sizes))
