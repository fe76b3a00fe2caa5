"""What is not a time on a GPU: bytes of position tables, and exactness far out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from foreign import transformers_rows, usual_inv_freq
from gpu_cases import FAR, TABLE_LENGTHS
from torch import Tensor

from phasor.bench import Case, Contender, admitted
from phasor.torch import _tables

_SAMPLE = Case(name="table", dtype="bfloat16", seq=1024)


def tables(device: torch.device) -> list[dict[str, Any]]:
    """Bytes that each recipe keeps for positions up to a length, for heads of 128 in bfloat16.

    A table of rows is made for a thousand positions and its bytes are multiplied.
    """
    found: list[dict[str, Any]] = []
    for name, build in _recipes(device).items():
        try:
            size = sum(x.numel() * x.element_size() for x in build())
        except ImportError:
            continue
        for length in TABLE_LENGTHS:
            grown = size if name == "phasor" else size * length // _SAMPLE.seq
            found.append({"recipe": name, "length": length, "bytes": grown})
    return found


def _recipes(device: torch.device) -> dict[str, Callable[[], list[Tensor]]]:
    places = _SAMPLE.positions(device)
    angles = places.float()[:, None] * usual_inv_freq(_SAMPLE, device)
    text = _SAMPLE.rope("half").to_json()
    kind = getattr(torch, _SAMPLE.dtype)
    return {
        "transformers, Liger": lambda: list(transformers_rows(_SAMPLE, places)),
        "flash-attention": lambda: [angles.cos().to(kind), angles.sin().to(kind)],
        "flashinfer, in place": lambda: [angles.cos(), angles.sin()],
        "Transformer Engine": lambda: [torch.cat([angles, angles], -1)],
        "phasor": lambda: [_tables.digit_tables(text, device, torch.float32)],
    }


def far_errors(contender: Contender, device: torch.device) -> dict[str, float | str]:
    """Error of its rows at far positions, by position and dtype, or why there is none."""
    found: dict[str, float | str] = {}
    for case in FAR:
        measured, _ = admitted(case, [contender], device)
        reason = measured.left_out.get(contender.key)
        label = f"{case.name}, {case.dtype}"
        found[label] = measured.errors[contender.key] if reason is None else reason
    return found
