"""What a small model of any architecture does in each way people run one, as tensors to compare."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...sampling import SHARES

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

Answer = Tensor | None
# longer than the tiny models' sliding windows
CHUNK = 20


@functools.cache
def _tiny(name: str) -> Any:
    from tools.tiny_models import tiny_model

    return tiny_model(name)


def fresh(name: str) -> Any:
    """A tiny model of that type, which is made once and copied."""
    return copy.deepcopy(_tiny(name))


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Token ids that every tiny vocabulary has, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 30, (batch, length), generator=generator)


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has a parameter of that name."""
    return name in inspect.signature(model.forward).parameters


def cache_name(model: Any) -> str:
    """What a forward calls its cache of keys: another name from transformers 5.24 on."""
    return "cache" if takes(model, "cache") else "past_key_values"


@torch.no_grad()
def prefill(model: Any) -> Answer:
    """All tokens at once."""
    return model(tokens(2, 24))[0]


@torch.no_grad()
def decode(model: Any) -> Answer:
    """A prompt, and then token after token with the keys that the model's cache holds."""
    ids = tokens(2, CHUNK + 4)
    name = cache_name(model)
    if not takes(model, name):
        return None
    first = model(ids[:, :CHUNK], use_cache=True)
    cache = getattr(first, name, None)
    if cache is None:
        return None
    outs = [first[0]]
    for i in range(CHUNK, ids.shape[1]):
        step = model(ids[:, i : i + 1], **{name: cache}, use_cache=True)
        cache = getattr(step, name)
        outs.append(step[0])
    return torch.cat(outs, 1)


@torch.no_grad()
def left_padded(model: Any) -> Answer:
    """Two prompts of different lengths, the shorter one padded on its left."""
    if not takes(model, "attention_mask"):
        return None
    ids, mask = tokens(2, 16), torch.ones(2, 16, dtype=torch.long)
    ids[1, :5], mask[1, :5] = 0, 0
    more = {}
    if takes(model, "position_ids"):
        more["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, **more)[0]
    return torch.cat((out[0], out[1, 5:]))


@torch.no_grad()
def packed(model: Any) -> Answer:
    """Three documents in one row, each counted from 0."""
    if not takes(model, "position_ids"):
        return None
    places = torch.cat([torch.arange(n) for n in (8, 11, 5)])[None]
    return model(tokens(1, 24), position_ids=places)[0]


def checkpointed(model: Any) -> Answer:
    """The gradients of a training step that forgets its activations and computes them again."""
    if not model.supports_gradient_checkpointing:
        return None
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    was_training = model.training
    model.train()
    try:
        torch.manual_seed(0)
        more = {"use_cache": False} if takes(model, "use_cache") else {}
        out = model(tokens(2, 16), **more)[0]
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out * weights).sum().backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat(grads)
    finally:
        model.zero_grad(set_to_none=True)
        disable = getattr(model, "activation_checkpointing_disable", None)
        (disable or model.gradient_checkpointing_disable)()
        model.train(was_training)


def generated(model: Any, count: int = 64) -> Answer:
    """So many tokens, the likeliest each time."""
    if not model.can_generate():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of generation settings that this does not use
        return model.generate(
            tokens(2, 8),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )


WAYS: dict[str, Callable[[Any], Answer]] = {
    "prefill": prefill,
    "decode": decode,
    "left padding": left_padded,
    "packing": packed,
    "checkpointing": checkpointed,
    "generation": generated,
}


def whole_models(share: int) -> Iterator[tuple[str, Any]]:
    """Every model of several parts that its config's defaults make, on the meta device.

    Of an eighth of all models, for they take long.
    """
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    tables = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    )
    configs = sorted(configuration_auto.CONFIG_MAPPING_NAMES.items())
    for name, config_name in configs[share::SHARES]:
        named = next((table[name] for table in tables if name in table), None)
        if not isinstance(named, str):
            continue
        # defaults that do not go together, and libraries that are not installed
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(transformers, config_name)
            if config.sub_configs:
                with torch.device("meta"):
                    model = getattr(transformers, named)(config())
                if any("Rotary" in type(module).__name__ for module in model.modules()):
                    yield name, model


def answers(model: Any, ways: Mapping[str, Callable[[Any], Answer]]) -> dict[str, Answer]:
    """What the model says in every way that it can be run; some architectures refuse some."""
    said: dict[str, Answer] = {}
    for name, way in ways.items():
        with contextlib.suppress(RuntimeError, ValueError, TypeError, LookupError):
            said[name] = way(model)
    return said


def difference(before: Answer, after: Answer) -> float:
    """The largest difference, in units of the largest number where that is above 1."""
    if before is None or after is None:
        return 0.0 if before is after else float("inf")
    size = max(1.0, float(before.abs().max()))
    return float((before.double() - after.double()).abs().max()) / size
