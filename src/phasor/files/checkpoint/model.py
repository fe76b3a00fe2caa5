"""The facts about a model that a conversion needs: roles of tensors, ropes and heads."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from phasor.files import refusal
from phasor.files.configs.facts import table
from phasor.files.configs.model_class import language_models
from phasor.files.configs.source import read_source
from phasor.files.reading import load
from phasor.layers import LayerRopes, one_layer
from phasor.pairings import Pairing
from phasor.rope import Rope

Role = Literal["query", "key", "latent key", "shared", "blocks", "groups", "fused", "vectors"]

_MODULE_PATTERNS: dict[Role, str] = {
    "query": "q_proj|wq|query|q_b_proj|wq_b",
    "key": "k_proj|wk|key",
    "latent key": "kv_a_proj_with_mqa|wkv_a_with_mqa|wkv_a",
    "fused": "qkv_proj|query_key_value|[Ww]qkv|qkv|c_attn",
    "vectors": r"(?:q|k|query|key)_(?:norm|layernorm)(?:\.norms\.\d+)?",
}
_ALL_MODULES = "|".join(_MODULE_PATTERNS.values())
# outside attention, or if keys are also values: the projections and the norms of keys
_SHARED_PATTERNS: dict[Role, str] = {
    "shared": "kv_proj|wkv|gate_proj|wgate|index_qk_proj",
    "vectors": "kv_norm|norm|position_bias|ape|o_a_proj|wo_a",
}
_SHARED_MODULES = "|".join(_SHARED_PATTERNS.values())
# only these words may precede the layers, because vision and audio towers have their own ropes
_PREFIXES = (
    "model|base_model|language_model|text_model|transformer|backbone_model|encoder|decoder|mtp|"
    "bert|new|esm|roformer|gpt_neox|gpt_neox_japanese"
)
_PROJECTION_NAME = re.compile(
    rf"(?P<place>(?:(?:{_PREFIXES})\.)*(?:layers|layer|h|blocks|mtp)\.(?P<layer>[0-9]{{1,9}})\."
    r"(?:self_attn|self_attention|attention|attn)(?:\.(?:self|attention|\d+))?)"
    r"(?:\.(?P<auxiliary>(?:compressor\.)?indexer(?:\.compressor)?|compressor|index(?=_)))?"
    rf"(?:\.|(?<=\.index)_)(?P<module>{_ALL_MODULES}|{_SHARED_MODULES})(?:\.(?P<suffix>.+))?"
)
_GGUF_MODULES: dict[str, Role] = {
    "attn_q": "query",
    "attn_q_b": "query",
    "attn_k": "key",
    "attn_kv_a_mqa": "latent key",
    "attn_qkv": "fused",
    "attn_q_norm": "vectors",
    "attn_k_norm": "vectors",
}
_GGUF_NAME = re.compile(
    rf"(?P<place>blk\.(?P<layer>[0-9]{{1,9}}))\.(?P<module>{'|'.join(_GGUF_MODULES)})\."
    r"(?P<suffix>.+)"
)
_AUXILIARY_NAME = re.compile(r".*\.(?:indexer\.|compressor\.|index_).*")
# tensors of a rotation outside attention that have no coordinates of heads
_WITHOUT_HEADS = re.compile(r".*\.(?:weights_proj|q_input_norm|softmax_scaling|ssmax_scaling)\..+")
_SIMILAR_NAME = re.compile(rf"(?:.*\.)?(?:{_ALL_MODULES})\..+")
_LAYER_NAME = re.compile(r"(?:.*\.)?(?:layers|layer|h|blocks)\.(?P<layer>[0-9]{1,9})\..*")
# each query head is followed by rows of a gate
_GATED_ARCHITECTURES = ("qwen3next", "qwen35", "qwen35moe")
# the value projection that belongs to a key projection
VALUE_OF = {"k_proj": "v_proj", "wk": "wv", "key": "value", "attn_k": "attn_v"}


@dataclass(frozen=True, slots=True)
class Projection:
    """What a tensor is, by its name: ``module`` and the ``suffix`` after it.

    Heads are on the first axis, of ``vectors`` on the last; ``module`` is empty if a pattern
    matched. An extra layer is one for multi-token prediction; these are counted from 0 again.
    ``auxiliary`` names a rotation outside attention; queries and keys of one ``place`` go together.
    """

    role: Role
    layer: int | None
    module: str = ""
    suffix: str = ""
    is_extra_layer: bool = False
    auxiliary: str = ""
    place: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Patterns:
    """Regular expressions that match whole names of tensors, instead of the known names.

    Args:
        query: Projections of queries, or their biases: heads on the first axis.
        key: Projections of keys.
        blocks: Fused projections, all queries before all keys before all values.
        groups: Fused projections, for each key head its queries, the key, the value.
        vectors: Heads on the last axis: scales of a QK-norm, cached keys.
    """

    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for role, pattern in self.list_patterns():
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise refusal("regex", role=role, pattern=pattern, error=error) from None

    def list_patterns(self) -> list[tuple[Any, str]]:
        """The patterns, each with its role."""
        roles = [field.name for field in fields(self)]
        return [(role, pattern) for role in roles for pattern in getattr(self, role)]

    def part(self, name: str) -> Projection | None:
        """What the tensor ``name`` is by these patterns; None if none matches."""
        roles = {role for role, pattern in self.list_patterns() if re.fullmatch(pattern, name)}
        if not roles:
            return None
        if len(roles) > 1:
            raise refusal("two_roles", name=name, roles=", ".join(sorted(roles)))
        # a pattern gives the role; the name may still give the layer
        layer_name = _LAYER_NAME.fullmatch(name)
        return Projection(roles.pop(), int(layer_name["layer"]) if layer_name else None)

    def unused_patterns(self, names: Collection[str]) -> list[str]:
        """Patterns that match no tensor."""
        patterns = (pattern for _, pattern in self.list_patterns())
        return [
            pattern
            for pattern in patterns
            if not any(re.fullmatch(pattern, name) for name in names)
        ]


def find_projection(name: str, *, shares_values: bool = False) -> Projection | None:
    """The projection that a tensor belongs to, by the names of model classes; None for any other.

    ``shares_values`` is for models whose keys are values as well, as in DeepSeek V4.

    >>> find_projection("model.layers.3.self_attn.q_proj.weight").role
    'query'
    >>> find_projection("vision_tower.layers.3.self_attn.q_proj.weight") is None
    True
    """
    if match := _GGUF_NAME.fullmatch(name):
        role = _GGUF_MODULES[match["module"]]
        layer, place = int(match["layer"]), match["place"]
        return Projection(role, layer, match["module"], match["suffix"], place=place)
    if (match := _PROJECTION_NAME.fullmatch(name)) is None:
        if _AUXILIARY_NAME.fullmatch(name) and not _WITHOUT_HEADS.fullmatch(name):
            raise refusal("auxiliary_rope", name=name)
        return None
    module, auxiliary = match["module"], match["auxiliary"] or ""
    auxiliary = "indexer" if "index" in auxiliary else auxiliary
    patterns = [*_MODULE_PATTERNS.items()]
    patterns += _SHARED_PATTERNS.items() if auxiliary or shares_values else ()
    # a module has one role: the patterns do not overlap
    roles: list[Role] = [role for role, words in patterns if re.fullmatch(words, module)]
    # in DeepSeek's own names, q_norm is the norm of a latent vector
    if not roles or (shares_values and not auxiliary and module == "q_norm"):
        return None
    # the layers of such a part are counted from 0 again
    is_extra = "mtp." in name[: match.start("layer")]
    place = f"{match['place']}.{auxiliary}".removesuffix(".")
    suffix = match["suffix"] or "weight"
    return Projection(roles[0], int(match["layer"]), module, suffix, is_extra, auxiliary, place)


def looks_alike(name: str) -> bool:
    """Whether any part of a tensor's name is that of a query or key projection."""
    return _SIMILAR_NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointModel:
    """The facts in a model's config that a conversion needs."""

    ropes: LayerRopes
    model_type: str | None = None
    architecture: str | None = None  # for a GGUF file
    num_heads: int | None = None
    # heads are [without position | with position], the rotated key after the latent vector
    latent: bool = False
    unrotated: int | None = None  # coordinates without position, if the config says so
    block_rows: int | None = None  # of a quantised weight share a scale
    pairing_key: str | None = None  # a key of the config; pairs are halves where it is false
    num_shared_layers: int = 0  # the last layers, which use the keys of an earlier layer
    # the entry of its type in projections.toml
    fused: Literal["blocks", "groups"] | None = None
    gated: bool = False
    varied: bool = False
    shares_values: bool = False

    @property
    def pairing(self) -> Pairing | None:
        """The pairing that the model's code reads; None if layers differ or none rotates."""
        pairings: list[Pairing] = [rope.pairing for rope in self.ropes.ropes]
        return pairings[0] if len(set(pairings)) == 1 else None

    def borrows_keys(self, part: Projection) -> bool:
        """Whether the layer of a tensor uses the keys of an earlier layer."""
        if not self.num_shared_layers or part.layer is None or part.is_extra_layer:
            return False
        return part.layer >= len(self.ropes) - self.num_shared_layers

    def rope_of(self, name: str, part: Projection) -> Rope | None:
        """The rope that turns a tensor's rows, or None; refused if that is unclear."""
        ropes, layer = self.ropes, part.layer
        if layer is not None and part.is_extra_layer:
            layer += len(ropes)
        if layer is not None and layer < len(ropes) and not (part.auxiliary and ropes[layer]):
            return ropes[layer]
        # layers of multi-token prediction follow those of the config
        auxiliary_rope = (
            None if layer is None else ropes.auxiliary_rope(part.auxiliary or "mtp", layer)
        )
        matching_ropes = {
            rotation.rope for rotation in ropes.auxiliary_ropes if rotation.name == part.auxiliary
        }
        possible = matching_ropes if part.auxiliary else {*ropes.ropes}
        if auxiliary_rope is None and len(possible) != 1:
            if part.auxiliary:
                raise refusal("auxiliary_rope", name=name)
            raise refusal("other_layer", name=name, count=len(ropes))
        return auxiliary_rope or possible.pop()


def describe(
    model: str | os.PathLike[str] | Mapping[str, Any] | Rope,
    *,
    like: str | None = None,
    strict: bool = True,
) -> CheckpointModel:
    """The model that a config describes, its dictionary, or a rope for all layers."""
    if isinstance(model, Rope):
        return CheckpointModel(ropes=one_layer(model))
    # a larger model has its quantisation at the top and its heads inside
    levels = [block.values for block in language_models(read_source(model))]
    top, config = levels[0], levels[-1]
    if (architecture := top.get("general.architecture")) is not None:
        return _describe_gguf(top, architecture, load(top, strict=strict))
    # learned frequencies are in the files next to a config
    ropes = load(top if model == "-" else model, like=like, strict=strict)
    model_types = (level.get("model_type") for level in reversed(levels))
    model_type = like or next(filter(None, model_types), None)
    if config.get("rotary_value"):
        raise refusal("rotary_value")
    projections = tomllib.loads(Path(__file__).with_name("projections.toml").read_text("utf-8"))
    if (reason := projections["refused"].get(model_type)) is not None:
        raise refusal("type_refused", model_type=model_type, reason=reason)
    architecture = table().huggingface.get(model_type) if model_type is not None else None
    # an unknown type is latent if it has the width of the rotated slice
    is_unknown = architecture is None
    return CheckpointModel(
        ropes=ropes,
        model_type=model_type,
        architecture=None,
        num_heads=ropes.num_heads,
        latent=config.get("qk_rope_head_dim") is not None if is_unknown else architecture.latent,
        unrotated=_positive_int(config.get("qk_nope_head_dim")),
        block_rows=_block_rows(top) or _block_rows(config),
        pairing_key=None if is_unknown else architecture.pairing_key,
        num_shared_layers=_positive_int(config.get("num_kv_shared_layers")) or 0,
        fused=projections["fused"].get(model_type),
        **{word: model_type in types for word, types in projections["types"].items()},
    )


def _describe_gguf(top: Mapping[str, Any], architecture: str, ropes: LayerRopes) -> CheckpointModel:
    """The model of a GGUF file, by its metadata and how llama.cpp reads its architecture."""
    head_counts: Any = top.get(f"{architecture}.attention.head_count")
    return CheckpointModel(
        ropes=ropes,
        architecture=architecture,
        num_heads=ropes.num_heads,
        latent=bool(top.get(f"{architecture}.attention.kv_lora_rank")),
        num_shared_layers=_positive_int(top.get(f"{architecture}.attention.shared_kv_layers")) or 0,
        # its converter writes all queries, all keys, all values, whatever the order of the source
        fused="blocks",
        gated=architecture in _GATED_ARCHITECTURES,
        varied=isinstance(head_counts, list) and len(set(cast(list[int], head_counts))) > 1,
    )


def _block_rows(config: Mapping[str, Any]) -> int | None:
    """Rows of a block of a weight quantised in blocks."""
    quantization = config.get("quantization_config")
    size = (
        cast(Any, quantization).get("weight_block_size") if isinstance(quantization, Mapping) else 0
    )
    return _positive_int(cast(Any, size)[0]) if isinstance(size, list) and size else None


def _positive_int(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
