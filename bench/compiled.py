"""Under ``torch.compile``: the rotation as one operator, or as operations that inductor fuses.

``python bench/compiled.py`` takes a layer's work between projections and attention: QK norm,
rotation, and the key's place in a cache. Compiled whole, the rotation is phasor's operator, which
inductor cannot look into, or, with ``backend="eager"``, its definition in torch operations. Writes
``bench/results/compiled.md``; a GPU is used where there is one.
"""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch
from report import table
from timing import Call, interleave, spread
from torch import Tensor

from phasor import Rope
from phasor.torch import chosen_backend, rotate_qk

RESULT = Path(__file__).with_name("results") / "compiled.md"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROPE = Rope(head_dim=128, pairing="half", base=500_000.0)
HEADS = 32, 8
SHAPES = {"decode 1": (1, 1), "decode 32": (32, 1), "prefill 512": (1, 512),
          "prefill 4096": (1, 4096)}  # fmt: skip


def compiled(backend: str, batch: int, seq: int, dtype: torch.dtype) -> tuple[Call, Tensor]:
    """A call of the compiled step on tensors of its own, and the query that it makes."""
    torch.manual_seed(0)
    q, k = (torch.randn(batch, seq, n, 128, dtype=dtype, device=DEVICE) for n in HEADS)
    weight = torch.ones(128, dtype=dtype, device=DEVICE)
    cache = torch.zeros(batch, seq + 8, HEADS[1], 128, dtype=dtype, device=DEVICE)
    positions = torch.arange(seq, device=DEVICE) + 1000

    @torch.compile(fullgraph=True, dynamic=False)
    def step(q: Tensor, k: Tensor) -> Tensor:
        q, k = (torch.nn.functional.rms_norm(x, (128,), weight, 1e-6) for x in (q, k))
        q, k = rotate_qk(q, k, positions, ROPE, backend=backend)
        cache[:, 4 : 4 + seq] = k
        return q

    def call() -> None:
        step(q, k)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad():
        return torch.no_grad()(call), step(q, k)


def main() -> None:
    """Measure, compare what both made, and write the table."""
    rows: list[tuple[str, str, str]] = []
    cases = [(name, shape, t) for t in (torch.bfloat16, torch.float32) for name, shape in
             SHAPES.items()]  # fmt: skip
    for name, (batch, seq), dtype in cases:
        torch._dynamo.reset()
        ours, one = compiled("auto", batch, seq, dtype)
        plain, other = compiled("eager", batch, seq, dtype)
        # inductor may keep products in float32 that the norm's own tensor would have rounded
        assert torch.allclose(one.float(), other.float(), atol=3e-2, rtol=2e-2), name
        times = interleave({"operator": ours, "definition": plain}, seconds=4, warm=False)
        ratios = [b / a for a, b in zip(times["operator"], times["definition"], strict=True)]
        rows.append((name, str(dtype).removeprefix("torch."), str(spread(ratios))))
        print(*rows[-1])
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {platform.machine()}"
    backend = chosen_backend(torch.empty(1, 1, 1, 128, device=DEVICE))
    head = (
        f"Measured {datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {device} with "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; the operator runs the "
        f"{backend!r} implementation. {HEADS[0]} query heads, {HEADS[1]} key heads, 128 wide; new "
        "outputs.\n\n"
    )
    page = head + table(("step", "dtype", "definition / operator"), rows) + "\n"
    RESULT.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
