"""Rotation and cache write in one: plain torch, and Triton on a GPU or interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasor import Rope
from phasor.errors import BackendError, PhasorError, PositionError, SpecError, TensorError
from phasor.torch import rotate
from phasor.torch.backends.triton import launching as triton_launching
from phasor.torch.fused import rotate_and_cache_

from ..gpu.triton_runs import (
    DEVICE,
    RUN_BY,
    convert_as_devices_do,
    runs_kernels,
)
from .fused_cases import BACKENDS, HALF, ROPES, once
from .torch_oracle import assert_rotated, float64, normal

F8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds as devices do."""
    if RUN_BY:
        convert_as_devices_do(monkeypatch)


@pytest.fixture(params=[1, 2**20], ids=["many tokens", "few tokens"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiles."""
    monkeypatch.setattr(triton_launching, "MANY_TOKENS", request.param)


def here(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers where the kernels run."""
    return normal(*shape, dtype=dtype, seed=seed).to(DEVICE)


def eight_bits() -> list[float]:
    """Every finite number of e4m3: four bits of exponent from -7, three of fraction."""
    found = []
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        if exponent == 15 and fraction == 7:
            continue
        size = (
            fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        )
        found.append(-size if code & 128 else size)
    return sorted(set(found))


EIGHT_BITS = np.array(eight_bits())
CACHES: dict[str, Callable[..., Tensor]] = {
    "paged": lambda width, dtype: torch.full((3, 4, 2, width), 9.0, dtype=dtype),
    "contiguous": lambda width, dtype: torch.full((2, 6, 2, width), 9.0, dtype=dtype),
    "heads first": lambda width, dtype: torch.full((2, 2, 6, width), 9.0, dtype=dtype).transpose(
        1, 2
    ),
    "one tensor of keys and values": lambda width, dtype: torch.full(
        (3, 2, 4, 2, width), 9.0, dtype=dtype
    )[:, 1],
}


def a_cache(kind: str, width: int, dtype: torch.dtype) -> Tensor:
    """Twelve rows of two heads, all 9."""
    if dtype != F8:
        return CACHES[kind](width, dtype).to(DEVICE)
    return CACHES[kind](width, torch.uint8).fill_(0x51).to(DEVICE).view(F8)


def rows_of(cache: Tensor) -> np.ndarray:
    """``[slots, heads, width]``."""
    return cache.cpu().float().reshape(-1, *cache.shape[2:]).double().numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, F8])
def test_keys_and_values_go_where_the_slots_say(
    stored: torch.dtype, rope: Rope, kind: str, backend: str
) -> None:
    """The query is rotated where it lies; every other row of a cache keeps its nine."""
    width, places = rope.head_dim, [7, 70_001, 0, -3, 1]
    slots = torch.tensor([11, 0, -1, 5, 6], device=DEVICE)
    q, k = here(5, 3, width, dtype=torch.bfloat16), here(5, 2, width, dtype=torch.bfloat16, seed=1)
    v = here(5, 2, 6, dtype=torch.bfloat16, seed=2)
    key_unit, value_unit = (0.5, 0.003) if stored == F8 else (1.0, 1.0)
    keys, values = a_cache(kind, width, stored), a_cache(kind, 6, stored)
    q_before, k_before = q.cpu().clone(), k.clone()
    came = rotate_and_cache_(
        q, k, v, places, rope, slots, keys, values,
        key_unit=key_unit, value_unit=value_unit, gain=1.5, backend=backend,
    )  # fmt: skip
    assert came is q
    assert_rotated(q.cpu(), q_before, places, rope, gain=1.5)
    assert torch.equal(k, k_before)
    exact = float64(rotate(k.cpu().double(), places, rope, gain=1.5))
    found_keys, found_values = rows_of(keys), rows_of(values)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert_stored(found_keys[slot], exact[token] / key_unit, stored)
            assert_stored(found_values[slot], float64(v[token]) / value_unit, stored)
    rest = [slot for slot in range(12) if slot not in slots.tolist()]
    assert (found_keys[rest] == 9).all()
    assert (found_values[rest] == 9).all()


def assert_stored(came: np.ndarray, right: np.ndarray, dtype: torch.dtype) -> None:
    """``came`` is ``right`` rounded to ``dtype``, up to float32 arithmetic before the rounding."""
    slack = 2.0**-20 * (np.abs(right).max() + 1)
    if dtype == F8:
        assert np.isin(came, EIGHT_BITS).all()
        right = np.clip(right, -448, 448)
        nearest = np.abs(right[..., None] - EIGHT_BITS).min(-1)
        assert (np.abs(came - right) <= nearest + slack).all()
        return
    half_unit = torch.finfo(dtype).eps / 2
    assert (np.abs(came - right) <= half_unit * np.abs(right) + slack).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_bits_round_to_nearest_and_stop_at_the_largest(backend: str) -> None:
    """Numbers on, between and beyond those of the format; a tie goes to the even one."""
    edges = [1.0625, 1.1875, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 448.0, 464.0, 465.0, 1e30]
    special = [math.inf, -math.inf, math.nan, 0.0, -0.0, -1.0625]
    wanted = [1.0, 1.25, 16.0, 20.0, 0.0, 2.0**-8, 448.0, 448.0, 448.0, 448.0]
    wanted += [448.0, -448.0, math.nan, 0.0, -0.0, -1.0]
    v = torch.tensor(edges + special, device=DEVICE).reshape(1, 1, 16)
    q, k = here(1, 1, 8), here(1, 1, 8)
    keys = torch.zeros(1, 1, 1, 8, device=DEVICE)
    values = torch.zeros(1, 1, 1, 16, dtype=torch.uint8, device=DEVICE).view(F8)
    slots = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rotate_and_cache_(q, k, v, 0, HALF, slots, keys, values, backend=backend)
    came = values.cpu().float().flatten().tolist()
    assert [str(x) for x in came] == [str(x) for x in wanted]
    scaled = (v * 0.125).clone()
    rotate_and_cache_(q, k, scaled, 0, HALF, slots, keys, values, value_unit=0.125, backend=backend)
    assert [str(x) for x in values.cpu().float().flatten().tolist()] == [str(x) for x in wanted]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", marks=once),
        pytest.param("triton", marks=[runs_kernels, pytest.mark.every_kernel]),
    ],
)
def test_every_16_bit_number_becomes_the_8_bits_that_torch_makes_of_it(backend: str) -> None:
    """With an instruction for it on a GPU that has one, and in integers on the others."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        v = bits.view(dtype).reshape(1, 64, 1024).to(DEVICE)
        q, k = here(1, 64, 8, dtype=dtype), here(1, 64, 8, dtype=dtype)
        keys = torch.zeros(1, 1, 64, 8, dtype=dtype, device=DEVICE)
        values = torch.zeros(1, 1, 64, 1024, dtype=torch.uint8, device=DEVICE).view(F8)
        slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        # the interpreter is NumPy, which warns of some of these NaN
        with np.errstate(invalid="ignore"):
            rotate_and_cache_(q, k, v, 0, HALF, slots, keys, values, backend=backend)
        wanted = v.float().clamp(-448, 448).to(F8)
        same = values[0].view(torch.uint8) == wanted.view(torch.uint8)
        assert bool((same | (values[0].float().isnan() & v.isnan())).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("tile")
def test_a_batch_of_sequences_fills_its_pages(backend: str) -> None:
    """Forty query heads, slots of any order, memory that lies heads first and in three strides."""
    rope = Rope(head_dim=16, pairing="half")
    q = here(2, 3, 4, 40, 16).permute(2, 1, 0, 3, 4).contiguous().permute(2, 1, 0, 3, 4)
    k = here(2, 3, 2, 4, 16, seed=1).transpose(2, 3)
    v = here(2, 3, 2, 4, 16, seed=2).transpose(2, 3)
    places = (torch.arange(24, device=DEVICE) * 11).reshape(2, 3, 4)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).reshape(2, 3, 4)
    slots = order.to(DEVICE)
    caches = [torch.zeros(6, 4, 2, 16, device=DEVICE) for _ in range(2)]
    before = q.cpu().clone()
    rotate_and_cache_(q, k, v, places, rope, slots, *caches, backend=backend)
    assert_rotated(q.cpu(), before, places.cpu(), rope)
    keys, values = (x.cpu().reshape(24, 2, 16)[order] for x in caches)
    assert_rotated(keys, k.cpu(), places.cpu(), rope)
    assert torch.equal(values, v.cpu())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lead", [(3, 0, 2), (2, 0, 3), (0, 4, 5)])
def test_no_tokens_in_any_number_of_dimensions_write_nothing(
    lead: tuple[int, ...], backend: str
) -> None:
    """They are no error either."""
    q, k, v = here(*lead, 2, 8), here(*lead, 1, 8), here(*lead, 1, 8)
    caches = [torch.zeros(3, 2, 1, 8, device=DEVICE) for _ in range(2)]
    slots = torch.zeros(lead, dtype=torch.int64, device=DEVICE)
    rotate_and_cache_(q, k, v, torch.arange(lead[-1]), HALF, slots, *caches, backend=backend)
    assert not any(cache.any() for cache in caches)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slot_beyond_the_cache_writes_nothing_there(backend: str) -> None:
    """Plain torch on the CPU says so; a kernel, which nobody waits for, leaves memory alone."""
    whole = torch.zeros(3, 2, 1, 8, device=DEVICE)
    keys, values = whole[:2], torch.zeros(2, 2, 1, 8, device=DEVICE)
    q, k, v = here(1, 1, 8), here(1, 1, 8), here(1, 1, 8)
    slots = torch.tensor([4], device=DEVICE)
    call = (q, k, v, 0, HALF, slots, keys, values)
    if backend == "eager" and DEVICE.type == "cpu":
        with pytest.raises(PositionError, match=r"slots must be below 4, .* \[2, 2\], got 4"):
            rotate_and_cache_(*call, backend=backend)
    else:
        rotate_and_cache_(*call, backend=backend)
    assert int(whole.count_nonzero()) == int(values.count_nonzero()) == 0


@once
def test_a_cache_write_records_no_gradient() -> None:
    """And does not pretend to."""
    q = normal(1, 1, 8).requires_grad_()
    k, v, cache = normal(1, 1, 8), normal(1, 1, 8), torch.zeros(1, 1, 1, 8)
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="records no gradient; detach its tensors"):
        rotate_and_cache_(q, k, v, 0, HALF, slots, cache, cache.clone())
    with torch.no_grad():
        rotate_and_cache_(q, k, v, 0, HALF, slots, cache, cache.clone())
    assert torch.allclose(cache.flatten(), k.flatten())


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_written_counts_as_written(backend: str) -> None:
    """Autograd sees that a cache changed under it."""
    q, k, v = here(1, 1, 8), here(1, 1, 8), here(1, 1, 8)
    caches = [torch.zeros(1, 1, 1, 8, device=DEVICE) for _ in range(2)]
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    before = [x._version for x in (q, *caches)]
    rotate_and_cache_(q, k, v, 0, HALF, slots, *caches, backend=backend)
    assert all(x._version > was for x, was in zip((q, *caches), before, strict=True))


FEW = torch.zeros(2, 3, 1, 8)
WRITE: dict[str, tuple[type[PhasorError], str, dict[str, Any]]] = {
    "value": (TensorError, r"v must share tokens and heads with k \[4, 1\], got \[4, 2\]",
              {"v": torch.ones(4, 2, 8)}),
    "value's dtype": (TensorError, "v must be a tensor of floats, got torch.int64",
                      {"v": torch.ones(4, 1, 8, dtype=torch.int64)}),
    "slots": (TensorError, r"slots must be one for each token \[4\], got \[3\]",
              {"slots": torch.arange(3)}),
    "slots as floats": (TensorError, "slots must be a tensor of int64 or int32, got torch.float32",
                        {"slots": torch.zeros(4)}),
    "slots elsewhere": (TensorError, r"slots must be on the device of q and k \(cpu\), got meta",
                        {"slots": torch.arange(4, device="meta")}),
    "heads": (TensorError, r"key_cache must be \[blocks, block, 1, 8\], got shape \[2, 3, 2, 8\]",
              {"key_cache": torch.zeros(2, 3, 2, 8)}),
    "rank": (TensorError, r"value_cache must be \[blocks, block, 1, 8\], got shape \[6, 1, 8\]",
             {"value_cache": torch.zeros(6, 1, 8)}),
    "cache's dtype": (TensorError, "key_cache must be a tensor of floats or float8_e4m3fn, got "
                      "torch.int8", {"key_cache": FEW.to(torch.int8)}),
    "shared": (TensorError, "value_cache must not share memory with itself",
               {"value_cache": torch.zeros(1, 3, 1, 8).expand(2, 3, 1, 8)}),
    "shared query": (TensorError, "q must not share memory with itself",
                     {"q": torch.zeros(4, 1, 8).expand(4, 2, 8)}),
    "other blocks": (TensorError, r"value_cache must have the \[blocks, block\] of key_cache "
                     r"\[2, 3\], .* got \[3, 2\]", {"value_cache": torch.zeros(3, 2, 1, 8)}),
    "gain": (SpecError, "gain must be a finite number, got 'two'", {"gain": "two"}),
    "unit": (SpecError, "key_unit must be a finite number > 0, got 0", {"key_unit": 0}),
    "unit of floats": (SpecError, r"value_unit must be 1 for a cache of torch\.float32, which "
                       r"stores numbers as they are, got 0\.5", {"value_unit": 0.5}),
    "backend": (BackendError, "got 'nonesuch'", {"backend": "nonesuch"}),
}  # fmt: skip


@once
@pytest.mark.parametrize(("kind", "text", "changed"), WRITE.values(), ids=WRITE)
def test_a_cache_write_refuses_what_it_cannot_use(
    kind: type[PhasorError], text: str, changed: dict[str, Any]
) -> None:
    """Before anything is written."""
    keys, values = FEW.clone(), FEW.clone()
    arguments: dict[str, Any] = {
        "q": normal(4, 2, 8), "k": normal(4, 1, 8), "v": normal(4, 1, 8), "positions": 0,
        "rope": HALF, "slots": torch.arange(4), "key_cache": keys, "value_cache": values,
    }  # fmt: skip
    with pytest.raises(kind, match=text):
        rotate_and_cache_(**(arguments | changed))
    assert int(keys.count_nonzero()) == int(values.count_nonzero()) == 0


def write(**changed: Tensor) -> tuple[Tensor, ...]:
    """A query, a key, a value and two caches, apart from what is given."""
    made = {"q": here(4, 2, 8), "k": here(4, 1, 8), "v": here(4, 1, 8)}
    made |= {name: torch.zeros(2, 3, 1, 8, device=DEVICE) for name in ("keys", "values")}
    return tuple((made | changed).values())


def shared_with_query() -> dict[str, Tensor]:
    """A query whose last head is the key."""
    fused = here(4, 4, 8)
    return {"q": fused[:, :3], "k": fused[:, 2:3]}


def shared_by_address() -> dict[str, Tensor]:
    """Two tensors that torch takes for two pieces of memory, and NumPy for one."""
    memory = np.zeros(64, np.float32)
    keys, values = (torch.from_numpy(memory[i : i + 48]).view(2, 3, 1, 8) for i in (0, 16))
    return {"keys": keys, "values": values}


def shared_between_caches() -> dict[str, Tensor]:
    """Values that begin in the middle of the keys."""
    both = torch.zeros(2, 3, 1, 12, device=DEVICE)
    return {"keys": both[..., :8], "values": both[..., 4:]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shared", "text"),
    [
        (shared_with_query, "q is written and must not share memory with k; pass a clone of k"),
        (shared_between_caches, "key_cache is written and must not share memory with value_cache"),
    ],
    ids=["query and key", "caches"],
)
def test_memory_that_is_written_is_nobody_elses(
    shared: Callable[[], dict[str, Tensor]], text: str, backend: str
) -> None:
    """What is read must not change meanwhile, and no element holds two numbers."""
    q, k, v, *caches = write(**shared())
    before = q.clone()
    slots = torch.arange(4, device=DEVICE)
    with pytest.raises(TensorError, match=text):
        rotate_and_cache_(q, k, v, 0, HALF, slots, *caches, backend=backend)
    assert torch.equal(q, before)
    assert not any(int(cache.count_nonzero()) for cache in caches)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slices_of_one_projection_and_of_one_cache_are_apart(backend: str) -> None:
    """Query, key and value of one matrix, keys and values of one tensor of pages."""
    fused, pages = here(4, 4, 8), torch.zeros(2, 2, 3, 1, 8, device=DEVICE)
    plain = fused.clone()
    q, k, v = fused.split([2, 1, 1], dim=1)
    caches = pages.unbind(1)
    rotate_and_cache_(
        *(q, k, v, torch.arange(4, device=DEVICE), HALF),
        *(torch.arange(4, device=DEVICE), *caches),
        backend=backend,
    )
    assert_rotated(q.cpu(), plain[:, :2].cpu(), range(4), HALF)
    assert_rotated(caches[0].reshape(6, 1, 8)[:4].cpu(), plain[:, 2:3].cpu(), range(4), HALF)
    assert torch.equal(caches[1].reshape(6, 1, 8)[:4], plain[:, 3:])


@runs_kernels
def test_triton_says_that_it_wants_one_dtype() -> None:
    """Of query, key and value; the definition takes any."""
    q, k, v = here(1, 1, 8, dtype=torch.bfloat16), here(1, 1, 8), here(1, 1, 8)
    keys, values = (torch.zeros(1, 1, 1, 8, device=DEVICE) for _ in range(2))
    call = (q, k, v, 0, HALF, torch.zeros(1, dtype=torch.int64, device=DEVICE), keys, values)
    with pytest.raises(BackendError, match="q, k and v must be of one dtype"):
        rotate_and_cache_(*call, backend="triton")
    rotate_and_cache_(*call)
    assert torch.equal(keys.flatten(), k.flatten())


@once
def test_caches_that_numpy_shares_are_refused() -> None:
    """Two storages at two addresses, one memory."""
    q, k, v, *caches = write(**shared_by_address())
    with pytest.raises(TensorError, match="key_cache is written and must not share memory"):
        rotate_and_cache_(q, k, v, 0, HALF, torch.arange(4), *caches, backend="eager")


@once
def test_caches_of_inference_mode_are_written_only_there() -> None:
    """And nothing else is written before that is said."""
    with torch.inference_mode():
        caches = [torch.zeros(2, 3, 1, 8) for _ in range(2)]
    q, k, v = normal(4, 2, 8), normal(4, 1, 8), normal(4, 1, 8)
    before = q.clone()
    with pytest.raises(TensorError, match="must not be an inference tensor outside"):
        rotate_and_cache_(q, k, v, 0, HALF, torch.arange(4), *caches)
    assert torch.equal(q, before)
    with torch.inference_mode():
        rotate_and_cache_(q, k, v, 0, HALF, torch.arange(4), *caches)
    assert int(caches[0].count_nonzero()) == k.numel()
