"""Models whose frequencies are lost or rounded, or that are patched where none can be made."""

from __future__ import annotations

import copy
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

from phasor.errors import ConfigError
from phasor.torch.hf import CheckedModule, check, patch, rotations, unpatch
from phasor.torch.hf.rotations import measure_signature, rotate_deferred

from ...rounding import rounding, says_the_same
from .live_models import difference, fresh, generated, prefill, tokens
from .pictured_models import pictured

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
    """And says the same once that is over; what was measured before is forgotten for the test."""
    model = fresh(name)
    measure_signature.cache_clear()
    with AROUND[around]():
        patch(model)
    assert torch.get_default_dtype() == torch.float32
    assert says_what_a_fresh_one_says(model, name)


def test_a_tower_is_patched_on_the_meta_device() -> None:
    """Its table of complex rows too."""
    model, prompt = pictured("llama4")
    with says_the_same(model, lambda one: one(**prompt).logits), torch.device("meta"):
        patch(model)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_made_without_memory_and_loaded_by_assignment(name: str) -> None:
    """Frequencies are in no file, so they stay on the meta device; nobody needs them."""
    with empty_weights(True):
        model = type(fresh(name))(fresh(name).config)
    model.load_state_dict(fresh(name).state_dict(), assign=True)
    model.set_attn_implementation("eager")
    assert all(one.lost and math.isnan(one.error) for one in check(model).modules)
    patch(model.eval())
    assert says_what_a_fresh_one_says(model, name)


@pytest.mark.parametrize("left", [0.0, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_frequencies_that_nobody_wrote_are_no_obstacle(name: str, left: float) -> None:
    """As to_empty leaves them; what is a number is taken for a change of somebody's."""
    model = fresh(name)
    for buffer in model.buffers():
        buffer.fill_(left)
    assert all(one.lost for one in check(model).modules)
    patch(model)
    assert not any(one.lost for one in check(model).modules)
    assert says_what_a_fresh_one_says(model, name)


def test_the_way_out_of_frequencies_that_are_not_the_configs() -> None:
    """Garbage looks like a change; the error says how to say that it is none."""
    model = fresh("llama")
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(ConfigError, match=r'move model\.rotary_emb to "meta"'):
        patch(model)
    model.model.rotary_emb.to("meta")
    patch(model)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("name", ["qwen2_vl", "mistral3", "llama4"])
def test_rounded_frequencies_are_mended(name: str) -> None:
    """As a cast of the whole model leaves them, with nothing else rounded."""
    exact, prompt = pictured(name)
    ours = copy.deepcopy(exact)
    for path, module in ours.named_modules():
        if "rotary" in path or "patch_positional" in path:
            module.to(torch.bfloat16)
    patch(ours)
    with torch.no_grad():
        before = exact(**prompt).logits
        bound = rounding(exact, lambda one: one(**prompt).logits)
        assert difference(before, ours(**prompt).logits) <= bound
        unpatch(ours)
        assert difference(before, ours(**prompt).logits) > 1e-3


@pytest.mark.filterwarnings("ignore:.*offloaded")
@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_accelerate_spread_is_patched(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a disk: its hooks go on loading weights, and unpatching leaves them in place."""
    rotated: list[int] = []

    def counted(*given: Any) -> Any:
        rotated.append(len(given))
        return rotate_deferred(*given)

    monkeypatch.setattr(rotations, "rotate_deferred", counted)
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
    report = patch(model)
    rotated.clear()  # of the copies that `patch` ran
    assert says_what_a_fresh_one_says(model, name)
    each = {"gptj": 2}.get(name, 1)  # a call for queries, and one for keys
    assert len(rotated) == each * sum(one.rope is not None for one in report.layers)
    assert torch.equal(_told(generated(fresh(name))), _told(generated(model)))
    unpatch(model)
    assert torch.equal(_told(prefill(fresh(name))), _told(prefill(model)))


def _told(answer: Tensor | None) -> Tensor:
    assert answer is not None
    return answer


def test_a_patched_class_makes_new_modules_of_the_class_it_was() -> None:
    """Nobody told a new one which Rope it turns by: it answers with cosines, as ever."""
    model = fresh("llama")
    patch(model)
    places = torch.arange(5)[None]
    for path in ("model.rotary_emb", "model.layers.1.self_attn"):
        kind, usual = type(model.get_submodule(path)), type(fresh("llama").get_submodule(path))
        new = kind(model.config, 1) if "attn" in path else kind(model.config)
        assert type(new) is usual
        if "rotary" in path:
            old = fresh("llama").get_submodule(path)(torch.zeros(1), places)
            assert all(
                torch.equal(a, b) for a, b in zip(new(torch.zeros(1), places), old, strict=True)
            )


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


def test_check_of_a_patched_model_measures_the_operator() -> None:
    """Whatever its dtype: within three roundings of float32."""
    model = fresh("llama").to(torch.bfloat16)
    far = check(model).modules[0].error
    patch(model)
    (found,) = check(model).modules
    assert far > 1
    assert found.error < 3 * 2**-24
    assert found.dtype == torch.float32


def test_check_reads_what_a_rule_would_do_and_leaves_it_alone() -> None:
    """Dynamic NTK writes the frequencies of a call into the module; its copy was asked."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    model = tiny_model("llama", {"rope_parameters": rope, "max_position_embeddings": 256})
    before = model.model.rotary_emb.inv_freq.clone()
    assert check(model).modules[0].error < 1e-4
    assert torch.equal(before, model.model.rotary_emb.inv_freq)
    with torch.no_grad():
        model(tokens(1, 300))
    assert not torch.equal(before, model.model.rotary_emb.inv_freq)
    patch(model)


def test_check_of_several_kinds_and_parts_is_a_line_for_each() -> None:
    """With the kind of layer, and where the numbers were lost."""
    lines = str(check(tiny_model("gemma3_text"))).splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        f"model.rotary_emb (Gemma3RotaryEmbedding), {kind}"
        for kind in ("full_attention", "sliding_attention")
    ]
    model = pictured("llama4")[0]
    model.vision_model.rotary_embedding.to("meta")
    tower, text = check(model).modules
    assert tower.lost == "freqs_ci"
    assert "its freqs_ci is lost" in str(tower)
    assert re.search(r"of exact over \d+ positions, beyond the rounding of float32", str(text))
    assert isinstance(text, CheckedModule)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_a_wrapper_that_rotates_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adaption prompt computes queries again beside the attention that it wraps."""
    import peft

    # peft refuses the torchao that torchtune wants; nothing here is quantized
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)
    how = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2)
    model = peft.get_peft_model(fresh("llama"), how)
    with pytest.raises(
        ConfigError, match=r"self_attn \(AdaptedAttention.* more with cosines than rotate"
    ):
        patch(model)
