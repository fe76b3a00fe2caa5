"""The workloads, as data: what models do, and how far they do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from phasor.axes import InterleavedSections, OneAxis
from phasor.pairings import Pairing
from phasor.rope import Rope

#: What is asked about a case: how long each call takes; which parts of phasor's take that; how long
#: they take with malloc as it comes, or the host alone; how exact the results are.
Question = Literal["times", "parts", "malloc", "host", "errors"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload: a query and a key, the positions of their tokens, and what is done to them.

    Llama 3.1 8B's shape unless told otherwise. A case of one token a sequence is a decode step.
    """

    name: str
    asks: Question = "times"
    group: str = ""  # the table that it belongs to
    dtype: Literal["float32", "bfloat16"]
    seq: int
    batch: int = 1
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    rotary_dim: int | None = None  # the first coordinates of a head that turn; None for all
    base: float = 500_000.0
    sections: tuple[int, ...] = ()  # pairs on each of several axes; one axis if empty
    heads_first: bool = False  # memory is [batch, heads, seq, head_dim]
    # widths of rows whose last coordinates are the query's and the key's heads; contiguous if None
    rows: tuple[int, int] | None = None
    backward: bool = False  # also the gradients of both
    first: int = 0  # position of the first token
    documents: tuple[int, ...] = ()  # lengths of packed texts, each from the first position on

    @property
    def label(self) -> str:
        """What `--cases` is compared with."""
        question = "" if self.asks == "times" else f"{self.asks}, "
        return f"{question}{self.name}, {self.dtype}"

    @property
    def size(self) -> int:
        """Bytes of the query and the key."""
        heads = self.q_heads + self.k_heads
        return self.batch * self.seq * heads * self.head_dim * getattr(torch, self.dtype).itemsize

    def rope(self, pairing: Pairing, pairing_out: Pairing | None = None) -> Rope:
        """The embedding that every contender of this pairing applies."""
        return Rope(
            head_dim=self.head_dim,
            rotary_dim=self.rotary_dim or self.head_dim,
            pairing=pairing,
            pairing_out=pairing_out,
            base=self.base,
            axes=InterleavedSections(self.sections) if self.sections else OneAxis(),
        )

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """int64 ``[seq]``, ``[batch, 1]`` for decode; of several axes with ``[..., n_axes]``."""
        if self.seq == 1:
            last = (self.first + 4096 + 997 * torch.arange(self.batch)) % 2**15
            positions = last.unsqueeze(-1)
            if self.sections:
                positions = positions.unsqueeze(-1).expand(-1, -1, len(self.sections))
            return positions.to(device)
        positions = self.first + torch.cat([torch.arange(n) for n in self.documents or (self.seq,)])
        if self.sections:  # frames of 32 x 32 patches
            positions = torch.stack(
                [positions // 1024, positions // 32 % 32, positions % 32], dim=-1
            )
        return positions.to(device)

    def tensors(self, seed: int = 0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Query and key ``[batch, seq, heads, head_dim]`` of normal numbers, laid out as asked."""
        draw = torch.Generator(device).manual_seed(seed)
        kind, widths = getattr(torch, self.dtype), self.rows or (self.head_dim, self.head_dim)
        tensors: list[Tensor] = []
        for heads, width in zip((self.q_heads, self.k_heads), widths, strict=True):
            middle = (heads, self.seq) if self.heads_first else (self.seq, heads)
            x = torch.empty(self.batch, *middle, width, dtype=kind, device=draw.device)
            x.normal_(generator=draw)
            x = x.transpose(1, 2) if self.heads_first else x
            tensors.append(x[..., width - self.head_dim :])
        return tensors[0], tensors[1]


def few(case: Case) -> Case:
    """The same work, on few tokens and heads."""
    return replace(
        case, seq=min(case.seq, 6), batch=min(case.batch, 2), q_heads=2, k_heads=1,
        documents=(3, 1, 2) if case.documents else (),
    )  # fmt: skip


_DTYPES: tuple[Literal["bfloat16"], Literal["float32"]] = ("bfloat16", "float32")
# of models that are measured on both kinds of device
_GPT_J = {"q_heads": 16, "k_heads": 16, "head_dim": 256, "rotary_dim": 64, "base": 10_000.0}
_DEEPSEEK = {"q_heads": 128, "k_heads": 1, "head_dim": 64, "rows": (192, 576), "base": 10_000.0}
_QWEN3_VL = {"base": 5_000_000.0, "sections": (24, 20, 20)}
_CPU: dict[str, dict[str, dict[str, Any]]] = {
    "Prefill": {
        **{f"prefill {n}": {"seq": n} for n in (64, 512, 4096, 32768)},
        **{f"prefill {n}, heads first": {"seq": n, "heads_first": True} for n in (512, 4096)},
    },
    "Training, forward and backward": {
        "training 2 x 2048": {"batch": 2, "seq": 2048, "backward": True}
    },
    "Decode, one token per sequence": {
        f"decode {n}": {"batch": n, "seq": 1} for n in (1, 8, 32, 128)
    },
    "Other models": {
        "GPT-J, 64 of 256": {"seq": 2048, **_GPT_J},
        "DeepSeek MLA": {"seq": 256, **_DEEPSEEK},
        "Gemma, head 256": {"seq": 2048, "q_heads": 16, "k_heads": 16, "head_dim": 256,
                            "base": 10_000.0},
        "Qwen3-VL, 3 axes": {"seq": 2048, **_QWEN3_VL},
    },
}  # fmt: skip
_GPU_MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {},
    "Llama-3-70B": {"q_heads": 64},
    "Qwen3-30B": {"k_heads": 4, "base": 1_000_000.0},
    "GPT-J": _GPT_J,
    "DeepSeek MLA": _DEEPSEEK,
    "Gemma-3": {"q_heads": 16, "head_dim": 256, "base": 1_000_000.0},
    "Qwen3-VL": _QWEN3_VL,
}
_GPU_WORK: dict[str, dict[str, Any]] = {
    **{f"prefill {n}": {"seq": n} for n in (4096, 32768, 131072)},
    "training 8192": {"seq": 8192, "documents": (3001, 1095, 2048, 517, 1531), "backward": True},
    **{f"decode {n}": {"seq": 1, "batch": n} for n in (1, 64, 512)},
}
_GPU = {
    model: {f"{model}, {name}": shape | work for name, work in _GPU_WORK.items()}
    for model, shape in _GPU_MODELS.items()
}
_SMALL = {name: _CPU["Prefill"][name] for name in ("prefill 64", "prefill 512")} | {
    name: _CPU["Decode, one token per sequence"][name] for name in ("decode 1", "decode 32")
}
# one head each; the last 256 positions before those
_FAR = {f"near {n:.0e}": {"first": n - 256, "seq": 256, "q_heads": 1, "k_heads": 1}
        for n in (10**5, 10**6, 10**7)}  # fmt: skip


def _make_cases(
    works: Mapping[str, Mapping[str, Any]], dtypes: Sequence[Any] = _DTYPES, **same: Any
) -> list[Case]:
    """These works in each dtype."""
    return [
        Case(name=name, dtype=dtype, **same, **work)
        for dtype in dtypes
        for name, work in works.items()
    ]


#: Every case by type of device; contenders do the pairings they know.
CASES: dict[str, list[Case]] = {
    "cpu": [
        *(case for group, works in _CPU.items() for case in _make_cases(works, group=group)),
        *_make_cases(_SMALL, _DTYPES[:1], asks="parts"),
        *_make_cases({"prefill 4096": {"seq": 4096}}, asks="malloc"),
        *_make_cases(_FAR, _DTYPES[1:], asks="errors"),
    ],
    "cuda": [
        *(case for model, works in _GPU.items() for case in _make_cases(works, group=model)),
        *_make_cases({"decode 1": {"seq": 1}}, _DTYPES[:1], asks="host"),
        *_make_cases(_FAR, _DTYPES[1:], asks="errors"),
    ],
}
