"""Converts a checkpoint to another pairing, or a Llama between Meta's files and transformers'.

`plan_conversion` reads headers and decides which rows of queries and keys move, and for another
program which names and config the result has. `write` streams the result, `verify` compares it with
the source. The result is safetensors, whose headers the safetensors package checks; Meta's ``.pth``
files are read with torch.

>>> import json, struct, tempfile
>>> from pathlib import Path
>>> from phasor import Rope
>>> folder = Path(tempfile.mkdtemp())
>>> tensors = {f"layers.0.attention.w{c}.weight": {"dtype": "U8", "shape": [4, 1],
...         "data_offsets": [4 * i, 4 * i + 4]} for i, c in enumerate("qkv")}
>>> header = json.dumps(tensors).encode()
>>> data = struct.pack("<Q", len(header)) + header + bytes([0, 1, 2, 3] * 3)
>>> count = (folder / "meta.safetensors").write_bytes(data)
>>> rope = Rope(head_dim=4, pairing="interleaved")
>>> conversion = plan_conversion(folder / "meta.safetensors", "half", model=rope)
>>> write(conversion, folder / "half.safetensors")
>>> list((folder / "half.safetensors").read_bytes()[-12:])
[0, 2, 1, 3, 0, 2, 1, 3, 0, 1, 2, 3]
"""

from __future__ import annotations

from phasor.errors import CheckpointError
from phasor.files.checkpoint.conversion import PROGRAMS, ConversionPlan, Program
from phasor.files.checkpoint.model import Patterns
from phasor.files.checkpoint.planning import plan_conversion
from phasor.files.checkpoint.writing import verify, write

__all__ = [
    "PROGRAMS",
    "CheckpointError",
    "ConversionPlan",
    "Patterns",
    "Program",
    "plan_conversion",
    "verify",
    "write",
]
