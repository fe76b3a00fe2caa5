"""Find the Rope behind tables of cos and sin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from phasor.errors import ConfigError, TensorError
from phasor.identification.explaining import explain
from phasor.identification.report import Identification
from phasor.identification.roundings import PRECISION_POSITIONS, find_table_dtype
from phasor.identification.samples import first_unused
from phasor.identification.spectrum import (
    ROUNDING,
    Complex,
    bound_angle_errors,
    find_spectrum,
    powers_of_two,
)
from phasor.identification.turns import arrangement_of, drop_repeats
from phasor.numpy import phasors
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
    """The `Rope` behind tables of cos and sin, with a report on them.

    Rows at growing distances give the frequencies, a base and a law explain them where possible,
    and then every row is compared with the exact rotation.

    Args:
        cos: ``[max_positions, num_pairs]``: row ``p`` belongs to position ``p``. Tables that
            repeat every value, ``[max_positions, 2 * num_pairs]``, are recognised by equal halves
            or equal neighbours.
        sin: The same shape.
        pairing: The pairing of the function that uses them; tables do not show it.
        head_dim: Width of one head, by default ``rotary_start + 2 * num_pairs``.
        rotary_start: Where the rotated slice begins inside the head.

    Returns:
        The Rope, and the report: ``error`` and ``precision`` are the distances of entries from the
        Rope's, as complex numbers; ``position_offset`` is the position of row 0.

    Raises:
        ConfigError: If no Rope gives these tables, with the reason.

    >>> from phasor.angles import cos_sin
    >>> from phasor.scaling import Linear
    >>> rope = Rope(head_dim=64, pairing="half", base=500_000.0, scaling=Linear(factor=4.0))
    >>> cos, sin = (np.float32(table) for table in cos_sin(range(4096), rope))
    >>> found, report = from_cache(cos, sin, pairing="half")
    >>> found == rope, report.error < 2**-24
    (True, True)
    """
    z, dtype = _complex_rows(cos, sin)
    width = rotary_start + 2 * z.shape[1] if head_dim is None else head_dim
    pairs = Rope(
        head_dim=width, pairing=pairing, rotary_dim=2 * z.shape[1], rotary_start=rotary_start
    )
    rounding, findings = find_table_dtype(np.stack((z.real, z.imag)), ROUNDING[dtype], dtype)
    rows_read, rows = powers_of_two(len(z) - 1), np.arange(len(z))
    spectrum = find_spectrum(rows_read, z[rows_read], bound_angle_errors(z[rows_read], rounding))
    report = explain(arrangement_of(pairs), spectrum, np.abs(z), rounding=rounding)
    if (unused := first_unused(rows_read, spectrum)) is not None:
        evidence = f"rows 0 to {spectrum.last_position} do, row {unused} does not"
        raise _no_rope(f"rows must turn at fixed frequencies, and {evidence}")
    if report.rope is None:
        raise _no_rope(report.why_no_rope)
    gain, offset = report.attention_factor or 1.0, report.position_offset
    error = np.abs(z - gain * phasors(report.rope, rows + offset)[:, : z.shape[1]]).max(axis=1)
    # angles may be float32 products of float32 frequencies, each a few roundings off
    fastest = max(abs(pair.inv_freq) for pair in report.pairs)
    tolerance = gain * (16 * rounding + (rows + abs(offset)) * fastest * 2.0**-20)
    wrong_rows = np.flatnonzero(error > tolerance)
    if len(wrong_rows):
        size = f"{error[wrong_rows[0]]:.2g} off what the others say"
        raise _no_rope(f"row {wrong_rows[0]} is {size}, more than rounding explains")
    tops = [p for p in PRECISION_POSITIONS if p <= len(z)]
    return report.rope, replace(
        report,
        findings=(*findings, *report.findings),
        table_end=len(z),
        error=float(error.max()),
        precision=tuple((p, float(error[p - 12 : p].max() / gain)) for p in tops),
    )


def _no_rope(reason: str | None) -> ConfigError:
    return ConfigError(
        f"cos and sin must be a Rope's, and no Rope gives them: {reason}; "
        "give the rows before, or write Rotation(cos, sin, pairing=...), which takes these"
    )


def _complex_rows(cos: ArrayLike, sin: ArrayLike) -> tuple[Complex, str]:
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
    return drop_repeats(z), max(dtypes, key=ROUNDING.__getitem__)
