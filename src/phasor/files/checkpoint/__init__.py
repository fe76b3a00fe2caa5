"""Converts a checkpoint to another pairing, or a Llama between Meta's files and transformers'.

`plan_conversion` reads headers and decides which rows of queries and keys move, and for another
program also the names and config of the result. `write` streams the result, `verify` compares it
with the source. The result is in safetensors files, with headers checked by the safetensors
package; Meta's ``.pth`` files are read with torch.

>>> import tempfile
>>> from pathlib import Path
>>> import numpy as np
>>> from safetensors.numpy import save_file
>>> from phasor import Rope
>>> folder = Path(tempfile.mkdtemp())
>>> rows = np.array([[0], [1], [2], [3]], dtype=np.uint8)
>>> weights = {f"layers.0.attention.w{c}.weight": rows for c in "qkv"}
>>> save_file(weights, folder / "meta.safetensors")
>>> rope = Rope(head_dim=4, pairing="interleaved")
>>> conversion = plan_conversion(folder / "meta.safetensors", "half", model=rope)
>>> write(conversion, folder / "half.safetensors")
>>> list((folder / "half.safetensors").read_bytes()[-12:])
[0, 2, 1, 3, 0, 2, 1, 3, 0, 1, 2, 3]
"""

from __future__ import annotations

from phasor.errors import CheckpointError
from phasor.files.checkpoint.conversion import PROGRAMS, ConversionPlan, Program, verify, write
from phasor.files.checkpoint.from_gguf import FLOAT_TYPES, FloatType
from phasor.files.checkpoint.model import Patterns
from phasor.files.checkpoint.planning import plan_conversion

__all__ = [
    "FLOAT_TYPES",
    "PROGRAMS",
    "CheckpointError",
    "ConversionPlan",
    "FloatType",
    "Patterns",
    "Program",
    "plan_conversion",
    "verify",
    "write",
]
