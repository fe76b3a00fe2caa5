"""How often Triton compiles, and how what it compiled is found again."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phasor import Rope
from phasor.torch import chosen_backend
from phasor.torch._operator import triton as triton_backend
from phasor.torch._operator.arguments import Turn
from phasor.torch._operator.triton import SHIFT_OFFSET, load_kernels, reciprocal

from .triton_compiler import (
    HALF,
    JOINED,
    PARTIAL,
    THREE,
    Compiler,
    Hopper,
    as_it_is,
    compiles,
    heads_first,
    inside,
    launch,
    make_rows,
    misaligned,
)

pytestmark = compiles


def beside_others(row: Tensor) -> Tensor:
    """The same rows, of wider ones."""
    return row.repeat(1, 3)[:, : row.shape[1]]


def test_forty_shapes_compile_three_kernels(compiler: Compiler) -> None:
    """For many tokens, for hundreds and for few, whatever the batch, the heads, the strides.

    Lengths are 1, multiples of 16 and neither, which Triton would tell apart if it were let.
    """
    calls = 0
    for length in (1, 5, 16, 77, 1024, 2048, 2049, 3001):
        for tokens, heads, laid in (
            ((1, length), (8, 2), as_it_is),
            ((2, length), (8, 1), heads_first),
            ((3, length), (5,), inside),
            ((2, 2, length), (3, 3), as_it_is),
            ((length, 1), (1, 1), as_it_is),
        ):
            launch(tokens=tokens, heads=heads, laid=laid, rows=beside_others)
            launch(tokens=tokens, heads=heads, laid=laid, in_place=True)
            calls += 1
    assert calls == 40
    assert compiler.variants() == 3


OTHERS: dict[str, dict[str, Any]] = {
    "the transpose": {"transposed": True},
    "another pairing": {"rope": JOINED},
    "fewer pairs": {"rope": PARTIAL},
    "rows of another dtype": {"rows": Tensor.double},
    "rows in columns": {"rows": lambda row: row.mT.contiguous().mT},
    "another dtype": {"dtype": torch.float16},
    "odd addresses": {"laid": misaligned},
}


def test_what_compiles_another_kernel_is_what_is_documented(compiler: Compiler) -> None:
    """Each of these one, however often; the slice alone another than the slice and the rest."""
    launch()
    for made, other in enumerate(OTHERS, start=2):
        launch(**OTHERS[other])
        launch(**{**OTHERS[other], "heads": (3,)})
        assert compiler.variants() == made, other
    launch(rope=PARTIAL, in_place=True)
    assert compiler.variants() == len(OTHERS) + 2


def test_rows_compile_one_kernel_for_each_kind_of_positions(compiler_of_rows: Compiler) -> None:
    """Whatever their number, the frequencies and the gain."""
    other = Rope(head_dim=128, pairing="interleaved", base=77.0)
    for length in (1, 5, 16, 77, 2048):
        for rope, gain in ((HALF, 1.0), (other, 1.5)):
            make_rows(rope, torch.zeros(length, dtype=torch.int64), gain=gain)
    assert compiler_of_rows.variants() == 1
    make_rows(HALF, torch.zeros(5, dtype=torch.int32))
    make_rows(HALF, torch.zeros(5))
    make_rows(THREE, torch.zeros(5, 3, dtype=torch.int64))
    make_rows(dtype=torch.float64)
    assert compiler_of_rows.variants() == 5


def test_the_stride_of_a_single_head_means_nothing() -> None:
    """A key that all queries share is read in pieces of 16 bytes, whatever torch says of it."""
    x = torch.empty(3, 64, dtype=torch.bfloat16).as_strided((3, 1, 64), (64, 5, 1))
    xs, row = [x], torch.zeros(3, 32)
    plan = triton_backend.make_plan(Turn(xs, row, row, "half", "half", 0), xs)
    assert plan is not None
    names = load_kernels().rotation.arg_names[-len(plan.arguments) :]
    assert dict(zip(names, plan.arguments, strict=True))["packed"]


def test_a_reciprocal_divides_every_count() -> None:
    """Of 31 bits, beside every multiple that could be mistaken."""
    largest = 2**31 - 1
    for n in [*range(1, 130), 999, 4097, 65_535, 2**20 + 7, 2**30 - 1, 2**30 + 1, largest]:
        packed = reciprocal(n)
        times, bits = packed % 2**SHIFT_OFFSET, packed >> SHIFT_OFFSET
        assert packed < 2**63
        assert largest * times < 2**63
        last = largest // n
        for quotient in {0, 1, 2, last // 2, last - 1, last}:
            for count in (quotient * n - 1, quotient * n, quotient * n + 1, largest):
                if 0 <= count <= largest:
                    assert count * times >> bits == count // n


def test_what_is_compiled_is_launched_again_as_triton_launches_it(hopper: Hopper) -> None:
    """The second launch goes past Triton's search, with the same grid and arguments."""
    x = torch.zeros(3, 2, 128)
    for dtype in (torch.float32, torch.bfloat16):
        row = torch.zeros(3, 64, dtype=dtype)
        for _ in range(2):
            triton_backend.run_into(Turn([x], row, row, "half", "half", 0), [x])
        first, second = hopper.launched[-2:]
        assert len(first) == len(second)
        # but for what profilers are told of it, which is a new object
        assert first[:6] == second[:6]
        assert first[7:9] == second[7:9]
        for one, other in zip(first[9:], second[9:], strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_nothing_to_rotate_compiles_nothing(compiler: Compiler) -> None:
    """No token, no head."""
    launch(tokens=(2, 0))
    launch(heads=(0, 0))
    assert compiler.variants() == 0


def test_a_tensor_on_a_gpu_is_rotated_by_triton() -> None:
    """The choice is printed without a GPU at hand."""
    with FakeTensorMode():
        assert chosen_backend(torch.empty(1, 1, 2, device="cuda")) == "triton"


def test_without_triton_phasor_rotates_and_says_so_once() -> None:
    """A missing Triton is one warning and plain torch operations; the CPU does not miss it."""
    program = (
        "import sys, warnings\n"
        "sys.modules['triton'] = None\n"
        "import torch, phasor.torch\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with warnings.catch_warnings(record=True) as said, FakeTensorMode():\n"
        "    warnings.simplefilter('always')\n"
        "    chosen = phasor.torch.chosen_backend\n"
        "    here, there = (torch.empty(1, 1, 2, device=d) for d in ('cpu', 'cuda'))\n"
        "    names = [chosen(here), len(said), chosen(there), chosen(there)]\n"
        "mine = [str(one.message) for one in said if 'phasor' in str(one.message)]\n"
        "print(*names, len(mine), mine[0][:62])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ
    )
    expected = "0 eager eager 1 phasor rotates with plain torch operations on this GPU: triton"
    assert done.stdout.strip().split(" ", 1)[1] == expected
