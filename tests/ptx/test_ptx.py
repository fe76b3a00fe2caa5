"""The machine that stands for a GPU: its arithmetic, its threads, and what it refuses."""

from __future__ import annotations

import ctypes
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from .arithmetic import bfloat16, convert, fma, pack, shifted, widened
from .machine import launch
from .memory import AccessError
from .program import read

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 .ptr .global .align 1 kernel_param_1,
    .param .u32 kernel_param_2
)
.reqntid {threads}
{{
    .reg .pred %p<9>;
    ld.param.b64 %rd1, [kernel_param_0];  // read here
    ld.param.b64 %rd2, [kernel_param_1];  // write there
    ld.param.b32 %r2, [kernel_param_2];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd9, %r1, 4;
    add.s64 %rd3, %rd1, %rd9;
    add.s64 %rd4, %rd2, %rd9;
"""


def ran(
    body: str,
    x: NDArray,
    *,
    y: NDArray | None = None,
    number: int = 0,
    threads: int = 64,
    programs: int = 1,
    shared: int = 0,
    seed: int = 0,
) -> tuple[NDArray, Counter[tuple[str, int]]]:
    """What a kernel leaves in ``y``; thread t has ``x[t]`` at ``%rd3`` and ``y[t]`` at ``%rd4``."""
    y = np.zeros_like(x) if y is None else y
    program = read(HEAD.format(threads=threads) + body + "\n    ret;\n}\n")
    at, to = x.ctypes.data, y.ctypes.data
    arguments = np.array([at, to, number], np.uint64).tobytes()[:20]
    traffic = launch(program, programs, shared, arguments, [(at, x.nbytes), (to, y.nbytes)], seed)
    return y, traffic


def words(count: int = 64) -> NDArray:
    """Different numbers on a boundary of 128 bytes."""
    room = np.zeros(count + 32, np.uint32)
    first = -room.ctypes.data // 4 % 32
    room[first : first + count] = np.arange(count) * 2654435761 % 2**32
    return room[first : first + count]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_fused_product_is_rounded_once(dtype: type) -> None:
    """As the C library's is, where sums cancel, and in float32 where they are subnormal too."""
    c_type, name = {np.float32: (ctypes.c_float, "fmaf"), np.float64: (ctypes.c_double, "fma")}[
        dtype
    ]
    theirs = getattr(ctypes.CDLL("libm.so.6"), name)
    theirs.argtypes, theirs.restype = [c_type] * 3, c_type
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 20_000)).astype(dtype)
    c[:5000] = -(a * b)[:5000]
    c[5000:9000] *= dtype(2.0**-23)
    if dtype == np.float32:
        a[9000:12_000] *= np.float32(2.0**-130)
        c[9000:12_000] *= np.float32(2.0**-126)
    # a hair beside the middle of two numbers, which an intermediate rounding would take it for
    eps = np.finfo(dtype).eps
    a[-2:], b[-2:], c[-2:] = 1 + eps, (1 - eps) * eps / 2, (1 + eps, 1)
    b[-1] = -b[-1]
    ours = fma(a, b, c)
    assert ours.dtype == dtype
    assert ours.tolist() == [theirs(*each) for each in zip(a, b, c, strict=True)]


def test_16_bits_are_rounded_to_nearest_even() -> None:
    """As torch does, between any two of them and in the middle."""
    bits = np.arange(0, 2**32, 2**32 // 99_991, dtype=np.uint64).astype(np.uint32)
    middles = np.arange(0, 2**32, 2**15, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate((bits, middles)).view(np.float32)
    x = x[~np.isnan(x)]
    wanted = torch.from_numpy(x).to(torch.bfloat16)
    assert np.array_equal(bfloat16(x), wanted.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(widened(bfloat16(x)), wanted.float().numpy())
    with np.errstate(over="ignore"):
        both = pack("f16x2", x[1:], x[:-1])
    halves = torch.from_numpy(x).half().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(both.view(np.uint16).reshape(-1, 2)[:, 0], halves[:-1])
    assert np.array_equal(both.view(np.uint16).reshape(-1, 2)[:, 1], halves[1:])


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.uint64, np.int64])
def test_shifts_go_as_far_as_they_are_told(dtype: type) -> None:
    """Beyond the last bit there are zeros, or signs; NumPy would begin again."""
    x = np.array([3, 2**30 + 5, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
    size = 8 * x.itemsize
    for by in (0, 1, 7, size - 1, size, size + 9, 200):
        many = np.full(4, by, np.uint32)
        assert shifted(x, many, left=False).tolist() == [int(n) >> by for n in x]
        left = shifted(x, many, left=True)
        assert [int(n) % 2**size for n in left] == [(int(n) << by) % 2**size for n in x]


COMPUTED = {
    "mul.wide.s32 %rd5, %r3, -5; cvt.u32.u64 %r4, %rd5;": lambda x: -5 * x,
    "mul.hi.u32 %r4, %r3, 0xfffffff5U;": lambda x: x * 0xFFFFFFF5 >> 32,
    "mul.hi.s32 %r4, %r3, -5;": lambda x: signed(x) * -5 >> 32,
    "mad.lo.s32 %r4, %r3, 7, -9;": lambda x: 7 * x - 9,
    "bfe.u32 %r4, %r3, 28, 3;": lambda x: x >> 28 & 7,
    "bfe.s32 %r4, %r3, 29, 3;": lambda x: (x >> 29 & 7) - 8 * (x >> 31 & 1),
    "div.s32 %r4, %r3, -7;": lambda x: -(abs(signed(x)) // 7) * (1 if signed(x) >= 0 else -1),
    "rem.s32 %r4, %r3, 7;": lambda x: abs(signed(x)) % 7 * (1 if signed(x) >= 0 else -1),
    "prmt.b32 %r4, %r3, 0x01020304, 0x0176U;": lambda x: (
        (x & 255) << 24 | (x >> 8 & 255) << 16 | 0x0102
    ),
    "prmt.b32 %r4, %r3, 0, 0xbbbbU;": lambda x: 2**32 - 1 if x >> 31 else 0,
    "setp.lt.s32 %p1, %r3, 0; selp.b32 %r4, 1, 2, %p1;": lambda x: 1 if x >> 31 else 2,
    "setp.lt.u32 %p1, %r3, 99; @%p1 bra L; mov.u32 %r4, 5; bra M; L: mov.u32 %r4, 6; M: ;":
        lambda x: 6 if x < 99 else 5,
    "mov.b32 {%rs1, %rs2}, %r3; mov.b32 %r4, {%rs2, %rs1};": lambda x: x >> 16 | x << 16,
    "mov.b32 {_, %rs2}, %r3; cvt.u32.u16 %r4, %rs2;": lambda x: x >> 16,
}  # fmt: skip


def signed(x: int) -> int:
    """Of 32 bits."""
    return x - 2**32 if x >> 31 else x


@pytest.mark.parametrize("code", COMPUTED)
def test_integers_are_computed_as_in_python(code: str) -> None:
    """Modulo 2**32."""
    x = words()
    y, _ = ran(f"ld.global.b32 %r3, [%rd3]; {code} st.global.b32 [%rd4], %r4;", x)
    assert y.tolist() == [COMPUTED[code](int(n)) % 2**32 for n in x]


def test_threads_that_part_meet_again() -> None:
    """Each goes round as often as it says, and all of a warp are there for what comes then."""
    body = """
        mov.u32 %r4, 0;
        LOOP:
        setp.ge.u32 %p1, %r4, %r1;
        @%p1 bra OUT;
        add.s32 %r4, %r4, 1;
        bra LOOP;
        OUT:
        shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;
        shfl.sync.idx.b32 %r6, %r5, 3, 31, -1;
        add.s32 %r5, %r5, %r6;
        st.global.b32 [%rd4], %r5;"""
    y, _ = ran(body, words())
    assert y.tolist() == [(t ^ 1) + (t // 32 * 32 + 2) for t in range(64)]


@pytest.mark.parametrize("trans", [False, True])
def test_matrices_are_shared_out_among_lanes(trans: bool) -> None:
    """Lane 4 r + c has columns 2c and 2c + 1 of row r, or of column r what lies in these rows."""
    form = ".trans" if trans else ""
    body = f"""
        ld.global.b32 %r3, [%rd3];
        shl.b32 %r4, %r1, 2;
        st.shared.b32 [%r4], %r3;
        bar.sync 0;
        shl.b32 %r5, %r1, 4;
        and.b32 %r5, %r5, 127;
        ldmatrix.sync.aligned.m8n8.x1{form}.shared.b16 {{%r6}}, [%r5];
        bar.sync 0;
        st.global.b32 [%rd4], %r6;
        stmatrix.sync.aligned.m8n8.x1{form}.shared.b16 [%r5], {{%r6}};
        bar.sync 0;
        ld.shared.b32 %r7, [%r4];
        st.global.b32 [%rd4+128], %r7;"""
    x = words(32)
    y, _ = ran(body, x, y=words(64), threads=32, shared=128)
    matrix = x.view(np.uint16).reshape(8, 8)
    assert np.array_equal(y[:32].view(np.uint16).reshape(8, 8), matrix.T if trans else matrix)
    assert np.array_equal(y[32:], x)


REFUSED = {
    "outside every tensor": "ld.global.b32 %r3, [%rd3+4];",
    "outside every": "mov.u64 %rd5, 0; ld.global.b32 %r3, [%rd5];",
    "an address outside": "mov.u64 %rd5, 0xfffffffffffffffc; ld.global.b32 %r3, [%rd5];",
    "8 bytes that do not begin on a multiple of 8": "ld.global.v2.b32 {%r3, %r4}, [%rd3];",
    "outside the shared memory": "mov.u32 %r3, 16; ld.shared.b32 %r4, [%r3];",
    "writes what another one reads": """
        xor.b32 %r3, %r1, 1; mul.wide.u32 %rd5, %r3, 4; add.s64 %rd5, %rd1, %rd5;
        ld.global.b32 %r4, [%rd3]; st.global.b32 [%rd5], %r4;""",
    "reads what another one wrote": """
        xor.b32 %r3, %r1, 1; mul.wide.u32 %rd5, %r3, 4; add.s64 %rd5, %rd2, %rd5;
        st.global.b32 [%rd4], %r1; ld.global.b32 %r4, [%rd5];""",
    "two threads write one byte": "st.global.b32 [%rd2], %r1;",
    "lanes of a warp are missing": """
        setp.lt.u32 %p1, %r1, 40; @%p1 shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;""",
    "lanes of a warp are": "setp.lt.u32 %p1, %r1, 40; @%p1 bra A; bar.sync 0; A: bar.sync 0;",
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_gpu_would_not_forgive_is_refused(fault: str) -> None:
    """And says which instruction it was."""
    with pytest.raises(AccessError, match=rf"{fault}.*: .*\b(ld|st|shfl|bar)\."):
        ran(REFUSED[fault], words(), shared=16)


@pytest.mark.parametrize(
    "code",
    [
        "mad.hi.u32 %r3, %r1, 5, %r2;",
        "shfl.sync.up.b32 %r3, %r1, 1, 31, -1;",
        "min.NaN.f32 %r3, %r1, %r2;",
        "add.rz.f32 %r3, %r1, %r2;",
        "add.ftz.f32 %r3, %r1, %r2;",
        "cvt.rni.s32.f32 %r3, %r1;",
        "div.approx.f32 %r3, %r1, %r2;",
        "atom.add.u32 %r3, [%rd3], 1;",
    ],
)
def test_what_is_not_known_is_not_guessed(code: str) -> None:
    """A suffix can change everything."""
    with pytest.raises(KeyError):
        ran(code, words())


def test_a_factor_may_be_narrower_than_what_is_added() -> None:
    """A product of two numbers of 16 bits, and float32 for the rest."""
    x = np.float32([1.5, -2.0, 0.0, 3.0] * 16)
    for kind in ("bf16", "f16"):
        y, _ = ran(
            f"""ld.global.b32 %r3, [%rd3]; cvt.rn.{kind}.f32 %rs1, %r3;
            fma.rn.f32.{kind} %r4, %rs1, %rs1, %r3; st.global.b32 [%rd4], %r4;""",
            x,
        )
        assert y.tolist() == (x * x + x).tolist()


def test_float64_becomes_bfloat16_in_one_rounding() -> None:
    """Which float32 in between would make two of."""
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40, 1 + 2.0**-8, -3.0, np.inf])
    assert widened(convert("bf16", "f64", x)).tolist() == [1 + 2.0**-7, 1, 1, -3, np.inf]


SWAP = """
    xor.b32 %r3, %r1, 33; mul.wide.u32 %rd5, %r3, 4; add.s64 %rd5, %rd1, %rd5;
    ld.global.b32 %r4, [%rd3]; {} st.global.b32 [%rd5], %r4;"""


def test_a_barrier_lets_a_thread_write_what_another_has_read() -> None:
    """In its own block; of another one nobody knows how far it is."""
    x = words()
    was = x.copy()
    with pytest.raises(AccessError, match="no barrier in between"):
        ran(SWAP.format(""), x)
    x[:] = was
    ran(SWAP.format("bar.sync 0;"), x)
    assert x.tolist() == [was[t ^ 33] for t in range(64)]
    with pytest.raises(AccessError, match="no barrier in between"):
        ran(SWAP.format("bar.sync 0;"), x, programs=2)


def test_what_was_never_written_is_garbage() -> None:
    """Another one each time, in registers and in shared memory."""
    for body in (
        "st.global.b32 [%rd4], %r8;",
        "shl.b32 %r3, %r1, 2; ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd4], %r4;",
        "setp.lt.u32 %p1, %r1, 1; @%p1 mov.u32 %r8, 1; st.global.b32 [%rd4], %r8;",
    ):
        first, second = (ran(body, words(), shared=256, seed=seed)[0] for seed in (0, 1))
        assert (first != second).sum() >= 62


def test_traffic_counts_bytes_and_the_sectors_that_a_warp_takes_for_them() -> None:
    """A warp that reads every other number fetches twice what it reads."""
    body = """
        shl.b64 %rd9, %rd9, 1; add.s64 %rd3, %rd1, %rd9;
        ld.global.b32 %r3, [%rd3]; st.global.b32 [%rd4], %r3;"""
    x, y = words(128), words(64)
    _, traffic = ran(body, x, y=y)
    at, to = x.ctypes.data, y.ctypes.data
    assert traffic == {
        ("read", at): 256, ("fetched", at): 512, ("written", to): 256, ("sent", to): 256
    }  # fmt: skip


def test_blocks_beyond_those_that_run_at_once_see_the_same_memory() -> None:
    """Many programs each add to a place of their own; the argument is 32 bits wide."""
    body = """
        mov.u32 %r3, %ctaid.x; mov.u32 %r4, %nctaid.x; mad.lo.s32 %r5, %r3, 64, %r1;
        mul.wide.u32 %rd5, %r5, 4; add.s64 %rd5, %rd2, %rd5;
        add.s32 %r5, %r5, %r4; add.s32 %r5, %r5, %r2;
        st.global.b32 [%rd5], %r5;"""
    y, _ = ran(body, words(), y=np.zeros(600 * 64, np.uint32), programs=600, number=2**32 - 600)
    assert np.array_equal(y, np.arange(600 * 64))


def test_float64_is_rounded_down_or_towards_zero() -> None:
    """To a whole float64, and to an int64."""
    x = np.array([2.5, -2.5, -0.25, 2.0**52 + 1, -7.0, 0.0, 1e18, -1e-30] * 8)
    addresses = "shl.b64 %rd9, %rd9, 1; add.s64 %rd3, %rd1, %rd9; add.s64 %rd4, %rd2, %rd9;"
    for code, expected in (
        ("cvt.rmi.f64.f64 %rd6, %rd5;", np.floor(x)),
        ("cvt.rzi.s64.f64 %rd6, %rd5;", np.trunc(x).astype(np.int64)),
    ):
        body = f"{addresses} ld.global.b64 %rd5, [%rd3]; {code} st.global.b64 [%rd4], %rd6;"
        y, _ = ran(body, x, y=np.zeros_like(expected))
        assert y.tolist() == expected.tolist()
