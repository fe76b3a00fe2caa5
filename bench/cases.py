"""The workloads of the benchmark, as data.

Llama 3.1 8B's shapes (32 query heads, 8 key heads, 128 wide) unless the name says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from phasor.bench import Case

_PREFILL = [64, 512, 4096, 32768]
_DECODE = [1, 8, 32, 128]

_ONCE = [
    *(Case(name=f"prefill {n}", dtype="bfloat16", seq=n) for n in _PREFILL),
    *(Case(name=f"prefill {n}, heads first", dtype="bfloat16", seq=n, heads_first=True)
      for n in (512, 4096)),
    Case(name="training 2 x 2048", dtype="bfloat16", batch=2, seq=2048, backward=True),
    *(Case(name=f"decode {n}", dtype="bfloat16", batch=n, seq=1) for n in _DECODE),
    Case(name="GPT-J, 64 of 256", dtype="bfloat16", seq=2048, q_heads=16, k_heads=16,
         head_dim=256, rotary_dim=64, base=10_000.0),
    Case(name="DeepSeek MLA", dtype="bfloat16", seq=256, q_heads=128, k_heads=1, head_dim=64,
         rows=(192, 576), base=10_000.0),
    Case(name="Gemma, head 256", dtype="bfloat16", seq=2048, q_heads=16, k_heads=16,
         head_dim=256, base=10_000.0),
    Case(name="Qwen3-VL, 3 axes", dtype="bfloat16", seq=2048, base=5_000_000.0,
         sections=(24, 20, 20)),
]  # fmt: skip

#: Every workload in both dtypes; contenders do the pairings they know, side by side.
CASES = [replace(case, dtype=dtype) for dtype in ("bfloat16", "float32") for case in _ONCE]

#: What `--quick` takes of them.
QUICK = [
    case
    for case in CASES
    if case.name in ("prefill 512", "prefill 4096", "decode 1", "decode 32", "DeepSeek MLA")
    and (case.dtype == "bfloat16" or case.name == "prefill 4096")
]

#: Whose peak of memory is looked at.
LARGE = Case(name="prefill 8192", dtype="bfloat16", seq=8192)

#: Where rows are compared with the exact ones, one head each.
FAR = [
    Case(name=f"position {first:.0e}", dtype="float32", seq=256, q_heads=1, k_heads=1, first=first)
    for first in (10**5, 10**6)
]

#: Lengths of position tables.
TABLE_LENGTHS = [131_072, 1_048_576]
