"""Extending a trained rope to a longer context: what each law does, and the config for it."""

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
_SCAN = 1 << 16  # distances computed at a time, until one is negative
# limits on pairs and on pairs times distances, so that a comparison takes seconds
_PAIRS, _COSINES = 1 << 11, 1 << 31
_FIXED = (
    "the class of this model takes no law and no base from its config; rotate with the rope itself "
    "(Rope.to_json keeps it)"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Extension:
    """One law for the longer context, and its effects.

    Attributes:
        name: The law as `phasor.scaling.LAWS` names it; ``"unchanged"`` for none.
        rope: The Rope for the longer context.
        coverage: Which of its phases did not occur in training.
        sign_change: The first distance where ``C(r) = sum_k cos(r * inv_freq[k])`` is negative:
            from there on a similar key may score below a random one (Men et al. 2405.14591,
            Theorem 1). None if there is none below ``coverage.to``.
        resolution: New over old frequency of the fastest pair, which tells neighbouring tokens
            apart; 1 if all frequencies are 0.
    """

    name: str
    rope: Rope
    coverage: Coverage
    sign_change: int | None
    resolution: float

    @property
    def pairs_affected(self) -> int:
        """Number of pairs with a phase that did not occur in training."""
        return int(self.coverage.affected.sum())

    @property
    def slowest_turns(self) -> float:
        """Turns that the slowest pair makes over the longer context."""
        return float(self.coverage.extended_turns.min())

    @property
    def attention_factor(self) -> float:
        """The law's factor on cos and sin; see `Rope.attention_factor`."""
        return self.rope.attention_factor


@dataclass(frozen=True, kw_only=True, eq=False)
class Recommendation:
    """Which extension to take, and why, in one sentence."""

    extension: Extension
    reason: str


def extensions(
    rope: Rope, context: int, to: int, *, factors: Sequence[float] | None = None
) -> tuple[Extension, ...]:
    """The laws that can extend ``rope`` from ``context`` to ``to`` tokens, and their effects.

    With ``s = to / context``: no change, linear interpolation by ``s``, NTK-aware by ``s``, dynamic
    NTK with the usual parameters (factor ``s``, at ``to`` tokens), YaRN and Llama 3 with their
    published ramps, and LongRoPE if its searched ``factors`` are given. NTK laws are left out if
    an axis has a single pair. Laws are not combined: a Rope that has one gets the same law with
    ``s`` times its factor; explicit frequencies, and those of a law without a factor, are divided
    by ``s``.

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
    return tuple(_extension(name, rope, context, new, to) for name, new in ropes.items())


def recommend(ways: Sequence[Extension]) -> Recommendation:
    """The extension to take without training, and the reason.

    No change if that shows no new phase. Otherwise the law with the fewest pairs out of
    distribution; of equals, the one with the highest resolution; then the one that changes the
    frequencies least (in octaves, over all pairs). The sign change does not count, as every law
    that slows pairs down moves it outwards; it is part of the reason. Measure the perplexity of
    the result; fine-tuning improves it.

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
    """The numbers that made `recommend` choose ``best``, as a sentence."""
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
    """By name of the law, ``rope`` extended by it."""
    s = to / context
    trained_law = rope.law()
    if rope.explicit_inv_freq is None and trained_law is None:
        laws: dict[str, Law] = {"linear": Linear(factor=s)}
        if min(rope.axes.spectra(rope.num_pairs)) > 1:
            laws["ntk"] = NTK(factor=s)
            laws["dynamic_ntk"] = DynamicNTK(factor=s, original_max_positions=context).at(to)
        laws["yarn"] = Yarn(factor=s, original_max_positions=context)
        laws["llama3"] = Llama3(factor=s, original_max_positions=context)
        return {name: replace(rope, scaling=law) for name, law in laws.items()}
    larger: dict[str, Any] = {}
    if isinstance(trained_law, PerPair):
        larger = {"factors": tuple(s * factor for factor in trained_law.factors)}
    elif hasattr(trained_law, "factor"):
        larger = {"factor": s * cast(Any, trained_law).factor}
    if trained_law is not None and larger:
        name = next(name for name, law in LAWS.items() if law is type(trained_law))
        return {name: replace(rope, scaling=replace(trained_law, **larger))}
    divided = tuple(float(f / s) for f in rope.inv_freq)
    return {"linear": replace(rope, base=None, scaling=None, explicit_inv_freq=divided)}


def _extension(name: str, trained: Rope, context: int, rope: Rope, to: int) -> Extension:
    before, after = trained.inv_freq, rope.inv_freq
    fastest = before.argmax()
    all_zero = before[fastest] == 0
    return Extension(
        name=name,
        rope=rope,
        coverage=coverage(trained, context, rope, to),
        sign_change=_sign_change(rope, to),
        resolution=1.0 if all_zero else float(after[fastest] / before[fastest]),
    )


def _sign_change(rope: Rope, to: int) -> int | None:
    """The first distance below ``to`` where the sum of cosines is negative."""
    for start in range(0, to, _SCAN):
        negative = kernel(rope, min(_SCAN, to - start), start=start).real < 0
        if negative.any():
            return start + int(negative.argmax())
    return None


def _octaves(before: Rope, after: Rope) -> NDArray[np.float64]:
    """By how many octaves each frequency changed; 0 for one that is 0 before or after."""
    f, g = before.inv_freq, after.inv_freq
    turning = (f > 0) & (g > 0)
    return np.log2(np.where(turning, g, 1.0) / np.where(turning, f, 1.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """A law for the longer context.

    Attributes:
        extension: What the law does.
        rope: The Rope in the form that configs use: NTK-aware scaling as a raised base, dynamic
            NTK as its rule. Over the longer context it rotates as ``extension.rope``.
        config: The keys to set in a Hugging Face config; None if the format cannot express it.
        refused: The reason, if ``config`` is None.
    """

    extension: Extension
    rope: Rope
    config: Mapping[str, Any] | None
    refused: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtensionPlan:
    """The laws for the layers that share one rope, and the recommended one.

    Attributes:
        model: Name of the model.
        kinds: The kinds of layers to extend.
        labels: Names of their blocks in ``rope_parameters``; empty if one block is for all.
        inside: Path in the config file where the keys go, joined by dots; empty for the top.
        context: Tokens of the training.
        to: Tokens of the wanted context.
        ways: The unchanged Rope first, by name.
        recommended: A key of ``ways``.
        reason: Why it is recommended.
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
        """Keys to remove from a config, because a way's ``config`` replaces them."""
        return REPLACED + REPLACED_OF_KINDS if self.labels else REPLACED

    def way(self, law: str | None) -> Way:
        """The way with this law; with None the recommended one.

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
    """The laws that extend a model's layers to ``to`` tokens, and the recommended one.

    Args:
        ropes: The model.
        kind: The kind of layers to extend, or several kinds with equal ropes; kinds that share
            their config block are included. None if all ropes of the model are equal.
        context: Tokens of the training; None for the model's own ``context``.
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
    rotating = [name for name, kind_rope in ropes.kinds.items() if kind_rope is not None]
    if kind is None:
        names = _only_rope(ropes, rotating)
    else:
        names = [kind] if isinstance(kind, str) else list(kind)
    rope = ropes.kinds.get(names[0])
    if rope is None or any(ropes.kinds.get(name) != rope for name in names):
        raise SpecError(
            f"kind must be one of {', '.join(rotating) or '(none rotates)'}, got {kind!r}"
        )
    if rope.num_pairs > _PAIRS:
        raise SpecError(
            f"laws are compared for at most {_PAIRS} pairs, got {rope.num_pairs}; is the width of "
            "a head that of the model?"
        )
    whole("to", to, least=2, most=_COSINES // rope.num_pairs)
    names = _with_shared_blocks(ropes, names, rope)
    labels = map(ropes.in_config.label, names) if ropes.has_blocks_by_kind else ()
    candidates = extensions(resolved(rope, length), length, to)
    best = recommend(candidates)
    return ExtensionPlan(
        model=ropes.name,
        kinds=tuple(names),
        labels=tuple(dict.fromkeys(labels)),
        inside=ropes.in_config.inside,
        context=length,
        to=to,
        ways={way.name: _way(way, rope, ropes, names) for way in candidates},
        recommended=best.extension.name,
        reason=best.reason,
    )


def _only_rope(ropes: LayerRopes, rotating: list[str]) -> list[str]:
    """All kinds that rotate, if they have one rope."""
    if len(ropes.ropes) == 1:
        return rotating
    if not rotating:
        raise SpecError(f"no layer of {ropes.name} has a rotary embedding to extend")
    raise SpecError(
        f"kind must be given, since the layers of {ropes.name} differ: one of {', '.join(rotating)}"
    )


def _with_shared_blocks(ropes: LayerRopes, names: list[str], rope: Rope) -> list[str]:
    """The kinds ``names``, and the kinds with the same rope that read the same config block."""
    same_rope = [kind for kind, kind_rope in ropes.kinds.items() if kind_rope == rope]
    if not ropes.has_blocks_by_kind:
        return same_rope
    label = ropes.in_config.label
    labels = {label(name) for name in names}
    return [kind for kind in same_rope if label(kind) in labels]


def _way(extension: Extension, original: Rope, ropes: LayerRopes, names: list[str]) -> Way:
    rope = _config_form(extension, original)
    if ropes.in_config.fixed:
        return Way(extension=extension, rope=rope, config=None, refused=_FIXED)
    try:
        changed = replace(ropes, kinds=dict(ropes.kinds) | dict.fromkeys(names, rope))
        keys = config_keys(
            changed.config_blocks(), extension.coverage.context, extension.coverage.to
        )
    except ConfigError as error:
        return Way(extension=extension, rope=rope, config=None, refused=str(error))
    return Way(extension=extension, rope=rope, config=keys, refused=None)


def _config_form(extension: Extension, original: Rope) -> Rope:
    """The extension's Rope in the form that configs use; see `Way.rope`."""
    context, to = extension.coverage.context, extension.coverage.to
    rope = original if extension.name == "unchanged" else extension.rope
    if extension.name == "dynamic_ntk":
        rule = DynamicNTK(factor=to / context, original_max_positions=context)
        return replace(rope, scaling=rule)
    if isinstance(rope.scaling, NTK) and not isinstance(rope.axes, Axial):
        return with_raised_base(rope, rope.scaling.factor)
    return rope


def with_raised_base(rope: Rope, factor: float) -> Rope:
    """NTK-aware scaling as a larger base: ``base * factor ** (n / (n - 1))`` for ``n`` pairs."""
    assert rope.base is not None, "a law scales the powers of a base"
    power = Decimal(rope.num_pairs) / (rope.num_pairs - 1)
    return replace(rope, base=float(Decimal(rope.base) * Decimal(factor) ** power), scaling=None)
