"""A Rope as the Python that makes it and rotates with it."""

from __future__ import annotations

from dataclasses import fields

from phasor.rope import Rope
from phasor.scaling import Rule


def construction(rope: Rope) -> str:
    """The expression that makes ``rope`` after ``import phasor``, without default values.

    >>> print(construction(Rope(head_dim=64, pairing="half")))
    phasor.Rope(
        head_dim=64,
        pairing="half",
        base=10000.0,
    )
    """
    plain = Rope(head_dim=rope.head_dim, pairing=rope.pairing)
    lines: list[str] = []
    for field in fields(rope):
        value = getattr(rope, field.name)
        if value is None and field.name == "base":
            continue  # explicit frequencies stand in its place
        is_required = field.name in ("head_dim", "pairing", "base")
        if not is_required and value == getattr(plain, field.name):
            continue
        if isinstance(value, str):
            text = f'"{value}"'
        elif field.name in ("scaling", "axes"):
            text = f"phasor.{field.name}.{value!r}"  # classes of those modules
        else:
            text = repr(value)
        lines.append(f"    {field.name}={text},")
    return "\n".join(["phasor.Rope(", *lines, ")"])


def usage(rope: Rope, context: int) -> str:
    """Python that rotates queries and keys with ``rope``."""
    static = rope.at(context)
    lines = ["import torch", "", "import phasor", "from phasor.torch import rotate_qk", ""]
    lines.append(f"rope = {construction(rope)}")
    if isinstance(rope.scaling, Rule):
        lines.append(f"rope = rope.at({context})  # the law for this many tokens")
    shape = f"[batch, tokens, heads, {rope.head_dim}]"
    n_axes = rope.axes.n_axes
    lines += ["", f"# queries and keys: {shape}", f"q = torch.randn(1, 16, 8, {rope.head_dim})"]
    lines.append(f"k = torch.randn(1, 16, 2, {rope.head_dim})")
    if n_axes == 1:
        lines.append("positions = torch.arange(16)")
    else:
        lines.append(f"positions = torch.arange(16)[:, None].expand(16, {n_axes})  # as in text")
    gain = ", gain=rope.attention_factor" if static.attention_factor != 1 else ""
    lines.append(f"q, k = rotate_qk(q, k, positions, rope{gain})")
    return "\n".join(lines)
