"""A model taken to a longer context: the laws side by side, and what a config has to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from phasor._checks import whole
from phasor.axes import Axial
from phasor.configs import REPLACED, REPLACED_OF_KINDS, config_keys
from phasor.describe import resolved
from phasor.errors import ConfigError, SpecError
from phasor.layers import LayerRopes
from phasor.papers import Extension, extensions, recommend
from phasor.rope import Rope
from phasor.scaling import NTK, DynamicNTK

# laws are compared while somebody waits: in 60 digits for each pair, and at every distance
_PAIRS, _COSINES = 1 << 11, 1 << 31
_FIXED = (
    "the class of this model takes no law and no base from its config; rotate with the rope itself "
    "(Rope.to_json keeps it)"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """A law for the longer context.

    Attributes:
        extension: What the law does.
        rope: The Rope as a config states it: NTK-aware scaling as a raised base, dynamic NTK as
            its rule. Its rotation over the longer context is ``extension.rope``'s.
        config: What to set in a Hugging Face config, where the format can say this Rope.
        refused: Why it cannot, where it cannot.
    """

    extension: Extension
    rope: Rope
    config: Mapping[str, Any] | None
    refused: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The ways of the layers that read one rope to a longer context.

    Attributes:
        model: Name of the model.
        kinds: The kinds of its layers that take them.
        labels: Names of their blocks in ``rope_parameters``; none where one block is for all.
        inside: Where in the config file the keys go, as keys joined by dots; empty for its top.
        context: Tokens of the training.
        to: Tokens of the wanted context.
        ways: The unchanged Rope first, by name.
        recommended: A key of ``ways``.
        reason: Why that one.
    """

    model: str
    kinds: tuple[str, ...]
    labels: tuple[str, ...]
    inside: str
    context: int
    to: int
    ways: Mapping[str, Way]
    recommended: str
    reason: str

    @property
    def replaced(self) -> tuple[str, ...]:
        """Keys of other files that say what a way's ``config`` says, and have to go."""
        return REPLACED + REPLACED_OF_KINDS if self.labels else REPLACED

    def way(self, law: str | None) -> Way:
        """The way of this law; the recommended one without a name.

        Raises:
            SpecError: If no such law is among the ways.
        """
        name = self.recommended if law is None else law
        if name not in self.ways:
            raise SpecError(f"law must be one of {', '.join(self.ways)}, got {law!r}")
        return self.ways[name]

    def as_plain(self, law: str | None) -> dict[str, Any]:
        """Everything as JSON values, with the config of ``law`` or of the recommended one."""
        chosen = self.way(law)
        return {
            "model": self.model,
            "kinds": list(self.kinds),
            "labels": list(self.labels),
            "inside": self.inside,
            "context": self.context,
            "to": self.to,
            "recommended": self.recommended,
            "reason": self.reason,
            "law": chosen.extension.name,
            "rope": chosen.rope.to_dict(),
            "config": chosen.config,
            "replaced": list(self.replaced),
            "refused": chosen.refused,
            "ways": [
                {
                    "law": name,
                    "pairs_affected": way.extension.pairs_affected,
                    "slowest_turns": way.extension.slowest_turns,
                    "sign_change": way.extension.sign_change,
                    "resolution": way.extension.resolution,
                    "attention_factor": way.extension.attention_factor,
                }
                for name, way in self.ways.items()
            ],
        }


def plan(ropes: LayerRopes, kind: str | Sequence[str] | None, context: int | None, to: int) -> Plan:
    """The ways of a model's layers to ``to`` tokens.

    Args:
        ropes: The model.
        kind: The kind of layers to extend, or several that rotate alike, and with them those that
            read the same block of a config; None where all layers that rotate do it alike.
        context: Tokens of the training; None for the context of the model's description.
        to: Tokens of the wanted context.

    Raises:
        SpecError: If the kind must be named or does not rotate, no context is known, ``to`` is not
            above it, or there are so many pairs or distances that it would take minutes.

    >>> from phasor import preset
    >>> plan(preset("llama-3-8b"), None, None, 131072).recommended
    'llama3'
    """
    length = ropes.context if context is None else context
    if length is None:
        raise SpecError(
            f"context must be given, since the description of {ropes.name} has none: how many "
            "tokens was it trained on?"
        )
    turning = [one for one, has in ropes.kinds.items() if has is not None]
    if kind is None:
        names = _all_alike(ropes, turning)
    else:
        names = [kind] if isinstance(kind, str) else list(kind)
    rope = ropes.kinds.get(names[0])
    if rope is None or any(ropes.kinds.get(name) != rope for name in names):
        raise SpecError(
            f"kind must be one of {', '.join(turning) or '(none rotates)'}, got {kind!r}"
        )
    if rope.num_pairs > _PAIRS:
        raise SpecError(
            f"laws are compared for at most {_PAIRS} pairs, got {rope.num_pairs}; is the width of "
            "a head that of the model?"
        )
    whole("to", to, least=2, most=_COSINES // rope.num_pairs)
    names = _together(ropes, names, rope)
    labels = map(ropes.in_config.label, names) if _nested(ropes) else ()
    found = extensions(resolved(rope, length), length, to)
    best = recommend(found)
    return Plan(
        model=ropes.name,
        kinds=tuple(names),
        labels=tuple(dict.fromkeys(labels)),
        inside=ropes.in_config.inside,
        context=length,
        to=to,
        ways={one.name: _way(one, rope, ropes, names) for one in found},
        recommended=best.extension.name,
        reason=best.reason,
    )


def _all_alike(ropes: LayerRopes, turning: list[str]) -> list[str]:
    """The kinds that rotate, where they do it alike."""
    if len(ropes.ropes) == 1:
        return turning
    if not turning:
        raise SpecError(f"no layer of {ropes.name} has a rotary embedding to extend")
    raise SpecError(
        f"kind must be given, since the layers of {ropes.name} differ: one of {', '.join(turning)}"
    )


def _together(ropes: LayerRopes, names: list[str], rope: Rope) -> list[str]:
    """The kinds ``names``, and those that say the same in the same block."""
    alike = [kind for kind, own in ropes.kinds.items() if own == rope]
    if not _nested(ropes):
        return alike
    label = ropes.in_config.label
    read = {label(name) for name in names}
    return [kind for kind in alike if label(kind) in read]


def _nested(ropes: LayerRopes) -> bool:
    """Whether a config has a block for each kind of layer."""
    return bool(ropes.in_config.labels) or len(ropes.ropes) > 1


def _way(extension: Extension, original: Rope, ropes: LayerRopes, names: list[str]) -> Way:
    rope = _stated(extension, original)
    if ropes.in_config.fixed:
        return Way(extension=extension, rope=rope, config=None, refused=_FIXED)
    try:
        said = _by_label(ropes, names, rope) if _nested(ropes) else rope
        keys = config_keys(said, extension.coverage.context, extension.coverage.to)
    except ConfigError as error:
        return Way(extension=extension, rope=rope, config=None, refused=str(error))
    return Way(extension=extension, rope=rope, config=keys, refused=None)


def _by_label(ropes: LayerRopes, names: list[str], rope: Rope) -> dict[str, Rope | None]:
    """The rope of every block of a config in which those of the kinds ``names`` say ``rope``."""
    label = ropes.in_config.label
    found: dict[str, Rope | None] = dict(ropes.in_config.unread)
    for kind, own in ropes.kinds.items():
        if found.setdefault(label(kind), own) != own:
            sharing = [one for one in ropes.kinds if label(one) == label(kind)]
            raise ConfigError(
                f"layers of the kinds {' and '.join(sharing)} read one block of a config, which "
                "cannot say one of them alone; keep the rope as JSON instead (Rope.to_json)"
            )
    return found | {label(name): rope for name in names}


def _stated(extension: Extension, original: Rope) -> Rope:
    """The extension's Rope as configs state it."""
    context, to = extension.coverage.context, extension.coverage.to
    rope = original if extension.name == "unchanged" else extension.rope
    if extension.name == "dynamic_ntk":
        rule = DynamicNTK(factor=to / context, original_max_positions=context)
        return replace(rope, scaling=rule)
    if isinstance(rope.scaling, NTK) and not isinstance(rope.axes, Axial):
        return _with_raised_base(rope, rope.scaling.factor)
    return rope


def _with_raised_base(rope: Rope, factor: float) -> Rope:
    """NTK-aware scaling as a base: ``base * factor ** (n / (n - 1))`` for ``n`` pairs."""
    assert rope.base is not None, "a law scales the powers of a base"
    power = Decimal(rope.num_pairs) / (rope.num_pairs - 1)
    return replace(rope, base=float(Decimal(rope.base) * Decimal(factor) ** power), scaling=None)
