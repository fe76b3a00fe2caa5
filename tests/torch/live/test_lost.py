"""Models whose frequencies are lost or rounded, or that are patched where none can be made."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.tiny_models import tiny_model
from torch import Tensor

from phasor.torch.live import ExactCosSin, check, patch, unpatch

from ...rounding import rounding
from .live_models import difference, fresh, generated, prefill

NAMES = ["llama", "gptj", "llama4_text"]


def says_what_a_fresh_one_says(model: Any, name: str) -> bool:
    """To a rounding."""
    before, room = _said(name)
    return difference(before, prefill(model)) <= room


@functools.cache
def _said(name: str) -> tuple[Tensor, float]:
    return _told(prefill(fresh(name))), rounding(fresh(name), prefill)


def empty_weights(include_buffers: bool) -> AbstractContextManager[Any]:
    """Accelerate's replacement of what modules do with parameters and buffers."""
    from accelerate import init_empty_weights

    return init_empty_weights(include_buffers=include_buffers)


def fake() -> AbstractContextManager[Any]:
    """A mode in which tensors have no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


class Default:
    """A default device or dtype while it lasts."""

    def __init__(self, setter: Callable[[Any], None], value: Any, usual: Any) -> None:
        self.setter, self.value, self.usual = setter, value, usual

    def __enter__(self) -> None:
        self.setter(self.value)

    def __exit__(self, *_: object) -> None:
        self.setter(self.usual)


AROUND: dict[str, Callable[[], Any]] = {
    "meta device": lambda: torch.device("meta"),
    "empty weights": lambda: empty_weights(False),
    "empty weights and buffers": lambda: empty_weights(True),
    "default device": lambda: Default(torch.set_default_device, "meta", None),
    "default bfloat16": lambda: Default(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default float64": lambda: Default(torch.set_default_dtype, torch.float64, torch.float32),
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fake tensors": fake,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_patched_whatever_is_on_around_it(name: str, around: str) -> None:
    """And says the same once that is over."""
    model = fresh(name)
    with AROUND[around]():
        patch(model)
    assert torch.get_default_dtype() == torch.float32
    assert says_what_a_fresh_one_says(model, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_made_without_memory_and_loaded_by_assignment(name: str) -> None:
    """Frequencies are in no file, so they stay on the meta device; nobody needs them."""
    like = fresh(name)  # with memory
    with empty_weights(True):
        model = type(like)(like.config)
    model.load_state_dict(like.state_dict(), assign=True)
    model.set_attn_implementation("eager")
    assert all(one.lost and math.isnan(one.error) for one in check(model).modules)
    patch(model.eval())
    assert says_what_a_fresh_one_says(model, name)


LEFT: dict[str, Callable[[Tensor], object]] = {
    "zeros": Tensor.zero_,
    "NaN": lambda buffer: buffer.fill_(math.nan),
    "infinities": lambda buffer: buffer.fill_(math.inf),
    "denormals": lambda buffer: buffer.copy_(torch.linspace(9e-39, 1e-42, len(buffer.flatten()))
                                             .view_as(buffer)),
    "a number": lambda buffer: buffer.fill_(0.5),
    "weights": lambda buffer: buffer.copy_(
        torch.randn(buffer.shape, generator=torch.Generator().manual_seed(0)).abs()
    ),
    "bytes": lambda buffer: buffer.view(torch.uint8).random_(
        generator=torch.Generator().manual_seed(0)
    ),
    "one denormal": lambda buffer: buffer.flatten()[-1:].fill_(1e-42),
}  # fmt: skip


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("name", ["llama", "gptj", "gemma3_text"])
def test_frequencies_that_nobody_wrote_are_repaired(name: str, left: str) -> None:
    """Whatever memory holds that nobody wrote; after unpatching they are still there."""
    model = fresh(name)
    model.config.max_position_embeddings = 2048  # `check` looks at so many positions
    for buffer in model.buffers():
        if buffer.is_floating_point() and buffer.dim():
            LEFT[left](buffer)
    lost = [bool(one.lost) for one in check(model).modules]
    # a table with a single number that is off is no memory that nobody wrote
    if (name, left) == ("gptj", "one denormal"):
        return
    assert all(lost)
    patch(model)
    assert not any(one.lost for one in check(model).modules)
    assert says_what_a_fresh_one_says(model, name)
    unpatch(model)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2", "phi3"])
def test_what_to_empty_leaves_is_repaired(name: str) -> None:
    """Among other tensors' memory, which it takes."""
    like = fresh(name)
    used = [torch.randn(size) for size in range(1, 2000, 7)]
    with torch.device("meta"):
        model = type(like)(like.config)
    del used
    model.to_empty(device="cpu")
    model.load_state_dict(like.state_dict())
    model.set_attn_implementation("eager")
    patch(model.eval())
    assert says_what_a_fresh_one_says(model, name)


@pytest.mark.filterwarnings("ignore:.*offloaded")
@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_accelerate_spread_is_patched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a disk: its hooks go on loading weights, and unpatching leaves them in place."""
    called: list[int] = []
    usual = ExactCosSin.__call__

    def counted(self: Any, *given: Any) -> Any:
        called.append(len(given))
        return usual(self, *given)

    monkeypatch.setattr(ExactCosSin, "__call__", counted)
    from accelerate import dispatch_model

    model = fresh(name)
    inner = "transformer" if name == "gptj" else "model"
    layers = "h" if name == "gptj" else "layers"
    where = {f"{inner}.{child}": "cpu" for child, _ in getattr(model, inner).named_children()}
    del where[f"{inner}.{layers}"]
    count = len(getattr(model, inner).get_submodule(layers))
    where |= {f"{inner}.{layers}.{i}": "disk" if i else "cpu" for i in range(count)}
    dispatch_model(
        model, where | {"lm_head": "disk"}, main_device="cpu", offload_dir=str(tmp_path),
        force_hooks=True, offload_buffers=True,
    )  # fmt: skip
    assert any("_hf_hook" in module.__dict__ for module in model.modules())
    patch(model)
    assert says_what_a_fresh_one_says(model, name)
    assert len(called) == (0 if name == "gptj" else 1)
    assert torch.equal(_told(generated(fresh(name))), _told(generated(model)))
    unpatch(model)
    assert torch.equal(_told(prefill(fresh(name))), _told(prefill(model)))


def _told(answer: Tensor | None) -> Tensor:
    assert answer is not None
    return answer


def expected_line(model: Any, dtype: torch.dtype, context: int) -> tuple[float, int]:
    """How far a Llama's cosines are off, and where that passes half a unit of 1, by the formula."""
    held = model.model.rotary_emb.inv_freq.to(torch.float32)
    p = torch.arange(context)
    rows = (p.float()[:, None] * held).to(torch.float32)
    exact = p.double()[:, None] * 10_000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    pairs = ((rows.cos(), exact.cos()), (rows.sin(), exact.sin()))
    off = torch.stack([(a.to(dtype).double() - b).abs().amax(-1) for a, b in pairs]).amax(0)
    return float(off.max()), int((off > torch.finfo(dtype).eps / 2).nonzero()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_check_says_how_far_and_from_where(dtype: torch.dtype) -> None:
    """Against cosines of the same frequencies, and the exact ones in float64; nothing changes."""
    model = fresh("llama").to(dtype)
    held = [buffer.clone() for buffer in model.buffers()]
    (found,) = check(model).modules
    error, beyond = expected_line(model, dtype, 2048)
    assert (found.path, found.kind, found.dtype) == ("model.rotary_emb", None, dtype)
    assert found.context == 2048
    # cosines by one library and another are a unit of float32 apart at most
    assert found.error == pytest.approx(error, abs=2**-23)
    assert found.beyond is not None
    assert abs(found.beyond - beyond) <= (4 if dtype == torch.float32 else 0)
    assert str(check(model)) == str(found)
    assert all(map(torch.equal, held, model.buffers()))


def test_check_of_a_patched_model_measures_what_it_returns() -> None:
    """Rounded to its dtype, and no further off."""
    model = fresh("llama").to(torch.bfloat16)
    far = check(model).modules[0].error
    patch(model)
    (found,) = check(model).modules
    assert far > 1
    assert (found.dtype, found.beyond) == (torch.bfloat16, None)
    assert found.error <= found.rounding == 2**-8
    exact = fresh("llama")
    patch(exact)
    assert check(exact).modules[0].error < 3 * 2**-24


def test_check_reads_what_a_rule_would_do_and_leaves_it_alone() -> None:
    """Dynamic NTK writes the frequencies of a call into the module; its copy was asked."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    model = tiny_model("llama", {"rope_parameters": rope, "max_position_embeddings": 256})
    before = model.model.rotary_emb.inv_freq.clone()
    assert check(model).modules[0].error < 1e-4
    assert torch.equal(before, model.model.rotary_emb.inv_freq)


def test_check_of_several_kinds_is_a_line_for_each() -> None:
    """With the kind of layer."""
    model = tiny_model("gemma3_text", {"max_position_embeddings": 2048})
    lines = str(check(model)).splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        f"model.rotary_emb (Gemma3RotaryEmbedding), {kind}"
        for kind in ("full_attention", "sliding_attention")
    ]
    model.model.rotary_emb.sliding_attention_inv_freq.zero_()
    full, sliding = str(check(model)).splitlines()
    assert re.search(r"of exact over \d+ positions, beyond the rounding of float32", full)
    assert sliding.endswith("its sliding_attention_inv_freq is lost; patch repairs it")
