"""A trained rope taken to a longer context: what each law does, and what a config has to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from phasor._checks import whole
from phasor.axes import Axial
from phasor.configs import REPLACED, REPLACED_OF_KINDS, config_keys
from phasor.describe import resolved
from phasor.errors import ConfigError, SpecError
from phasor.layers import LayerRopes
from phasor.papers.distances import kernel
from phasor.papers.phases import Coverage, coverage
from phasor.rope import Rope
from phasor.scaling import (
    LAWS,
    NTK,
    DynamicNTK,
    Law,
    Linear,
    Llama3,
    LongRope,
    PerPair,
    Yarn,
)

UNCHANGED = "unchanged"
_SCAN = 1 << 16  # distances looked at between two looks for a sign
# laws are compared while somebody waits: in 60 digits for each pair, and at every distance
_PAIRS, _COSINES = 1 << 11, 1 << 31
_FIXED = (
    "the class of this model takes no law and no base from its config; rotate with the rope itself "
    "(Rope.to_json keeps it)"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Extension:
    """One way to a longer context, and what it does.

    Attributes:
        name: The law as `phasor.scaling.LAWS` names it; ``"unchanged"`` for none.
        rope: The Rope for the longer context.
        coverage: Which of its phases are new, against the Rope of the training.
        sign_change: The first distance where ``C(r) = sum_k cos(r * inv_freq[k])`` is negative,
            from where on a similar key may score below a random one (Men et al. 2405.14591,
            Theorem 1); None where that is not below ``coverage.to``.
        resolution: How much of the angle between neighbours the fastest pair keeps, 1 for all; 1
            where no pair turns and there is nothing to keep.
    """

    name: str
    rope: Rope
    coverage: Coverage
    sign_change: int | None
    resolution: float

    @property
    def pairs_affected(self) -> int:
        """How many pairs show a phase that training never did."""
        return int(self.coverage.affected.sum())

    @property
    def slowest_turns(self) -> float:
        """Turns that the slowest pair makes over the longer context."""
        return float(self.coverage.extended_turns.min())

    @property
    def attention_factor(self) -> float:
        """What the law multiplies cos and sin by; see `Rope.attention_factor`."""
        return self.rope.attention_factor


@dataclass(frozen=True, kw_only=True, eq=False)
class Recommendation:
    """Which extension to take, and why, in one sentence."""

    extension: Extension
    reason: str


def extensions(
    rope: Rope, context: int, to: int, *, factors: Sequence[float] | None = None
) -> tuple[Extension, ...]:
    """Each law that could take ``rope`` from ``context`` to ``to`` tokens, and what it does.

    With ``s = to / context``: no change, linear interpolation by ``s``, NTK-aware by ``s``, dynamic
    NTK as configurations state it (factor ``s``, at ``to`` tokens), YaRN and Llama 3 with their
    published ramps, and LongRoPE where its searched ``factors`` are given. NTK laws are left out
    where an axis has a single pair. No law composes with another: a Rope that has one is stretched
    by the same law with ``s`` times its factor, and explicit frequencies, or those of a law without
    a factor, are divided by ``s``.

    Args:
        rope: The Rope of the training, its scaling a law or None.
        context: Tokens of the training.
        to: Tokens of the wanted context, more than ``context``.
        factors: LongRoPE's divisor for every pair; only for a Rope without a law.

    Returns:
        The unchanged Rope first, then each law.

    Raises:
        SpecError: If a length is not a whole number or ``to`` is not above ``context``; if
            ``factors`` do not fit; or if ``rope.scaling`` is a rule: `Rope.at` picks its law.

    >>> llama2 = Rope(head_dim=128, pairing="half", base=10_000.0)
    >>> for way in extensions(llama2, 4096, 32768):
    ...     print(way.name, way.pairs_affected, way.sign_change, round(way.resolution, 3))
    unchanged 18 1707 1.0
    linear 0 13649 0.125
    ntk 17 5732 1.0
    dynamic_ntk 0 21472 1.0
    yarn 0 8886 1.0
    llama3 0 11089 1.0
    """
    whole("context", context, least=2)
    whole("to", to, least=context + 1)
    if factors is not None and (rope.scaling is not None or rope.explicit_inv_freq is not None):
        raise SpecError(
            "factors divide plain frequencies, and this rope has a law or explicit frequencies; "
            "give the Rope from before, with its context"
        )
    ropes = {UNCHANGED: rope, **_stretched(rope, context, to)}
    if factors is not None:
        divisors = tuple(factors)
        rule = LongRope(
            short_factors=(1.0,) * len(divisors),
            long_factors=divisors,
            original_max_positions=context,
            factor=to / context,
        )
        ropes["longrope"] = replace(rope, scaling=rule.at(to))
    return tuple(_extension(name, rope, context, one, to) for name, one in ropes.items())


def recommend(ways: Sequence[Extension]) -> Recommendation:
    """The extension to take without training, and the reason.

    No change where it shows nothing new. Else, in this order: the fewest pairs out of distribution,
    the most resolution kept, the least change to the frequencies (in octaves, over all pairs). The
    change of sign does not choose, since slowing pairs down tends to move it outwards whatever the
    law; the reason tells it. What wins on paper still wants its perplexity measured, and gains from
    fine-tuning.

    Args:
        ways: What `extensions` returned, the unchanged Rope first.

    Raises:
        SpecError: If ``ways`` does not begin with the unchanged Rope.

    >>> llama3 = Rope(head_dim=128, pairing="half", base=500_000.0)
    >>> found = recommend(extensions(llama3, 8192, 131072))
    >>> print(found.extension.name)
    llama3
    >>> print(found.reason)
    no pair shows a new phase (29 do unchanged), the fastest pair keeps its whole angle between \
neighbours, 35 pairs slow down; C(r) stays positive up to 131072
    """
    if not ways or ways[0].name != UNCHANGED:
        raise SpecError("ways must be what extensions returned, the unchanged rope first")
    unchanged = ways[0]
    if unchanged.pairs_affected == 0:
        reached = f"every phase up to {unchanged.coverage.to} was met in training"
        return Recommendation(extension=unchanged, reason=f"{reached}; nothing needs to change")

    def order(way: Extension) -> tuple[float, float, float]:
        moved = float(np.abs(_octaves(unchanged.rope, way.rope)).sum())
        return way.pairs_affected, -way.resolution, moved

    best = min(ways, key=order)
    return Recommendation(extension=best, reason=_reason(unchanged, best))


def _reason(unchanged: Extension, best: Extension) -> str:
    """What `recommend` saw in ``best``."""
    count, kept = best.pairs_affected, best.resolution
    slower = np.count_nonzero(_octaves(unchanged.rope, best.rope) < -1e-12)
    angle = "its whole angle" if kept == 1 else f"{kept:.3g} of its angle"
    sign = f"stays positive up to {best.coverage.to}"
    if best.sign_change is not None:
        sign = f"is first negative at {best.sign_change}"
    return (
        f"{count or 'no'} {'pairs show' if count > 1 else 'pair shows'} a new phase "
        f"({unchanged.pairs_affected} do unchanged), the fastest pair keeps {angle} between "
        f"neighbours, {slower} pairs slow down; C(r) {sign}"
    )


def _stretched(rope: Rope, context: int, to: int) -> dict[str, Rope]:
    """The ropes that laws make of one that was trained as it stands."""
    s = to / context
    given = rope.law()
    if rope.explicit_inv_freq is None and given is None:
        laws: dict[str, Law] = {"linear": Linear(factor=s)}
        if min(rope.axes.spectra(rope.num_pairs)) > 1:
            laws["ntk"] = NTK(factor=s)
            laws["dynamic_ntk"] = DynamicNTK(factor=s, original_max_positions=context).at(to)
        laws["yarn"] = Yarn(factor=s, original_max_positions=context)
        laws["llama3"] = Llama3(factor=s, original_max_positions=context)
        return {name: replace(rope, scaling=law) for name, law in laws.items()}
    larger: dict[str, Any] = {}
    if isinstance(given, PerPair):
        larger = {"factors": tuple(s * factor for factor in given.factors)}
    elif hasattr(given, "factor"):
        larger = {"factor": s * cast(Any, given).factor}
    if given is not None and larger:
        name = next(name for name, law in LAWS.items() if law is type(given))
        return {name: replace(rope, scaling=replace(given, **larger))}
    divided = tuple(float(f / s) for f in rope.inv_freq)
    return {"linear": replace(rope, base=None, scaling=None, explicit_inv_freq=divided)}


def _extension(name: str, trained: Rope, context: int, rope: Rope, to: int) -> Extension:
    before, after = trained.inv_freq, rope.inv_freq
    fastest = before.argmax()
    standing = before[fastest] == 0
    return Extension(
        name=name,
        rope=rope,
        coverage=coverage(trained, context, rope, to),
        sign_change=_sign_change(rope, to),
        resolution=1.0 if standing else float(after[fastest] / before[fastest]),
    )


def _sign_change(rope: Rope, to: int) -> int | None:
    """The first distance below ``to`` where the sum of cosines is negative."""
    for start in range(0, to, _SCAN):
        negative = kernel(rope, min(_SCAN, to - start), start=start).real < 0
        if negative.any():
            return start + int(negative.argmax())
    return None


def _octaves(before: Rope, after: Rope) -> NDArray[np.float64]:
    """How far each frequency moved, in octaves; 0 for one that stands still before or after."""
    f, g = before.inv_freq, after.inv_freq
    turning = (f > 0) & (g > 0)
    return np.log2(np.where(turning, g, 1.0) / np.where(turning, f, 1.0))


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
class ExtensionPlan:
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


def plan(
    ropes: LayerRopes, kind: str | Sequence[str] | None, context: int | None, to: int
) -> ExtensionPlan:
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
    return ExtensionPlan(
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
