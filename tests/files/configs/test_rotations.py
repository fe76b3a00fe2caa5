"""What the table says of a model type is what its class in transformers does to queries.

`tools/verdicts.py` is about the models that take tokens. Here are the others: parts of larger
models, towers of images, codecs. Each class's own rotary module and function turn random queries,
and complex products by the frequencies, pairs and axes of the loaded rope say what is due.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tools.tiny_models import installed_model_types
from torch import Tensor

from phasor import Rope, load
from phasor.files.configs.facts import table

from ...offline import refuse_connections
from .class_sizes import config_classes
from .transformers_frequencies import quiet

#: Types that rotate, and why no class of transformers says how.
WITHOUT_A_CLASS = {
    "xlm-roberta": "transformers' class does not rotate; the code beside jina's files does",
}
#: What a config made of nothing has to say first.
SAID: Mapping[str, dict[str, Any]] = {
    "qwen3_omni_moe_talker_text": {"head_dim": 128},
    "wav2vec2-bert": {"position_embeddings_type": "rotary"},
    "wav2vec2-conformer": {"position_embeddings_type": "rotary"},
}
#: The rotary class, where neither its annotation nor its being the only one tells which.
ROTARY = {
    "deepseek_ocr2_encoder": "deepseek_ocr2.DeepseekOcr2VisionRotaryEmbedding",
    "internlm3": "llama.LlamaRotaryEmbedding",
    "iquestcoder": "llama.LlamaRotaryEmbedding",
    "qwen2_5_omni_talker": "qwen2_5_omni.Qwen2_5OmniRotaryEmbedding",
    "qwen3_omni_moe_talker_code_predictor": "qwen3_omni_moe.Qwen3OmniMoeRotaryEmbedding",
    "qwen3_omni_moe_talker_text": "qwen3_omni_moe.Qwen3OmniMoeTalkerRotaryEmbedding",
}
#: The columns of a tower's ``position_ids``, where they are not rows and columns of the image.
COLUMNS = {
    "edgetam_video": ("width", "height"),
    "minimax_m3_vl_vision": ("time", "height", "width"),
    "muse_glimmer_vision": ("width", "height"),
    "muse_spark_vision": ("width", "height"),
    "sam2_video": ("width", "height"),
    "sam3_tracker_video": ("width", "height"),
    "sam3_vit_model": ("width", "height"),
}
#: What a file calls the function that turns the queries of patches; of tokens it is the last.
APPLY = (
    "apply_rotary_pos_emb_vision",
    "apply_rotary_pos_emb_2d",
    "apply_rotary_pos_emb_2d_self_attn",
    "apply_rotary_pos_emb",
)
TOKENS, HEADS = 23, 2


@dataclass(frozen=True, kw_only=True)
class Call:
    """A class about to turn queries as one kind of layer does."""

    name: str
    kind: str
    rope: Rope
    code: ModuleType
    rotary: Any
    config: Any

    def queries(self, tokens: int = TOKENS) -> Tensor:
        """Random ones, ``[tokens, HEADS, head_dim]``."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(tokens, HEADS, self.rope.head_dim, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Turned:
    """Queries ``[tokens, heads, head_dim]`` before and after, at ``[tokens, axes]``."""

    positions: np.ndarray
    before: Tensor
    after: Tensor


def _applied(call: Call, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By the function of the class's file, whichever way it wants tokens and heads."""
    names = APPLY if table().huggingface[call.name].positions else APPLY[-1:]
    name = next(one for one in names if hasattr(call.code, one))
    apply = getattr(call.code, name)
    if name == "apply_rotary_pos_emb_vision":
        return apply(q, q, cos, sin)[0]
    x = q.transpose(0, 1)[None]
    # a tower's cosines may have no batch
    batch = {"unsqueeze_dim": 0} if name == APPLY[-1] and cos.ndim == 2 else {}
    return apply(x, x, cos, sin, **batch)[0][0].transpose(0, 1)


def tokens(call: Call) -> Turned:
    """A sequence; a multimodal one at unequal coordinates."""
    axes = call.rope.axes.n_axes
    positions = np.random.default_rng(1).integers(0, 2000, (TOKENS, axes))
    ids = torch.from_numpy(positions.T.copy())[:, None]
    by_kind = "layer_type" in inspect.signature(call.rotary.forward).parameters
    cos, sin = call.rotary(
        torch.zeros(1), ids if axes > 1 else ids[0], *((call.kind,) if by_kind else ())
    )
    q = call.queries()
    return Turned(positions=positions, before=q, after=_applied(call, q, cos, sin))


def patches(call: Call) -> Turned:
    """Patches of an image, or of several: no two coordinates alike."""
    rng = np.random.default_rng(1)
    at = {axis: rng.integers(0, 60, TOKENS) for axis in ("time", "height", "width")}
    columns = COLUMNS.get(call.name, ("height", "width"))
    ids = torch.from_numpy(np.stack([at[axis] for axis in columns], -1))
    q = call.queries()
    turned = _applied(call, q, *call.rotary(torch.zeros(1), ids))
    positions = np.stack([at[axis] for axis in table().huggingface[call.name].positions], -1)
    return Turned(positions=positions, before=q, after=turned)


def pixels(call: Call) -> Turned:
    """An image of 5 by 7 patches, whose centres lie between -1 and 1; what is before them stays."""
    rows, columns, before = 5, 7, 5
    size = call.config.patch_size
    size = size if isinstance(size, int) else size[0]
    cos, sin = call.rotary.eval()(torch.zeros(1, 3, rows * size, columns * size))
    q = call.queries(before + rows * columns)
    turned = _applied(call, q, cos, sin)
    assert torch.equal(turned[:before], q[:before])
    centres = [2 * (np.arange(n) + 0.5) / n - 1 for n in (rows, columns)]
    grid = np.stack(np.meshgrid(*centres, indexing="ij"), -1).reshape(-1, 2)
    return Turned(positions=2 * math.pi * grid, before=q[before:], after=turned[before:])


def complex_patches(call: Call) -> Turned:
    """Llama 4's tower: all its patches, counted from 1, and the class token after them."""
    n = call.config.image_size // call.config.patch_size
    q = call.queries(n * n + 1)
    turned = call.code.vision_apply_rotary_emb(q[None], q[None], call.rotary(q))[0][0]
    assert torch.equal(turned[-1], q[-1])
    i = np.arange(n * n)
    return Turned(positions=np.stack([i % n, i // n], -1) + 1, before=q[:-1], after=turned[:-1])


def first_slice(call: Call) -> Turned:
    """CLVP's, which cuts off what turns before it calls."""
    angles = call.rotary(torch.zeros(1, TOKENS, 1))[0]
    q, width = call.queries(), angles.shape[-1]
    x, ids = q[..., :width].transpose(0, 1)[None], torch.arange(TOKENS)[None]
    turned = call.code.apply_rotary_pos_emb(x, x, x, angles.cos(), angles.sin(), ids)[0][0]
    after = torch.cat((turned.transpose(0, 1), q[..., width:]), -1)
    return Turned(positions=np.arange(TOKENS)[:, None], before=q, after=after)


def hidden_states(call: Call) -> Turned:
    """Conformers', before they are projected."""
    attention = next(one for name, one in vars(call.code).items() if name.endswith("SelfAttention"))
    sizes = SimpleNamespace(num_heads=HEADS, head_size=call.rope.head_dim)
    q = call.queries()
    turned = attention._apply_rotary_embedding(
        sizes, q.flatten(1)[None], call.rotary(torch.zeros(1, TOKENS, 1))
    )
    return Turned(positions=np.arange(TOKENS)[:, None], before=q, after=turned.view_as(q))


def regrouped(call: Call) -> Turned:
    """The queries of Qwen2.5-Omni's diffusion model, which it first sorts into halves."""
    positions = torch.arange(TOKENS)
    q = call.queries()
    cos, sin = call.rotary(torch.zeros(1), positions[None])
    turned = _applied(call, call.code.deinterleave_head_dim(q), cos, sin)
    return Turned(positions=positions[:, None].numpy(), before=q, after=turned)


#: How a class is called that is called in neither of the two usual ways.
WAYS: Mapping[str, Callable[[Call], Turned]] = {
    "clvp_encoder": first_slice,
    "dinov3_vit": pixels,
    "eomt_dinov3": pixels,
    "llama4_vision_model": complex_patches,
    "qwen2_5_omni_dit": regrouped,
    "sapiens2": pixels,
    "wav2vec2-bert": hidden_states,
    "wav2vec2-conformer": hidden_states,
}


def share(rope: Rope, seen: Turned) -> float:
    """The largest error of a pair, as a share of what float32 explains.

    The exponent of a frequency is rounded, which changes the frequency by its logarithm, and so
    are position, power, reciprocal and angle; then cosine, sine, two products and a sum.
    """
    before, after = (one.double().numpy() for one in (seen.before, seen.after))
    start, pairs = rope.rotary_start, rope.num_pairs
    outside = np.r_[:start, start + 2 * pairs : rope.head_dim]
    if not np.array_equal(before[..., outside], after[..., outside]):
        return math.inf
    frequencies, axes = rope.inv_freq, rope.axes.axis_of_pair(pairs)
    worst = 0.0
    for pair in range(pairs):
        angle = rope.direction * seen.positions[:, axes[pair], None] * frequencies[pair]
        due = _pair(before, rope, rope.pairing, pair) * np.exp(1j * angle)
        error = np.abs(_pair(after, rope, rope.output_pairing, pair) - due)
        allowed = np.abs(angle) * (abs(math.log(frequencies[pair])) + 8) + 8
        worst = max(worst, float((error / (np.abs(due) * allowed * 2.0**-24)).max()))
    return worst


def _pair(x: np.ndarray, rope: Rope, pairing: str, pair: int) -> np.ndarray:
    """The two coordinates of a pair as complex numbers."""
    apart = 1 if pairing == "interleaved" else rope.num_pairs
    first = rope.rotary_start + (2 * pair if pairing == "interleaved" else pair)
    return x[..., first] + 1j * x[..., first + apart]


@cache
def kept_here() -> tuple[str, ...]:
    """The types that have a config class and rotate, and that no other test runs."""
    types, classes = table().huggingface, config_classes()
    rotating = {
        name for name, facts in types.items() if not facts.other_positions and not facts.refused
    }
    # a larger model is read as its language model, which has a type of its own
    larger = {name for name in rotating & classes.keys() if "text_config" in table().parts[name]}
    assert {table().parts[name]["text_config"] for name in larger} <= rotating
    return tuple(sorted((rotating & classes.keys()) - larger - set(installed_model_types())))


def _code(config_class: Any) -> list[ModuleType]:
    """The files of models beside a config's."""
    package = importlib.import_module(config_class.__module__.rpartition(".")[0])
    names = [one.name for one in pkgutil.iter_modules(package.__path__)]
    return [
        importlib.import_module(f"{package.__name__}.{name}")
        for name in names
        if name.startswith("modeling_")
    ]


def _rotary_class(name: str, config_class: Any) -> Any:
    """The class whose instances turn this type's queries."""
    if name in ROTARY:
        folder, _, wanted = ROTARY[name].partition(".")
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        return getattr(module, wanted)
    config_of_class = {
        one: inspect.signature(one.__init__).parameters["config"].annotation
        for code in _code(config_class)
        for word, one in vars(code).items()
        if isinstance(one, type)
        and ("Rotary" in word or "RopePosition" in word)
        and one.__module__ == code.__name__
    }
    names = (config_class, config_class.__name__)
    wanted = [one for one, annotation in config_of_class.items() if annotation in names]
    (found,) = wanted or config_of_class
    return found


@cache
def seen(name: str) -> tuple[tuple[Rope, Turned], ...]:
    """The rope of each kind of layer that rotates, and what the class did with queries."""
    with quiet():
        config = config_classes()[name](**SAID.get(name, {}))
        ropes = load(config.to_dict() | {"model_type": name})
        rotary = _rotary_class(name, type(config))
        usual = patches if table().huggingface[name].positions else tokens
        calls = [
            Call(
                name=name,
                kind=kind,
                rope=rope,
                code=importlib.import_module(rotary.__module__),
                rotary=rotary(config),
                config=config,
            )
            for kind, rope in ropes.kinds.items()
            if rope is not None
        ]
        assert calls
        return tuple((call.rope, WAYS.get(name, usual)(call)) for call in calls)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may open a connection."""
    refuse_connections(monkeypatch)


def _shares(name: str) -> list[float] | str:
    try:
        return [share(rope, turned) for rope, turned in seen(name)]
    except Exception as error:  # all that are wrong are told, not the first
        return f"{type(error).__name__}: {error}"


def test_every_rotation_is_that_of_its_class() -> None:
    """Of all types that rotate and have a class, but those that other tests run."""
    found = {name: _shares(name) for name in kept_here() if name not in WITHOUT_A_CLASS}
    right = {name for name, said in found.items() if isinstance(said, list) and max(said) < 1}
    assert {name: said for name, said in found.items() if name not in right} == {}
    assert len(right) >= 70
    assert set(WITHOUT_A_CLASS) <= set(kept_here())


def test_what_a_file_leaves_out_is_what_its_class_takes() -> None:
    """Of each of these types, a file that says no more than its type turns every layer alike."""
    for name in kept_here():
        with quiet():
            said = SAID.get(name, {})
            whole = config_classes()[name](**said).to_dict()
            stated, left_out = (load({**one, "model_type": name}) for one in (whole, said))
        assert list(left_out) == list(stated), name


def _slips(rope: Rope, turned: Turned) -> dict[str, float]:
    """The shares of what a slip in the table would make of a rope."""
    other = "half" if rope.pairing == "interleaved" else "interleaved"
    faster = replace(rope, base=None, scaling=None, explicit_inv_freq=tuple(1.01 * rope.inv_freq))
    shares = {
        "pairing": share(replace(rope, pairing=other, pairing_out=other), turned),
        "base": share(faster, turned),
        "direction": share(replace(rope, direction=-rope.direction), turned),
    }
    if rope.axes.n_axes > 1:
        back = replace(turned, positions=turned.positions[:, ::-1])
        shares["axes"] = share(rope, back)
    return shares


def test_a_slip_in_the_table_would_be_seen() -> None:
    """Another pairing, base, direction or order of axes is far from what the class does."""
    for name in kept_here():
        if name not in WITHOUT_A_CLASS:
            for rope, turned in seen(name):
                slips = _slips(rope, turned)
                assert min(slips.values()) > 10, (name, slips)
