"""Converts a checkpoint to another pairing by reordering the rows of its queries and keys.

`plan` reads headers and decides which tensors change, `write` streams the result, `verify` compares
it with the source. Only the safetensors format is supported. The safetensors library is not needed,
because only rows move and every header stays the same.

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
>>> conversion = plan(folder / "meta.safetensors", "half", model=rope)
>>> write(conversion, folder / "half.safetensors")
>>> list((folder / "half.safetensors").read_bytes()[-12:])
[0, 2, 1, 3, 0, 2, 1, 3, 0, 1, 2, 3]
"""

from __future__ import annotations

from phasor.checkpoint.model import Patterns
from phasor.checkpoint.planning import Change, ConversionPlan, plan
from phasor.checkpoint.writing import verify, write
from phasor.errors import CheckpointError

__all__ = ["Change", "CheckpointError", "ConversionPlan", "Patterns", "plan", "verify", "write"]
