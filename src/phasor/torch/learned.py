"""`LearnedRotaryEmbedding`: a rotation whose frequencies are a parameter, shared or by head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from phasor._checks import whole
from phasor._tensors import check_rope
from phasor.axes import Mixed
from phasor.errors import SpecError, TensorError
from phasor.rope import Rope, with_inv_freq
from phasor.torch._operator.arguments import ARRAYS
from phasor.torch._operator.internals import refuse_tracing
from phasor.torch._operator.text import compute_dtype
from phasor.torch.module import RotaryModule, Where, checked_order, read_positions
from phasor.torch.rotation import DTYPES, Rotation, check_dtype


class LearnedRotaryEmbedding(RotaryModule):
    """A `RotaryEmbedding` whose frequencies are learned, starting from a Rope's.

    ``inv_freq`` is its only parameter and has the name that other modules give to their
    frequencies, so ``rotary_emb.inv_freq`` of a state dict is loaded and saved with plain values.
    It stays float32 when the model is cast to 16 bits. `ropes` makes exact ropes of it.

    Adam moves every frequency by the learning rate in each step, while frequencies span four powers
    of ten. Give the parameter a group with a small rate and no weight decay, or learn its logarithm
    with `torch.nn.utils.parametrize`, which also keeps frequencies positive (see "Learned
    frequencies" on the page "A rotation of your own").

    Args:
        rope: Its frequencies are the initial ones; all other fields stay. Its scaling must be a
            law.
        num_heads: None for frequencies that all heads share. Otherwise each of so many heads has
            its own (RoPE-Mixed, 2403.13298): as many as there are key heads, because grouped
            queries turn with their key. A tensor has a multiple of them, and consecutive heads
            share.
        heads_first: As for `RotaryEmbedding`.
        device: Device of the parameter.

    Attributes:
        inv_freq: The frequencies in radians per position, float32 ``[num_pairs]`` or ``[num_heads,
            num_pairs]``; with `Mixed` axes ``[n_axes, num_pairs]`` or ``[num_heads, n_axes,
            num_pairs]``.
        initial_rope: The rope with which training starts.

    Raises:
        SpecError: If ``rope`` is not a Rope with a static law and a softmax factor of 1, if
            ``num_heads`` is not a whole number from 1 on, or if ``heads_first`` is not given.

    >>> import torch
    >>> from phasor import Rope
    >>> rope = Rope(head_dim=64, pairing="half")
    >>> rotary = LearnedRotaryEmbedding(rope, heads_first=False)
    >>> q, k = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 2, 64)
    >>> rotated_q, rotated_k = rotary(q, k)  # positions 0 to 4
    >>> rotated_q.square().sum().backward()
    >>> list(rotary.state_dict()), rotary.inv_freq.grad.shape
    (['inv_freq'], torch.Size([32]))
    >>> (learned,) = rotary.ropes()
    >>> float(abs(learned.inv_freq - rope.inv_freq).max()) < 1e-7
    True
    """

    inv_freq: Tensor  # a parameter, or the result of a parametrization

    def __init__(
        self,
        rope: Rope,
        num_heads: int | None = None,
        *,
        heads_first: bool | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_rope(rope)
        if rope.softmax_factor != 1:
            raise SpecError(
                "rope must have a softmax factor of 1, because a Rope with learned frequencies "
                f"has no other, got {rope.softmax_factor:g}; put it into the scale of attention"
            )
        self.heads_first = checked_order(heads_first)
        self.num_heads = None if num_heads is None else whole("num_heads", num_heads, least=1)
        self.initial_rope = rope
        heads = () if num_heads is None else (num_heads,)
        axes = (rope.axes.n_axes,) if isinstance(rope.axes, Mixed) else ()
        shape = *heads, *axes, rope.num_pairs
        self.inv_freq = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_widen_saved)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the frequencies to those of ``initial_rope``, such as after ``to_empty``."""
        axes = self.initial_rope.axes
        initial = axes.inv_freq if isinstance(axes, Mixed) else self.initial_rope.inv_freq.tolist()
        # [num_pairs] or [n_axes, num_pairs], broadcast over heads
        self.inv_freq.copy_(torch.tensor(initial, dtype=torch.float64))

    def at(self, positions: Any, *, dtype: torch.dtype = torch.float32) -> Rotation:
        """The rotation of tokens at ``positions``, with gradients to ``inv_freq``.

        Angles are float64 products, so cos and sin are within ``6e-8 + 1.2e-16 a`` of those of the
        float32 frequencies at an angle of ``a`` radians, times the attention factor.

        Args:
            positions: As for `Rotation.at`, on the device of ``inv_freq``.
            dtype: float32, or float64 to rotate tensors that are float64.

        Returns:
            A Rotation by token, ``[..., seq, num_pairs]``; by head, ``[..., seq, num_heads,
            num_pairs]``. To call the latter without this module, let ``positions`` have all leading
            dimensions of the rotated tensor: ``[1, seq]`` or ``[batch, seq]``.

        Raises:
            PositionError: As for `phasor.torch.rotate`.
            SpecError: For any other ``dtype``.
            TensorError: If ``inv_freq`` was replaced by a parameter of 16 bits.
        """
        check_dtype(dtype)
        rope = self.initial_rope
        check_rope(rope, positions=positions)
        refuse_tracing()
        if self.inv_freq.dtype not in DTYPES:
            raise TensorError(
                f"inv_freq must be float32 or float64, got {self.inv_freq.dtype}, which rounds "
                'frequencies to 3 digits; in a model of transformers "inv_freq" belongs into '
                "_keep_in_fp32_modules_strict"
            )
        inv_freq = self.inv_freq.double()
        positions = ARRAYS.read_positions(positions, rope, inv_freq.device)
        # [..., seq, n_axes, num_pairs] or [..., seq, num_pairs]: coordinates for each pair
        coordinates = _pair_positions(positions.double(), rope)
        if self.num_heads is not None:
            head_dimension = -3 if isinstance(rope.axes, Mixed) else -2
            coordinates = coordinates.unsqueeze(head_dimension)
        angles = coordinates * inv_freq * rope.direction
        if isinstance(rope.axes, Mixed):
            angles = angles.sum(-2)
        factor = rope.attention_factor
        cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        # a Rotation by head has no head_dim, so that it is not indexed by token
        head_dim = rope.head_dim if self.num_heads is None else None
        return Rotation.make(
            cos, sin, (rope.pairing, rope.output_pairing, rope.rotary_start, head_dim)
        )

    def _rotate(self, q: Tensor, k: Tensor | None, where: Where) -> Tensor | tuple[Tensor, Tensor]:
        rotation = read_positions(q, k, where, self.initial_rope, self.heads_first)
        if not isinstance(rotation, Rotation):
            xs = [q] if k is None else [q, k]
            fit = ARRAYS.fit_positions(rotation, xs, self.initial_rope, self.heads_first)
            rotation = self.at(fit, dtype=compute_dtype(q.dtype))
        if rotation.head_dim is not None:  # by token
            if k is None:
                return rotation(q, heads_first=self.heads_first)
            return rotation(q, k, heads_first=self.heads_first)
        rotated_q = self._rotate_heads("x" if k is None else "q", q, rotation)
        return rotated_q if k is None else (rotated_q, self._rotate_heads("k", k, rotation))

    def ropes(self) -> tuple[Rope, ...]:
        """The learned frequencies as exact ropes: one per head, or a single one if shared.

        Raises:
            SpecError: If a frequency is negative or not finite. `Mixed` axes may have negative
                ones.

        >>> from phasor import Rope
        >>> rope = Rope(head_dim=4, pairing="half", base=256.0)
        >>> LearnedRotaryEmbedding(rope, heads_first=True).ropes()[0].explicit_inv_freq
        (1.0, 0.0625)
        """
        inv_freq = self.inv_freq.detach().double().cpu()
        if self.num_heads is None:
            inv_freq = inv_freq[None]
        head_inv_freqs = cast(list[Any], inv_freq.tolist())
        if isinstance(self.initial_rope.axes, Mixed):
            return tuple(replace(self.initial_rope, axes=Mixed(rows)) for rows in head_inv_freqs)
        if not bool((inv_freq >= 0).all()):
            raise SpecError(
                "inv_freq must be from 0 on where a Rope is made of it, got "
                f"{inv_freq.min().item():.3g}; learn its logarithm, use a smaller rate, or clamp it"
            )
        return tuple(with_inv_freq(self.initial_rope, row) for row in head_inv_freqs)

    def _rotate_heads(self, name: str, x: Tensor, rotation: Rotation) -> Tensor:
        """``x`` rotated by a Rotation ``[..., seq, num_heads, num_pairs]``, shared by groups."""
        shape = ARRAYS.check_heads(name, x, self.heads_first)
        sets = rotation.cos.shape[-2]
        if shape[-2] % sets:
            raise TensorError(
                f"{name} must have a multiple of {sets} heads, the number with frequencies, "
                f"got {shape[-2]}; num_heads of LearnedRotaryEmbedding is the number of key heads"
            )
        group = shape[-2] // sets
        cos = rotation.cos.repeat_interleave(group, -2)  # [..., seq, heads, num_pairs]
        sin = rotation.sin.repeat_interleave(group, -2)
        leading = (None,) * (x.dim() - cos.dim())  # by head if it has as many dimensions as x
        fitted = Rotation.make(cos[leading], sin[leading], rotation.layout())
        return fitted(x, heads_first=self.heads_first)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the frequencies to a device, but keep them float32 if ``fn`` casts to 16 bits."""

        def wide(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            return applied if applied.element_size() >= 4 else tensor.to(applied.device)

        return super()._apply(wide, recurse)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, heads_first={self.heads_first}, "
            f"initial_rope={self.initial_rope}"
        )


def _widen_saved(_: nn.Module, state_dict: dict[str, Any], prefix: str, *_others: Any) -> None:
    """Read frequencies as float32 that were saved in 16 bits: ``assign=True`` keeps the dtype."""
    inv_freq = state_dict.get(f"{prefix}inv_freq")
    if isinstance(inv_freq, Tensor) and inv_freq.element_size() < 4:
        state_dict[f"{prefix}inv_freq"] = inv_freq.float()


def _pair_positions(positions: Tensor, rope: Rope) -> Tensor:
    """The coordinates that turn each pair, to multiply by frequencies.

    ``[..., seq, num_pairs]`` or ``[..., seq, 1]``; ``[..., seq, n_axes, 1]`` with `Mixed` axes.
    """
    if isinstance(rope.axes, Mixed) or rope.axes.n_axes == 1:
        return positions.unsqueeze(-1)
    return positions[..., list(rope.axes.axis_of_pair(rope.num_pairs))]
