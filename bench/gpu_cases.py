"""The workloads of the GPU benchmark, as data: what models do, and how far they do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasor.bench import Case

_MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {},
    "Llama-3-70B": {"q_heads": 64},
    "Qwen3-30B": {"k_heads": 4, "base": 1_000_000.0, "norm": True},
    "GPT-J": {"q_heads": 16, "k_heads": 16, "head_dim": 256, "rotary_dim": 64, "base": 10_000.0},
    "DeepSeek MLA": {
        "q_heads": 128, "k_heads": 1, "head_dim": 64, "rows": (192, 576), "base": 10_000.0
    },
    "Gemma-3": {"q_heads": 16, "head_dim": 256, "base": 1_000_000.0},
    "Qwen3-VL": {"base": 5_000_000.0, "sections": (24, 20, 20)},
}  # fmt: skip
_WORK: dict[str, dict[str, Any]] = {
    **{f"prefill {n}": {"seq": n} for n in (4096, 32768, 131072)},
    "training 8192": {"seq": 8192, "documents": (3001, 1095, 2048, 517, 1531), "backward": True},
    **{f"decode {n}": {"seq": 1, "batch": n} for n in (1, 64, 512)},
}

#: Every model at every work in both dtypes; contenders do the pairings they know, side by side.
CASES = [
    Case(name=f"{model}, {work}", dtype=dtype, **shape, **amount)
    for model, shape in _MODELS.items()
    for dtype in ("bfloat16", "float32")
    for work, amount in _WORK.items()
]

#: What `--quick` takes of them.
QUICK = [
    case
    for case in CASES
    if case.dtype == "bfloat16"
    and case.name.startswith(("Llama-3-8B", "Qwen3-30B"))
    and case.name.endswith(("prefill 4096", "training 8192", "decode 64"))
]

#: What one step of decoding costs the host, all kernels included.
LAUNCH = next(c for c in CASES if c.name == "Llama-3-8B, decode 1" and c.dtype == "bfloat16")

#: Lengths of position tables.
TABLE_LENGTHS = [10**6, 10**7]

#: Where rows are compared with the exact ones, one head each: the last 256 positions before those.
FAR = [
    Case(name=f"{n // 10**6}M", dtype=dtype, seq=256, q_heads=1, k_heads=1, first=n - 256)
    for dtype in ("float32", "bfloat16")
    for n in TABLE_LENGTHS
]


def model_of(case: Case) -> str:
    """The model of a case of `CASES`."""
    return case.name.rpartition(", ")[0]


def work_of(case: Case) -> str:
    """What it does there."""
    return case.name.rpartition(", ")[2]


def small(case: Case) -> Case:
    """The same work on few tokens, for a test."""
    documents = (3, 1, 2) if case.documents else ()
    return replace(
        case, seq=6 if case.seq > 1 else 1, batch=min(case.batch, 2), documents=documents
    )
