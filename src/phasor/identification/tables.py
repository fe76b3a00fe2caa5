"""Tables of cos and sin, as files of ONNX and engines hold them, back to the rope behind them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from phasor.errors import ConfigError, TensorError
from phasor.identification.measuring import identify_table
from phasor.identification.report import Identification
from phasor.identification.spectrum import ROUNDING, Complex
from phasor.pairings import Pairing
from phasor.rope import Rope


def from_cache(
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    pairing: Pairing,
    head_dim: int | None = None,
    rotary_start: int = 0,
) -> tuple[Rope, Identification]:
    """The `Rope` behind tables of cos and sin, with what it says about them.

    Frequencies are found from row 0 to the last at growing distances, explained by a base and a
    law where one does, and then every row is compared with the exact rotation.

    Args:
        cos: ``[max_positions, num_pairs]``: row ``p`` belongs to position ``p``. Tables that say
            everything twice, ``[max_positions, 2 * num_pairs]``, are known by their equal halves
            or equal neighbours.
        sin: The same shape.
        pairing: How they are used; tables do not say.
        head_dim: Width of one head; ``rotary_start + 2 * num_pairs`` unless given.
        rotary_start: Where the rotated slice begins inside the head.

    Returns:
        The Rope, and the report: ``error`` is the largest difference between an entry and the
        Rope's exact one, as a complex number, ``precision`` the same near some positions,
        ``attention_factor`` what cos and sin are multiplied by, ``position_offset`` the position
        of row 0. Where no law gives the frequencies, ``rope.explicit_inv_freq`` holds them.

    Raises:
        ConfigError: If no Rope gives them, saying why.

    >>> from phasor.angles import cos_sin
    >>> from phasor.scaling import Linear
    >>> rope = Rope(head_dim=64, pairing="half", base=500_000.0, scaling=Linear(factor=4.0))
    >>> cos, sin = (np.float32(table) for table in cos_sin(rope, range(4096)))
    >>> found, report = from_cache(cos, sin, pairing="half")
    >>> found == rope, report.error < 2**-24
    (True, True)
    """
    z, dtype = _complex_rows(cos, sin)
    rotary_dim = 2 * z.shape[1]
    width = rotary_start + rotary_dim if head_dim is None else head_dim
    pairs = Rope(head_dim=width, pairing=pairing, rotary_dim=rotary_dim, rotary_start=rotary_start)
    report = identify_table(z, dtype, pairs)
    if report.rope is None:
        raise ConfigError(
            f"cos and sin must be a Rope's, and no Rope gives them: {report.why_no_rope}; "
            "give the rows before, or rotate_by, which takes the rows as they are"
        )
    return report.rope, report


def _complex_rows(cos: ArrayLike, sin: ArrayLike) -> tuple[Complex, str]:
    """``cos + i sin`` of each pair, ``[rows, num_pairs]``, and the dtype of the tables."""
    tables = np.asarray(cos), np.asarray(sin)
    dtypes = {str(table.dtype) for table in tables}
    shape = tables[0].shape
    if len(shape) != 2 or tables[1].shape != shape or shape[0] < 2 or shape[1] < 1:
        raise TensorError(
            "cos and sin must both be [max_positions, num_pairs] with two rows or more, "
            f"got {list(shape)} and {list(tables[1].shape)}"
        )
    if not dtypes <= set(ROUNDING):
        listed = " and ".join(sorted(dtypes))
        raise TensorError(f"cos and sin must be of {', '.join(ROUNDING)}, got {listed}")
    z = tables[0].astype(np.float64) + 1j * tables[1].astype(np.float64)
    if not np.isfinite(z).all():
        raise ConfigError("cos and sin must be finite, got infinities or NaN; check the file")
    return one_of_pair(z), max(dtypes, key=ROUNDING.__getitem__)


def one_of_pair(z: Complex) -> Complex:
    """Rows that have everything for both members of a pair, for one of them."""
    half = z.shape[1] // 2
    for first, second in ((z[:, :half], z[:, half:]), (z[:, ::2], z[:, 1::2])):
        if np.array_equal(first, second):
            return first
    return z
