"""What Triton compiles the kernels to: PTX, and machine code for an H100."""

from __future__ import annotations

import math
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.torch._operator.arguments import Turn
from phasor.torch._operator.triton import choose_tile, load_kernels, make_plan, plan_key

from .triton_compiler import (
    DECODE,
    DEEPSEEK,
    HALF,
    JOINED,
    PREFILL,
    Compiler,
    as_it_is,
    compiles,
    heads_first,
    inside,
    launch,
    make_rows,
    misaligned,
)

pytestmark = compiles


def traffic(assembly: str) -> Counter[str]:
    """Accesses to global memory by their width."""
    return Counter(re.findall(r"(?:ld|st)\.global[.\w:]*", assembly))


@pytest.mark.parametrize(
    ("laid", "tokens"),
    [
        pytest.param(as_it_is, PREFILL, id="prefill"),
        pytest.param(heads_first, PREFILL, id="heads first"),
        pytest.param(inside, DECODE, id="decode, from a projection"),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.every_kernel)]
)
@pytest.mark.parametrize(
    "rope", [HALF, JOINED, DEEPSEEK], ids=["half", "interleaved", "interleaved to half"]
)
def test_every_access_is_16_bytes_wide(
    rope: Rope,
    dtype: torch.dtype,
    laid: Callable[[Tensor], Tensor],
    tokens: tuple[int, int],
    compiler: Compiler,
) -> None:
    """Two pairs of a row of cosines are 8; nothing is kept in local memory."""
    launch(rope, tokens, dtype=dtype, laid=laid)
    assembly = compiler.assembly()
    wide, narrow = {"ld.global.v4.b32", "st.global.v4.b32"}, {"ld.global.b64", "ld.global.v2.b32"}
    assert wide <= set(traffic(assembly)) <= wide | narrow
    assert ".local" not in assembly


# the most registers, and instructions an element, for so many tokens: a quarter more than what
# Triton 3.6, 3.7 and 3.8 make
MOST = {8192: (60, 13), 512: (60, 26), 64: (46, 35)}


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "pairing", "laid"),
    [
        pytest.param(128, 128, "half", as_it_is, id="Llama"),
        pytest.param(128, 128, "interleaved", as_it_is, id="Meta's Llama"),
        *[
            pytest.param(*shape, marks=pytest.mark.every_kernel, id=name)
            for name, *shape in (
                ("GLM-4.5", 128, 64, "half", as_it_is),
                ("Qwen3-Next", 256, 64, "half", as_it_is),
                ("Gemma 3", 256, 256, "half", as_it_is),
                ("off boundaries", 128, 128, "half", misaligned),
                ("interleaved, off boundaries", 128, 128, "interleaved", misaligned),
                ("a slice, off boundaries", 256, 64, "half", misaligned),
            )
        ],
    ],
)
@pytest.mark.parametrize("tokens", [8192, 512, 64])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.every_kernel)]
)
def test_registers_hold_what_a_tile_needs(
    dtype: torch.dtype,
    tokens: int,
    head_dim: int,
    rotary_dim: int,
    pairing: Any,
    laid: Callable[[Tensor], Tensor],
    compiler: Compiler,
    tmp_path: Path,
) -> None:
    """Few of them, and nothing spills, whatever the compiler makes of a tile."""
    rope = Rope(head_dim=head_dim, rotary_dim=rotary_dim, pairing=pairing)
    launch(rope, (1, tokens), dtype=dtype, laid=laid, in_place=True)
    code, binary = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    code.write_text(compiler.assembly())
    said = run_tool("ptxas", "-v", "--gpu-name=sm_90a", code, "-o", binary, words="stderr")
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    if laid is misaligned:  # every number has an address
        return
    registers, instructions = MOST[tokens]
    assert int(re.findall(r"Used (\d+) registers", said)[0]) <= registers
    steps = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?!NOP)\S", run_tool("cuobjdump", "-sass", binary))
    elements = 2 * math.prod(choose_tile(rope.num_pairs, tokens, dtype.itemsize))
    threads = 32 * compiler.made[-1].metadata.num_warps
    assert len(steps) * threads / elements <= instructions


def run_tool(name: str, *arguments: str | Path, words: str = "stdout") -> str:
    """What a program of CUDA's prints, of those that Triton brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    return str(getattr(done, words))


@pytest.mark.parametrize(
    ("strides", "offset", "packed"),
    [
        pytest.param((4096, 512, 128, 1), 0, True, id="all on boundaries"),
        pytest.param((4100, 512, 128, 1), 0, False, id="batches"),
        pytest.param((4096, 516, 128, 1), 0, False, id="tokens"),
        pytest.param((4096, 512, 132, 1), 0, False, id="heads"),
        pytest.param((4096, 512, 128, 2), 0, False, id="items"),
        pytest.param((4096, 512, 128, 1), 4, False, id="the first item"),
    ],
)
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "new q", "new k"])
def test_memory_off_16_byte_boundaries_is_not_read_in_pieces_of_16(
    which: int, strides: tuple[int, ...], offset: int, packed: bool
) -> None:
    """Of any tensor, in any dimension: a device would stop at the first such access."""
    shape, memory = (2, 3, 2, 64), torch.empty(2**14, dtype=torch.bfloat16)
    tensors = [memory.as_strided(shape, (4096, 512, 128, 1)) for _ in range(4)]
    tensors[which] = memory.as_strided(shape, strides, offset)
    row = torch.zeros(2, 3, 32)
    call = Turn(tensors[:2], row, row, "half", "half", 0)
    plan = make_plan(call, tensors[2:])
    assert plan is not None
    names = load_kernels().rotation.arg_names[-len(plan.arguments) :]
    assert dict(zip(names, plan.arguments, strict=True))["packed"] == packed
    key = plan_key(call, tensors[2:])
    tensors[which] = memory.as_strided(shape, (4096, 512, 128, 1))
    again = plan_key(call._replace(xs=tensors[:2]), tensors[2:])
    assert (key == again) == packed


def test_a_pair_that_moves_in_place_waits_for_every_read(compiler: Compiler) -> None:
    """Where a thread writes what another reads, all have read before any writes."""
    launch(DEEPSEEK, in_place=True)
    first, second, *steps = compiler.made[-1].asm["ttir"].split("barrier")
    # heads; then cos and sin, what was read, and the next heads
    assert (first.count("tt.load"), first.count("tt.store")) == (1, 0)
    assert (second.count("tt.load"), second.count("tt.store")) == (3, 2)
    for step in steps[:-1]:
        assert (step.count("tt.load"), step.count("tt.store")) == (1, 2)
    assert "bar.sync" in compiler.assembly()
    launch(HALF, in_place=True)
    assert "barrier" not in compiler.made[-1].asm["ttir"]


@pytest.mark.parametrize("rope", [HALF, JOINED], ids=["half", "interleaved"])
def test_few_heads_are_on_their_way_before_rows_are_read(
    rope: Rope, compiler: Compiler, tmp_path: Path
) -> None:
    """In the machine code too."""
    launch(rope, DECODE)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiler.made[-1].asm["cubin"])
    code = run_tool("cuobjdump", "-sass", binary)
    order = re.findall(r"\b(LDG|BAR|STG)\b", code)
    # heads; cos and sin of pairs; heads
    assert order[:4] == ["LDG", "LDG", "BAR", "LDG"]
    assert order[-2:] == ["STG", "STG"]


def test_products_are_fused_where_the_source_says_so(
    compiler: Compiler, compiler_of_rows: Compiler
) -> None:
    """The compiler neither fuses nor parts any other, so that bits do not depend on it."""
    launch(tokens=DECODE, heads=(8,))
    make_rows()
    # both coordinates; two polynomials of four coefficients, and the 1 of the cosine
    for made, fused in ((compiler, 2), (compiler_of_rows, 2 * 3 + 1)):
        assert made.made[-1].asm["ttir"].count("math.fma") == fused
    count = Counter(re.findall(r"\b(fma|mul|add|sub)(?:\.rn)?\.f32", compiler.assembly()))
    # each of 8 pairs: the same, and a product of each coordinate. A negated product may be written
    # as one that is added to zero
    assert count["fma"] + count["mul"] == 8 * (2 + 2)
    assert count["fma"] >= 8 * 2
    assert (count["add"], count["sub"]) == (0, 0)
