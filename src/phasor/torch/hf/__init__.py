"""The rotation of a transformers model, read off it and replaced by phasor's, in that model alone.

    patch(model)       every layer rotates by positions, with phasor's operator
    unpatch(model)     the classes that were there before, on the same modules
    from_model(model)  the rope of every layer of a live model, verified
    check(model)       how far its live cosines are from exact

A model of pictures and text has a part for each, named by the key of its config in the config file,
as in ``patch(model, part="text_config")``.

The modules stay who they are. Those that turn positions into cosines, and those that rotate by
them, become instances of a subclass of their own class: the first answers with the positions
themselves, the second meets those with phasor's operator. Parameters, buffers, hooks, names and
the class of the model are not touched, so that what is saved, wrapped or trained is as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from phasor._checks import whole
from phasor.errors import ConfigError
from phasor.layers import LayerRopes
from phasor.rope import Rope
from phasor.torch.hf.checking import Checked, CheckedModule, check
from phasor.torch.hf.methods import ORIGINAL, named_modules, original_class
from phasor.torch.hf.modules import (
    CARRIED_ROPES,
    Member,
    carrying_class,
    holds_table,
    layer_number,
    rotating_class,
    set_class,
)
from phasor.torch.hf.reading import (
    PartRotation,
    check_buffers,
    language_part,
    read_parts,
)

__all__ = [
    "Checked",
    "CheckedModule",
    "Patched",
    "Replaced",
    "check",
    "from_model",
    "patch",
    "unpatch",
]


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """One module that rotates with phasor now.

    Attributes:
        path: Its name in the model.
        class_name: Its class.
        layer: The layer it belongs to, where it has a number.
        functions: The functions of transformers that its methods no longer call.
        rope: What it turns by, or None where its layer has no position embedding, or where it is
            not known which of the model's ropes its layer has.
        doubt: Why that is not known; "" where it is.
    """

    path: str
    class_name: str
    layer: int | None
    functions: tuple[str, ...]
    rope: Rope | None
    doubt: str = ""


@dataclass(frozen=True, kw_only=True)
class Patched:
    """What `patch` replaced; as text, a table.

    Attributes:
        model: The name of the model's class.
        embeddings: Paths of the modules that hand out positions in the place of cosines.
        layers: The modules that rotate, part by part, in the model's order.
    """

    model: str
    embeddings: tuple[str, ...]
    layers: tuple[Replaced, ...]

    def __str__(self) -> str:
        rows = [("layer", "module", "was", "turns by")]
        for one in self.layers:
            number = "" if one.layer is None else str(one.layer)
            unknown = "its positions' rope" if one.doubt else "nothing"
            turns = unknown if one.rope is None else _in_words(one.rope)
            rows.append((number, f"{one.path} ({one.class_name})", ", ".join(one.functions), turns))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        head = f"{self.model}: phasor rotates in {len(self.layers)} modules; positions come from "
        few = ", ".join(self.embeddings[:3]) + (" and others" if self.embeddings[3:] else "")
        return "\n".join([head + few, *lines])


def patch(model: nn.Module, *, part: str | None = None, seq_len: int | None = None) -> Patched:
    """Let ``model`` rotate with phasor from now on; prints and returns what was replaced.

    Only this model changes. Rows of cos and sin are correct to float32 at every position, the
    arithmetic is float32 with one rounding at the end, and positions travel in the place of
    ``[batch, seq, head_dim]`` of cosines and sines. The law of a rule (dynamic NTK, LongRoPE) is
    picked by the positions of each call alone, whatever was called before.

    Args:
        model: A model of transformers, or a part of one.
        part: Replace only this part of a model that has several, by the key of its config in the
            model's: ``"text_config"``, ``"vision_config"``, ``"thinker_config.text_config"``. All
            of them if None.
        seq_len: Pick the law of a rule once and for all, for sequences of this many tokens. Keys
            that a cache holds then match all later queries; without it they are as transformers
            leaves them, under the law of the call that made them.

    Returns:
        What was replaced, layer by layer.

    Raises:
        ConfigError: If something in the model, or in the part of it that was asked for, rotates in
            a way that is not understood, or is patched already. It is named, with the call that
            works for the other parts, and nothing has been changed.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> model = LlamaModel(small)
    >>> patched = patch(model)  # doctest: +ELLIPSIS
    LlamaModel: phasor rotates in 1 modules; positions come from rotary_emb
    layer  module ...
    0      layers.0.self_attn (LlamaAttention)  ...  half pairs, 32 of 32, base 10000
    >>> unpatch(model)
    """
    if seq_len is not None:
        whole("seq_len", seq_len, least=1)
    read = read_parts(model, part, "patch")
    patched = [
        one.path
        for part_read in read
        for one in part_read.members
        if original_class(one.module) is not None
    ]
    if patched:
        raise ConfigError(
            f"model must not be patched yet, and {patched[0]} is; call unpatch(model) first"
        )
    ropes: list[tuple[nn.Module, Any]] = []
    classes: list[tuple[nn.Module, type]] = []
    # every class is made before the first module changes
    for one in read:
        check_buffers(one)
        for embedding in one.embeddings:
            module, cls = embedding.member.module, embedding.member.cls
            fixed = bool(embedding.layout.fixed)
            ropes.append((module, embedding.carried_ropes(seq_len)))
            classes.append((module, carrying_class(cls, fixed, embedding.single)))
        # a module that is both, with a table of its own, gets the second of its classes
        for member, _ in one.rotating:
            cls = rotating_class(member.cls, one.batched, holds_table(member.module))
            classes.append((member.module, cls))
    for module, by_kind in ropes:
        module.__dict__[CARRIED_ROPES] = by_kind
    for module, cls in classes:
        set_class(module, cls)
    report = _report(model, read, seq_len)
    print(report)
    return report


def unpatch(model: nn.Module) -> None:
    """Give every module of ``model`` the class that it had before `patch`.

    Raises:
        ConfigError: If no module of it is patched, or something else changed a patched module's
            class since; undo that first.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> model = LlamaModel(small)
    >>> before = type(model.rotary_emb)
    >>> patched = patch(model)  # doctest: +ELLIPSIS
    LlamaModel: phasor rotates in 1 modules; ...
    >>> type(model.rotary_emb) is before
    False
    >>> unpatch(model)
    >>> type(model.rotary_emb) is before
    True
    """
    patched: list[tuple[nn.Module, type]] = []
    for path, module in named_modules(model):
        before = original_class(module)
        if before is not None:
            patched.append((module, before))
        elif hasattr(type(module), ORIGINAL):
            raise ConfigError(
                f"{path} has been given another class since it was patched; undo that first"
            )
    if not patched:
        raise ConfigError(f"model must be patched, and no module of {type(model).__name__} is")
    for module, before in patched:
        set_class(module, before)
        module.__dict__.pop(CARRIED_ROPES, None)


def from_model(model: nn.Module, *, part: str | None = None) -> LayerRopes:
    """The rope of every layer of a live model, patched or not.

    They are read from the model's config and verified: the cosines of each embedding module's
    class, and the functions that rotate by them, are called and must turn as the ropes say.

    Args:
        model: A model of transformers, or a part of one.
        part: Which part of a model that has several, as in `patch`; its language model if None.

    Raises:
        ConfigError: If something in that part rotates in a way that is not understood.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> small = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2,
    ...     num_key_value_heads=1, intermediate_size=8, vocab_size=16)
    >>> ropes = from_model(LlamaModel(small))
    >>> len(ropes), ropes[0].head_dim, ropes[0].pairing, ropes[0].base
    (2, 32, 'half', 10000.0)
    """
    (read,) = read_parts(model, language_part(model) if part is None else part, "from_model")
    check_buffers(read)
    if isinstance(read.layers, str):
        raise ConfigError(f"model must be one whose layers can be told apart: {read.layers}")
    return read.layers


def _report(model: nn.Module, read: Sequence[PartRotation], seq_len: int | None) -> Patched:
    layers = [
        _replaced(member, tuple(sorted(functions)), one.layers, seq_len)
        for one in read
        for member, functions in one.rotating
    ]
    return Patched(
        model=type(model).__name__,
        embeddings=tuple(it.member.path for one in read for it in one.embeddings),
        layers=tuple(layers),
    )


def _replaced(
    member: Member, functions: tuple[str, ...], ropes: LayerRopes | str, seq_len: int | None
) -> Replaced:
    layer = layer_number(member)
    doubt, rope = (ropes, None) if isinstance(ropes, str) else ("", None)
    if isinstance(ropes, LayerRopes) and layer is not None and layer < len(ropes):
        rope = ropes[layer]
    return Replaced(
        path=member.path,
        class_name=member.cls.__name__,
        layer=layer,
        functions=functions,
        rope=rope if rope is None or seq_len is None else rope.at(seq_len),
        doubt=doubt,
    )


def _in_words(rope: Rope) -> str:
    pairs = rope.pairing if rope.pairing_out is None else f"{rope.pairing} to {rope.pairing_out}"
    words = [f"{pairs} pairs", f"{rope.rotary_dim} of {rope.head_dim}"]
    if rope.base is not None:
        words.append(f"base {rope.base:g}")
    if rope.scaling is not None:
        words.append(type(rope.scaling).__name__)
    return ", ".join(words)
