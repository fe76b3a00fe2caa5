"""What Triton compiles: how often, and to what. The compiler needs no GPU to write for one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phasor import Rope, Sectioned
from phasor.torch import _triton, chosen_backend
from phasor.torch._triton import fused as triton_fused
from phasor.torch._triton.plan import key_of, plan_of
from phasor.torch._triton.tiles import TIMES_BITS, module, reciprocal

from .triton_runs import APART, forget_plans, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(APART, reason="it compiles by itself"),
]

HALF = Rope(head_dim=128, pairing="half")
JOINED = Rope(head_dim=128, pairing="interleaved")
DEEPSEEK = Rope(
    head_dim=192, rotary_dim=64, rotary_start=128, pairing="interleaved", pairing_out="half"
)
PARTIAL = Rope(head_dim=128, rotary_dim=64, pairing="half")
THREE = Rope(head_dim=128, pairing="half", axes=Sectioned((16, 24, 24)))
PREFILL, DECODE = (1, 4096), (64, 1)
#: Every kernel, and the module it is in.
KERNELS = {
    "rotation": "kernels", "forward": "norm", "backward": "norm", "rotate_and_cache": "cache"
}  # fmt: skip


class Hopper:
    """What Triton asks of a driver; launches are written down."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
        load_binary=lambda *binary: (1, 2, 64, 0, 1024),
    )

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def launcher_cls(self, *made: Any) -> Callable[..., None]:
        return lambda *given: self.launched.append(given)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Compiler:
    """Stands where the kernel is launched: compiles it and keeps it, and launches nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.made: list[Any] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def compile_only(*given: Any, **constants: Any) -> None:
            self.made.append(self.kernel.run(*given, grid=grid, warmup=True, **constants))

        return compile_only

    def variants(self) -> int:
        """How many different kernels there are."""
        return len({id(kernel) for kernel in self.made})

    def assembly(self) -> str:
        """Of the last kernel."""
        return self.made[-1].asm["ptx"]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hopper:
    """A device to compile for, for which nothing has been compiled yet."""
    import triton.runtime

    driver = Hopper()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    for name, file in KERNELS.items():
        kernel = getattr(module(file), name)
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    forget_plans(monkeypatch)
    return driver


def compiler_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """A kernel that is compiled and not launched."""
    compiler = Compiler(getattr(module(KERNELS[name]), name))
    monkeypatch.setattr(module(KERNELS[name]), name, compiler)
    return compiler


@pytest.fixture
def compiler(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """The rotation, compiled and not launched."""
    return compiler_of("rotation", monkeypatch)


def launch(
    rope: Rope = HALF,
    tokens: tuple[int, ...] = PREFILL,
    heads: tuple[int, ...] = (8, 2),
    dtype: torch.dtype = torch.bfloat16,
    *,
    places: Tensor | None = None,
    laid: Callable[[Tensor], Tensor] | None = None,
    in_place: bool = False,
    inverse: bool = False,
    gain: float = 1.0,
) -> None:
    """The launch for a query, and a key, of those heads."""
    xs = [torch.empty(*tokens, n, rope.head_dim, dtype=dtype) for n in heads]
    xs = xs if laid is None else [laid(x) for x in xs]
    outs = xs if in_place else [torch.empty_like(x) for x in xs]
    angles = [torch.zeros(tokens[-1], dtype=torch.int64) if places is None else places]
    _triton._turn(xs, outs, angles, rope.to_json(), inverse, gain)


def call(
    name: str,
    rope: Rope,
    tokens: int,
    laid: Callable[[Tensor], Tensor],
    weight: Tensor | None = None,
) -> None:
    """What launches that kernel, in bfloat16: in place, if it has the choice."""
    q, k = (laid(torch.empty(tokens, n, rope.head_dim, dtype=torch.bfloat16)) for n in (8, 2))
    places, text = torch.zeros(tokens, dtype=torch.int64), rope.to_json()
    weight = torch.ones(rope.head_dim, dtype=torch.bfloat16) if weight is None else weight
    normed = [weight, weight], [places], text, 1e-6, 1.0
    if name == "rotation":
        _triton._turn([q, k], [q, k], [places], text, False, 1.0)
    elif name == "forward":
        triton_fused.norm_rotate([q, k], *normed)
    elif name == "backward":
        triton_fused.norm_rotate_backward([q, k], [q, k], *normed)
    else:
        caches = [laid(torch.empty(4, 16, 2, rope.head_dim, dtype=q.dtype)) for _ in range(2)]
        triton_fused.rotate_and_cache_(q, k, k, places, places, *caches, text, 1.0, 1.0, 1.0)


def as_it_is(x: Tensor) -> Tensor:
    """In one piece."""
    return x


def heads_first(x: Tensor) -> Tensor:
    """The same shape, of memory ``[batch, heads, seq, head_dim]``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def inside(x: Tensor) -> Tensor:
    """The same shape, as heads of a wider projection."""
    return torch.cat((x, x, x), -2)[..., x.shape[-2] :, :][..., : x.shape[-2], :]


def misaligned(x: Tensor) -> Tensor:
    """The same shape, one element off."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape)


def test_forty_shapes_compile_two_kernels(compiler: Compiler) -> None:
    """One for many tokens and one for few, whatever the batch, the heads, the strides, the gain.

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
            places = torch.zeros(2 * tokens[-1], dtype=torch.int64)[1::2]
            launch(tokens=tokens, heads=heads, laid=laid, places=places, gain=1 + calls / 7)
            launch(tokens=tokens, heads=heads, laid=laid, in_place=True)
            calls += 1
    assert calls == 40
    assert compiler.variants() == 2


OTHERS: dict[str, dict[str, Any]] = {
    "the inverse": {"inverse": True},
    "another pairing": {"rope": JOINED},
    "fewer pairs": {"rope": PARTIAL},
    "32-bit positions": {"places": torch.zeros(4096, dtype=torch.int32)},
    "several axes": {"rope": THREE, "places": torch.zeros(4096, 3, dtype=torch.int64)},
    "fractions": {"places": torch.zeros(4096)},
    "another dtype": {"dtype": torch.float16},
    "odd addresses": {"laid": misaligned},
}


def test_what_compiles_another_kernel_is_what_is_documented(compiler: Compiler) -> None:
    """Each of these one, however often; the slice alone another than the slice and the rest."""
    launch()
    for made, other in enumerate(OTHERS, start=2):
        launch(**OTHERS[other])
        launch(**{**OTHERS[other], "heads": (3,), "gain": 2.0})
        assert compiler.variants() == made, other
    launch(rope=PARTIAL, in_place=True)
    assert compiler.variants() == len(OTHERS) + 2


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
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
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
    """A position and a thread's two pairs of a table are 8; nothing is kept in local memory."""
    launch(rope, tokens, dtype=dtype, laid=laid)
    assembly = compiler.assembly()
    wide, narrow = {"ld.global.v4.b32", "st.global.v4.b32"}, {"ld.global.b64", "ld.global.v2.b32"}
    assert wide < set(traffic(assembly)) <= wide | narrow
    assert ".local" not in assembly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "pairing", "laid"),
    [
        pytest.param(128, 128, "half", as_it_is, id="Llama"),
        pytest.param(128, 64, "half", as_it_is, id="GLM-4.5"),
        pytest.param(256, 64, "half", as_it_is, id="Qwen3-Next"),
        pytest.param(256, 256, "half", as_it_is, id="Gemma 3"),
        pytest.param(128, 128, "half", misaligned, id="off boundaries"),
        pytest.param(128, 128, "interleaved", misaligned, id="interleaved, off boundaries"),
        pytest.param(256, 64, "half", misaligned, id="a part, off boundaries"),
    ],
)
@pytest.mark.parametrize("tokens", [8192, 64], ids=["many tokens", "few tokens"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.usefixtures("hopper")
def test_registers_hold_what_a_tile_needs(
    name: str,
    tokens: int,
    head_dim: int,
    rotary_dim: int,
    pairing: Any,
    laid: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Nothing spills, where heads turn in part and where memory is read number by number too."""
    import triton

    compiler = compiler_of(name, monkeypatch)
    rope = Rope(head_dim=head_dim, rotary_dim=rotary_dim, pairing=pairing)
    call(name, rope, tokens, laid)
    code = tmp_path / "kernel.ptx"
    code.write_text(compiler.assembly())
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    done = subprocess.run(
        [assembler, "-v", "--gpu-name=sm_90a", code, "-o", tmp_path / "kernel.cubin"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


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
    rope = Rope(head_dim=64, pairing="half").to_json()
    plan = plan_of(tensors, [torch.zeros(2, 3).long()], rope, False, 1.0, True, True)
    assert plan is not None
    names = module("kernels").rotation.arg_names[-len(plan.arguments) :]
    assert dict(zip(names, plan.arguments, strict=True))["packed"] == packed
    key = key_of(tensors, [torch.zeros(2, 3).long()], rope, False, 1.0, True, True)
    tensors[which] = memory.as_strided(shape, (4096, 512, 128, 1))
    again = key_of(tensors, [torch.zeros(2, 3).long()], rope, False, 1.0, True, True)
    assert (key == again) == packed


def test_the_stride_of_a_single_head_means_nothing() -> None:
    """A key that all queries share is read in pieces of 16 bytes, whatever torch says of it."""
    x = torch.empty(3, 64, dtype=torch.bfloat16).as_strided((3, 1, 64), (64, 5, 1))
    rope = Rope(head_dim=64, pairing="half").to_json()
    plan = plan_of([x] * 4, [torch.zeros(3).long()], rope, False, 1.0, False, False)
    assert plan is not None
    names = module("kernels").rotation.arg_names[-len(plan.arguments) :]
    assert dict(zip(names, plan.arguments, strict=True))["packed"]


def test_a_pair_that_moves_in_place_waits_for_every_read(compiler: Compiler) -> None:
    """Where a thread writes what another reads, all have read before any writes."""
    launch(DEEPSEEK, in_place=True)
    program = compiler.made[-1].asm["ttir"]
    before, _, after = program.partition("barrier")
    # a position and heads, and then rows of four digits
    assert (before.count("tt.load"), after.count("tt.load")) == (2, 8)
    assert "tt.store" not in before
    assert "bar.sync" in compiler.assembly()
    launch(HALF, in_place=True)
    assert "barrier" not in compiler.made[-1].asm["ttir"]


@pytest.mark.parametrize("rope", [HALF, JOINED], ids=["half", "interleaved"])
def test_few_heads_are_on_their_way_before_rows_are_asked_for(
    rope: Rope, compiler: Compiler, tmp_path: Path
) -> None:
    """In the machine code too: left alone, the assembler asks for heads when all rows are there."""
    import triton

    launch(rope, DECODE)
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiler.made[-1].asm["cubin"])
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [disassembler, "-sass", binary]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    order = re.findall(r"\b(LDG\.E\.64|LDG\.E\.128|BAR|STG)\b", code)
    barrier = order.index("BAR")
    assert order[:barrier] == ["LDG.E.64", "LDG.E.128", "LDG.E.128"]
    assert order[-2:] == ["STG", "STG"]


def test_a_reciprocal_divides_every_count() -> None:
    """Of 31 bits, beside every multiple that could be mistaken."""
    largest = 2**31 - 1
    for n in [*range(1, 130), 999, 4097, 65_535, 2**20 + 7, 2**30 - 1, 2**30 + 1, largest]:
        packed = reciprocal(n)
        times, bits = packed % 2**TIMES_BITS, packed >> TIMES_BITS
        assert packed < 2**63
        assert largest * times < 2**63
        last = largest // n
        for quotient in {0, 1, 2, last // 2, last - 1, last}:
            for count in (quotient * n - 1, quotient * n, quotient * n + 1, largest):
                if 0 <= count <= largest:
                    assert count * times >> bits == count // n


def test_products_are_fused_where_the_source_says_so(compiler: Compiler) -> None:
    """One rounded product and one fused each: the compiler neither fuses nor parts any other."""
    launch(tokens=DECODE, heads=(8,))
    # both coordinates of three products of digit rows, and of the turn
    assert compiler.made[-1].asm["ttir"].count("math.fma") == 2 * (3 + 1)
    count = Counter(re.findall(r"\b(fma|mul|add|sub)(?:\.rn)?\.f32", compiler.assembly()))
    # each of 8 pairs: the same, and a gain for cos and for sin;
    # a negated product may be written as one that is added to zero, which rounds alike
    assert count["fma"] + count["mul"] == 8 * (4 * 4 + 2)
    assert count["fma"] >= 8 * 4 * 2
    # a position below zero turns sin round
    assert (count["add"], count["sub"]) == (0, 8)


def test_what_is_compiled_is_launched_again_as_triton_launches_it(hopper: Hopper) -> None:
    """The second launch goes past Triton's search, with the same grid and arguments."""
    x = torch.zeros(3, 2, 128)
    places = torch.zeros(3, dtype=torch.int64)
    for dtype in (torch.int64, torch.float64):
        for _ in range(2):
            _triton._turn([x], [x], [places.to(dtype)], HALF.to_json(), False, 1.0)
        first, second = hopper.launched[-2:]
        assert len(first) == len(second)
        # but for what profilers are told of it, which is a new object
        assert first[:6] == second[:6]
        assert first[7:9] == second[7:9]
        for one, other in zip(first[9:], second[9:], strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "rotation"])
def test_fused_kernels_are_found_again_without_a_search(
    name: str, hopper: Hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second launch is the first one's; a weight off its boundary is looked for anew."""
    kernel = getattr(module(KERNELS[name]), name)
    searched: list[int] = []
    search = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *a, **k: searched.append(1) or search(*a, **k))
    tensors = 1 + (name == "backward")  # of which each has a launch of its own
    for _ in range(2):
        call(name, PARTIAL, 3, as_it_is)
        assert len(searched) == tensors
    first, second = hopper.launched[0], hopper.launched[tensors]
    assert first[:6] == second[:6]
    assert len(first) == len(second)
    for one, other in zip(first[9:], second[9:], strict=True):
        assert one.shape == other.shape if isinstance(one, Tensor) else one == other
    if name != "rotate_and_cache":
        call(name, PARTIAL, 3, as_it_is, misaligned(torch.ones(128, dtype=torch.bfloat16)))
        assert len(searched) == 2 * tensors


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
