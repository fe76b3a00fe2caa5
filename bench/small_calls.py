"""Where the time of a small call goes.

Takes `phasor.torch.rotate_qk_` apart, in place and in bfloat16: the loop in C++ on one thread and
on all, reading and checking the arguments there, each check in Python, and what is left for the
calls from one Python function to the next. A second table compares plain torch operations, which
run where there is no kernel, with transformers' function, whose cos and sin are made beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import others
import torch
from cases import CASES, Case
from device import progress
from measure import COPY, MULTIPLY
from report import table
from timing import Call, interleave, spread

from phasor.torch import cos_sin, rotate_by, rotate_qk, rotate_qk_
from phasor.torch._operator import cpu
from phasor.torch._operator.internals import count_writes, dispatch_is_plain, may_write

NAMES = ("decode 1", "decode 32", "prefill 64", "prefill 512")
SECONDS = 4.0
WHOLE, EXTENSION, ALONE, ARGUMENTS = "call", "extension", "one thread", "no tokens"
_TITLES = (
    "", "call / `copy_`", "call / multiply", "the loop", "on one thread", "arguments",
    "plain dispatch?", "may write?", "count writes", "find the plan", "Python's calls",
)  # fmt: skip
_PLAIN_TITLES = "plain torch over transformers", "rows given", "positions"
_NOTE = """\
In place, half pairing, bfloat16; shares are of the median call. The loop rotates on all threads,
beside it the same on one; arguments are the call of the extension on tensors without tokens."""


def parts(case: Case) -> Mapping[str, Call]:
    """The whole call and its parts, each on tensors of that case."""
    q, k = case.tensors()
    positions, rope = case.positions(), case.rope("half")
    q_out, k_out = case.tensors()
    words = [x.view(torch.float32) for x in (q_out, k_out)]
    rotate_qk_(q, k, positions, rope)
    text, native = rope.to_json(), cpu._native
    plan = cpu._prepare_plan(text)

    def extension(q: Any, k: Any, positions: Any) -> Call:
        rest = positions, None, False, 1.0, cpu._path_index, False, q, q, k, k
        return lambda: native.rotate(plan, *rest)

    return {
        COPY: lambda: (q_out.copy_(q), k_out.copy_(k)),
        MULTIPLY: lambda: [x.mul_(-1.0) for x in words],
        WHOLE: lambda: rotate_qk_(q, k, positions, rope),
        EXTENSION: extension(q, k, positions),
        # the same tensors without tokens: everything is read and checked, and there is no work
        ARGUMENTS: extension(q[:, :0], k[:, :0], positions[..., :0]),
        "is the dispatch plain": lambda: dispatch_is_plain((q, k)),
        "may they be written": lambda: may_write((q, k)),
        "counting the writes": lambda: count_writes((q, k)),
        "finding the plan": lambda: cpu._prepare_plan(rope.to_json()),
    }


def row(case: Case) -> list[str]:
    """The median of every part, as a share of the whole call's median."""
    progress(case.name)
    calls, threads = parts(case), torch.get_num_threads()
    samples = interleave(calls, seconds=SECONDS, warm=True)
    # by itself, because a change of their number starts threads anew
    torch.set_num_threads(1)
    samples |= interleave({ALONE: calls[EXTENSION]}, seconds=SECONDS / 10, warm=True)
    torch.set_num_threads(threads)
    took = {name: spread(some).median for name, some in samples.items()}
    whole, copy, multiply = took.pop(WHOLE), took.pop(COPY), took.pop(MULTIPLY)
    loop, single, arguments = took.pop(EXTENSION), took.pop(ALONE), took.pop(ARGUMENTS)
    shares = [loop - arguments, single - arguments, arguments, *took.values(),
              whole - loop - sum(took.values())]  # fmt: skip
    ratios = [f"{whole / to:.2f}" for to in (copy, multiply)]
    return [case.name, *ratios, *(f"{part / whole:.0%}" for part in shares)]


def plain(case: Case) -> list[str]:
    """Plain torch operations, with rows given and with positions, over transformers' function."""
    progress(f"{case.label}, plain torch")
    q, k = case.tensors()
    positions, rope = case.positions(), case.rope("half")
    rows, theirs = cos_sin(positions, rope), others.transformers_half(case, positions)
    heads_first = q.transpose(1, 2), k.transpose(1, 2)
    calls: dict[str, Call] = {
        "apply": lambda: theirs(*heads_first),
        "rows": lambda: [rotate_by(x, *rows, pairing="half", backend="eager") for x in (q, k)],
        "positions": lambda: rotate_qk(q, k, positions, rope, backend="eager"),
    }
    samples = interleave(calls, seconds=SECONDS, warm=True)
    apply, *ours = (spread(some).median for some in samples.values())
    return [case.label, *(f"{own / apply:.2f}" for own in ours)]


def page() -> str:
    """Where the time of four calls goes, and plain torch operations beside transformers."""
    cases = {case.label: case for case in CASES["cpu"] if case.name in NAMES}
    kernel = table(_TITLES, [row(cases[f"{name}, bfloat16"]) for name in NAMES])
    return (
        f"{_NOTE}\n\n{kernel}\n\n{table(_PLAIN_TITLES, [plain(case) for case in cases.values()])}"
    )
