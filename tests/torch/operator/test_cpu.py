"""The CPU kernel: every instruction set, every layout of memory, and what it refuses."""

from __future__ import annotations

import ast
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import phasor.torch
from phasor import BackendError, Rope, TensorError
from phasor.torch import Rotation, rotate, rotate_, rotate_qk, rotate_qk_
from phasor.torch._operator import cpu

from ...each import each
from ..torch_arrays import DTYPES, assert_rotated, normal, run_on
from ..torch_cases import memory_layouts

# without a compiler there is nothing to test; CI has one
pytestmark = pytest.mark.skipif(
    not cpu.paths() and "CI" not in os.environ, reason="the kernel is not built"
)
PAIRINGS = ["half", "interleaved"]
PLACES = [0, 1, 1023, 1024, 70_001, -(2**63), 2**31 + 7, 2**63 - 1, -1, -2000, -(2**35)]
# widths that fill registers exactly, leave a tail, or are all tail
WIDTHS = {"64": 64, "128": 128, "160": 160, "24": 24, "10": 10, "2": 2}


def test_the_paths_of_this_machine_are_all_there() -> None:
    """What the processor says it can is what is tested; portable code always is."""
    names = cpu.paths()
    assert names[-1] == "portable"
    processors = Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and processors.exists():
        lines = processors.read_text().splitlines()
        flags = next(line for line in lines if line.startswith("flags")).split()
        assert ("avx2" in names) == {"avx2", "fma", "f16c"}.issubset(flags)
        wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
        assert ("avx512" in names) == wide.issubset(flags)


def test_auto_is_the_kernel_for_tensors_in_memory() -> None:
    """The choice is short: the CPU kernel for CPU tensors."""
    assert phasor.torch.chosen_backend(torch.zeros(1, 1, 2)) == "cpu"
    assert phasor.torch.chosen_backend(torch.zeros(1, 1, 2, device="meta")) == "eager"


@each("width", WIDTHS.values())
@each("pairing_out", PAIRINGS)
@each("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("path")
def test_every_width_is_right(
    dtype: torch.dtype, pairing: Any, pairing_out: Any, width: int
) -> None:
    """Registers that are filled, and tails; for several heads, which share a row."""
    rope = Rope(head_dim=width, pairing=pairing, pairing_out=pairing_out)
    x = normal(len(PLACES), 5, width, dtype=dtype)
    assert_rotated(rotate(x, PLACES, rope), x, PLACES, rope)
    written = x.clone()
    rotate_(written, PLACES, rope)
    assert torch.equal(written, rotate(x, PLACES, rope))


@each("pairing_out", PAIRINGS)
@each("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("path")
def test_memory_makes_no_difference(dtype: torch.dtype, pairing: Any, pairing_out: Any) -> None:
    """However the tensor lies in memory, in place or not, the bits are the same."""
    rope = Rope(
        head_dim=20, pairing=pairing, pairing_out=pairing_out, rotary_dim=16, rotary_start=2
    )
    x = normal(2, 7, 3, 20, dtype=dtype)
    places = torch.tensor([3, 1, 4, 1024, 5, 9, -26])
    plain = rotate(x, places, rope)
    for name, laid in memory_layouts(x).items():
        assert torch.equal(rotate(laid, places, rope), plain), name
        rotate_(laid, places, rope)
        assert torch.equal(laid, plain), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 64, 80, 512])
def test_instruction_sets_agree(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with a fused multiplication give the same bits, whatever part of a register is left."""
    x = normal(9, 5, width, dtype=dtype)
    made = []
    for name in [name for name in cpu.paths() if name != "portable"]:
        run_on(name, monkeypatch)
        ropes = [Rope(head_dim=width, pairing=pairing) for pairing in PAIRINGS]
        made += [[rotate(x, PLACES[:9], rope) for rope in ropes]]
    for other in made[1:]:
        assert all(map(torch.equal, other, made[0]))


def every_16_bit_number(dtype: torch.dtype) -> Tensor:
    """All 65536 of them, as ``[tokens, 1, 2]`` with a zero beside each."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return torch.stack((bits, torch.zeros_like(bits)), -1)[:, None].view(dtype)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("path")
def test_every_16_bit_number_survives_the_identity(dtype: torch.dtype, pairing: Any) -> None:
    """Subnormal numbers, infinities and NaNs included; a register of 16 pairs at a time."""
    x = every_16_bit_number(dtype).reshape(-1, 1, 32)
    one, zero = torch.ones(16), torch.zeros(16)
    y = Rotation(one, zero, pairing=pairing)(x)
    # 0 * inf makes a NaN of an infinity's neighbour: compare where neither is one
    first, second = (x[..., ::2], x[..., 1::2]) if pairing == "interleaved" else x.chunk(2, -1)
    sound = (first.isfinite() & second.isfinite()).expand_as(first)
    kept = (
        torch.stack((sound, sound), -1).flatten(-2)
        if pairing == "interleaved"
        else (torch.cat((sound, sound), -1))
    )
    # -0 + 0 is 0: compare numbers, not bits
    assert torch.equal(y[kept], x[kept])
    assert torch.equal(y.isnan() | y.isinf(), ~kept | y.isnan() | y.isinf())


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("path")
def test_results_are_rounded_once_to_nearest_even(dtype: torch.dtype, pairing: Any) -> None:
    """One product, which float32 rounds once and the result once more, as torch converts."""
    x = every_16_bit_number(dtype).reshape(-1, 1, 32)
    x = torch.where(x.isfinite(), x, torch.zeros_like(x))
    for factor in (1 + 2**-9, 1 / 3, 2.0**-12, 1 + 2**-8 + 2**-9):
        row = torch.full((16,), factor)
        y = Rotation(row, torch.zeros(16), pairing=pairing)(x)
        assert torch.equal(y, (x.float() * torch.tensor(factor)).to(dtype))


@pytest.mark.usefixtures("path")
def test_a_nan_in_a_row_is_never_a_number() -> None:
    """Whatever its bits: those of unwritten memory would carry when rounded."""
    full = torch.full((8,), -1, dtype=torch.int32).view(torch.float32)
    x = normal(1, 1, 16, dtype=torch.bfloat16)
    assert Rotation(full, full, pairing="half")(x).isnan().all()
    assert Rotation(full, full, pairing="interleaved")(x).isnan().all()


def test_rows_wider_than_the_head_are_refused_by_the_operator_itself() -> None:
    """Callers look first; the operator must not write beyond the tensor either."""
    x, row = normal(3, 2, 32), torch.ones(3, 32)
    with pytest.raises(TensorError, match="32 pairs from coordinate 0 on do not fit a head of 32"):
        torch.ops.phasor.turn([x], row, row, "half", "half", 0, False, "cpu")


@pytest.mark.parametrize("wrong", ["dtype", "step"])
def test_rows_that_the_kernel_cannot_read_are_made_readable(wrong: str) -> None:
    """It reads one piece of the dtype that it computes in, and says so of anything else."""
    x, row = normal(3, 2, 8), normal(3, 4, seed=1)
    given = row.double() if wrong == "dtype" else normal(3, 8)[:, ::2].copy_(row)
    expected = Rotation(row, row, pairing="half")(x)
    assert torch.equal(Rotation(given, given, pairing="half")(x), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.usefixtures("path")
def test_threads_make_no_difference(threads: int) -> None:
    """A tensor that is worth several threads gives the same bits on each number of them."""
    rope = Rope(head_dim=64, pairing="half")
    q, k = normal(2, 301, 8, 64), normal(2, 301, 2, 64)
    alone = rotate(q[1, 300:], 300, rope)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        turned, _ = rotate_qk(q, k, torch.arange(301), rope)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(turned[1, 300:], alone)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads of Linux")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.processes
def test_every_thread_honours_the_number_that_torch_was_told(threads: int) -> None:
    """OpenMP forgets it in a new thread; the system counts what each rotation has started."""
    program = (
        "import os, threading, torch, phasor, phasor.torch\n"
        "rope, x = phasor.Rope(head_dim=64, pairing='half'), torch.zeros(400, 8, 64)\n"
        f"torch.set_num_threads({threads})\n"
        "end = threading.Event()\n"  # a thread takes those that it started with it when it ends
        "def started(done):\n"
        "    before = len(os.listdir('/proc/self/task'))\n"
        "    phasor.torch.rotate_(x, 1, rope)\n"
        "    print(len(os.listdir('/proc/self/task')) - before)\n"
        "    done.set()\n"
        "    end.wait()\n"
        "for _ in range(3):\n"
        "    done = threading.Event()\n"
        "    threading.Thread(target=started, args=(done,)).start()\n"
        "    done.wait()\n"
        "end.set()\n"
    )
    assert printed(program, OMP_NUM_THREADS="4").split() == 3 * [str(threads - 1)]


@pytest.mark.parametrize("threads", [2, 3, 4, 6, 8])
@pytest.mark.usefixtures("path")
def test_heads_first_memory_is_cut_by_heads(threads: int) -> None:
    """Into as many parts as divide the heads of both, each of them cut by tokens."""
    rope = Rope(head_dim=64, pairing="half")
    q, k = normal(400, 8, 64), normal(400, 4, 64)
    expected = rotate_qk(q, k, range(5000, 5400), rope)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
        made = rotate_qk(q, k, range(5000, 5400), rope)
        rotate_qk_(q, k, range(5000, 5400), rope)
    finally:
        torch.set_num_threads(before)
    for wanted, new, written in zip(expected, made, (q, k), strict=True):
        assert torch.equal(new, wanted)
        assert torch.equal(written, wanted)


@pytest.mark.usefixtures("path")
def test_large_new_outputs_are_written_past_the_cache() -> None:
    """Streaming stores, which only outputs larger than the cache get, change no bit."""
    rope = Rope(head_dim=128, pairing="half")
    x = normal(1, 1200, 8, 128).repeat(1, 10, 1, 1)
    places = torch.arange(12_000)
    whole = rotate(x, places, rope)
    assert whole.nbytes > 32 * 2**20
    assert torch.equal(whole[:, -3:], rotate(x[:, -3:], places[-3:], rope))


def test_a_named_kernel_needs_memory_it_can_read() -> None:
    """The backend is not replaced where it cannot run."""
    with pytest.raises(BackendError, match="backend='cpu' cannot rotate x: it needs a tensor in"):
        rotate(
            torch.zeros(1, 1, 2, device="meta"), 0, Rope(head_dim=2, pairing="half"), backend="cpu"
        )


def printed(program: str, **environment: str) -> str:
    """What a Python program of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


# the best would be taken anyway
@pytest.mark.parametrize("name", cpu.paths()[-1:])
@pytest.mark.processes
def test_the_environment_forces_a_path(name: str) -> None:
    """PHASOR_CPU names the instruction set to run."""
    program = (
        "from phasor.torch._operator import cpu\nprint(list(cpu._native.paths())[cpu._path_index])"
    )
    assert printed(program, PHASOR_CPU=name) == name


@pytest.mark.processes
def test_an_unknown_path_is_refused() -> None:
    """With what this machine has."""
    program = (
        "import phasor\n"
        "try:\n    import phasor.torch\n"
        "except phasor.BackendError as error:\n    print(error)"
    )
    assert "PHASOR_CPU must be one of" in printed(program, PHASOR_CPU="mmx")


def test_the_stub_of_the_extension_names_what_it_offers() -> None:
    """And nothing else: the type checker holds every call to it."""
    native = pytest.importorskip("phasor._native")
    stub = Path(cpu.__file__).parents[2] / "_native.pyi"
    described = {
        one.name for one in ast.parse(stub.read_text("utf-8")).body if hasattr(one, "name")
    }
    assert described == {name for name in vars(native) if not name.startswith("_")}


@pytest.mark.processes
def test_without_its_extension_phasor_rotates_and_says_so_once() -> None:
    """One warning at the first rotation, with the command that builds it, and the eager backend."""
    program = (
        "import sys, warnings\n"
        "sys.modules['phasor._native'] = None\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    import torch, phasor.torch\n"
        "    assert not [one for one in said if 'phasor' in str(one.message)]\n"
        "    rope = phasor.Rope(head_dim=2, pairing='half')\n"
        "    for _ in range(3):\n"
        "        phasor.torch.rotate(torch.ones(1, 1, 2), 1, rope)\n"
        "mine = [str(one.message) for one in said if 'phasor' in str(one.message)]\n"
        "backend = phasor.torch.chosen_backend(torch.ones(1, 1, 2))\n"
        "print(len(mine), mine[0][:58], mine[0].split()[-1], backend)"
    )
    expected = "1 phasor rotates with plain torch operations on this CPU: it phasor-rope eager"
    assert printed(program) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_heads_wider_than_the_kernels_rows_are_rotated_without_it(dtype: torch.dtype) -> None:
    """Rows live on its stack; "auto" goes another way, and the operator itself refuses."""
    rope = Rope(head_dim=4098, pairing="half")
    x, places = normal(1, 1, 4098, dtype=dtype), torch.tensor([1_049_601])
    assert_rotated(rotate(x, places, rope), x, places, rope)
    y = x.clone()
    assert_rotated(rotate_(y, places, rope), x, places, rope)
    with pytest.raises(BackendError, match="cannot rotate x: its heads are at most 4096 wide"):
        rotate(x, places, rope, backend="cpu")


@pytest.mark.usefixtures("path")
def test_positions_that_are_negated_views_turn_back() -> None:
    """Their memory says otherwise."""
    rope, x = Rope(head_dim=16, pairing="half"), normal(5, 2, 16)
    places = torch._neg_view(torch.arange(5))
    assert torch.equal(rotate(x, places, rope), rotate(x, -torch.arange(5), rope))
