"""Extending a trained rope to a longer context: what each law does, and the config for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any, cast

from phasor._checks import choice, whole
from phasor.axes import Axial
from phasor.configs import REPLACED, REPLACED_OF_KINDS, config_keys
from phasor.describe import resolved
from phasor.errors import ConfigError, SpecError
from phasor.layers import LayerRopes
from phasor.papers.distances import kernel
from phasor.papers.phases import Coverage, coverage
from phasor.presets import DocumentedExtension, documented_extension
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
    Rule,
    Yarn,
)

UNCHANGED = "unchanged"
DOCUMENTED = "documented"
#: By law, what was measured of it on trained models, with the place where that is published.
EVIDENCE: Mapping[str, str] = {
    UNCHANGED: "Llama 2 13B has a loss of 1.50 at 4096 tokens and 8.86 at 8192 (Su, ReRoPE).",
    "linear": "Llama 2 fine-tuned with it has perplexity 3.34 at 8192 tokens (YaRN 2309.00071, "
    "Table 1). Without fine-tuning, a small model got worse than unchanged (Su, kexue.fm/9706).",
    "ntk": "Without fine-tuning, the loss of Llama 2 13B is 1.54 at 8192 tokens, and 1.61 in place "
    "of 1.50 at 4096 (Su, ReRoPE). Fine-tuned, its perplexity of 3.59 at 8192 is behind linear and "
    "YaRN (2309.00071, Table 1).",
    "dynamic_ntk": "No measurement is quoted here. InternLM 2.5 is released with it. Cached keys "
    "keep the frequencies of the length at which they were made.",
    "yarn": "Llama 2 fine-tuned with it has perplexity 3.35 at 8192 tokens and 6.04 at 10240, "
    "where linear has 8.07 and NTK 6.24 (2309.00071, Table 1). In LongRoPE2's test at 128k (RULER) "
    "it is behind: 49.4 against 73.2 for NTK (2502.20082). DeepSeek V3, Kimi K2 and gpt-oss are "
    "released with it.",
    "llama3": "No comparison with other laws is quoted here. Llama 3.1 to 3.3 are released with "
    "it, after training at that length (2407.21783).",
    "longrope": "At 128k (RULER) it has 73.4, NTK 73.2, YaRN 49.4, and its successor LongRoPE2 "
    "82.0 (2502.20082).",
}
_MEASURE = (
    "Measure the laws on your own weights and texts: perplexity at the full length, whether a fact "
    "is found at every depth of it, and both again at the trained length, which a law can make "
    "worse. Fine-tuning improves any law."
)
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
        name: The law as `phasor.scaling.LAWS` names it; ``"unchanged"`` for none, and
            ``"documented"`` for what the model's release documents.
        rope: The Rope for the longer context, with a static law.
        rule: The rule that picked this law (dynamic NTK, LongRoPE); None for other laws.
        coverage: Which of its phases did not occur in training.
        sign_change: The first distance where ``C(r) = sum_k cos(r * inv_freq[k])`` is negative:
            from there on a similar key may score below a random one (Men et al. 2405.14591,
            Theorem 1). None if there is none below ``coverage.to``.
        resolution: New over old frequency of the fastest pair, which tells neighbouring tokens
            apart; 1 if all frequencies are 0.
    """

    name: str
    rope: Rope
    rule: Rule | None
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

    @property
    def evidence(self) -> str:
        """What was measured of the law on trained models, with its source; "" if nothing is known.

        Numbers of the papers, not of this model.
        """
        return EVIDENCE.get(self.name, "")

    def __repr__(self) -> str:
        return f"Extension({self})"

    def __str__(self) -> str:
        sign = "never" if self.sign_change is None else f"from {self.sign_change}"
        return (
            f"{self.name}: {self.pairs_affected} of {self.rope.num_pairs} pairs show new phases, "
            f"C(r) < 0 {sign}, {self.resolution:.3g} of the angle between neighbours kept"
        )


def extensions(
    rope: Rope,
    context: int,
    to: int,
    *,
    factors: Sequence[float] | None = None,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
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
        parameters: By name of a law, fields of its class that replace those above, such as
            ``{"yarn": {"beta_fast": 16.0}}``.

    Returns:
        The unchanged Rope first, then each law.

    Raises:
        SpecError: If a length is not a whole number or ``to`` is not above ``context``; if
            ``factors`` or ``parameters`` do not fit; or if ``rope.scaling`` is a rule: `Rope.at`
            picks its law.

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
        ropes["longrope"] = replace(rope, scaling=rule)
    for law, values in (parameters or {}).items():
        if law not in ropes:
            raise _no_such_law(law, ropes)
        ropes[law] = _with_parameters(law, ropes[law], values)
    return tuple(_extension(name, rope, context, new, to) for name, new in ropes.items())


def _no_such_law(law: str, known: Mapping[str, Any]) -> SpecError:
    names = ", ".join(known)
    if law == "longrope":
        return SpecError(
            "longrope needs factors, a divisor for each pair that a search over the model's loss "
            "finds (2402.13753), and phasor does not search; give them (--factors FILE on the "
            f"command line), or take one of {names}"
        )
    return SpecError(f"law must be one of {names}, got {law!r}")


def _with_parameters(name: str, rope: Rope, values: Mapping[str, Any]) -> Rope:
    """``rope`` with fields of its law replaced."""
    law = rope.scaling
    known = [] if law is None or name == UNCHANGED else [field.name for field in fields(law)]
    for parameter in values:
        if not known:
            raise SpecError(f"{name} has no parameters to set, got {parameter!r}")
        choice(f"a parameter of {name}", parameter, known)
    return rope if law is None else replace(rope, scaling=replace(law, **values))


def _stretched(rope: Rope, context: int, to: int) -> dict[str, Rope]:
    """By name of the law, ``rope`` extended by it; a rule has not picked its law yet."""
    s = to / context
    trained_law = rope.law()
    if rope.explicit_inv_freq is None and trained_law is None:
        laws: dict[str, Law | Rule] = {"linear": Linear(factor=s)}
        if min(rope.axes.spectra(rope.num_pairs)) > 1:
            laws["ntk"] = NTK(factor=s)
            laws["dynamic_ntk"] = DynamicNTK(factor=s, original_max_positions=context)
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


def _extension(name: str, trained: Rope, context: int, scaled: Rope, to: int) -> Extension:
    rope = scaled.at(to)
    before, after = trained.inv_freq, rope.inv_freq
    fastest = before.argmax()
    all_zero = before[fastest] == 0
    return Extension(
        name=name,
        rope=rope,
        rule=scaled.scaling if isinstance(scaled.scaling, Rule) else None,
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Way:
    """A law for the longer context.

    Attributes:
        extension: What the law does.
        rope: The Rope in the form that configs use: NTK-aware scaling as a raised base, dynamic
            NTK and LongRoPE as their rules. Over the longer context it rotates as
            ``extension.rope``.
        config: The keys to set in a Hugging Face config; None if the format cannot express it.
        refused: The reason, if ``config`` is None.
    """

    extension: Extension
    rope: Rope
    config: Mapping[str, Any] | None
    refused: str | None

    def __repr__(self) -> str:
        return f"Way({self.extension})"


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtensionPlan:
    """The laws for the layers that share one rope, and what the model's release documents.

    Attributes:
        model: Name of the model.
        kinds: The kinds of layers to extend.
        labels: Names of their blocks in ``rope_parameters``; empty if one block is for all.
        inside: Path in the config file where the keys go, joined by dots; empty for the top.
        replaced: Keys of the file to remove, because a way's ``config`` replaces them; None if no
            Hugging Face config was read.
        context: Tokens of the training.
        to: Tokens of the wanted context.
        ways: By name, the unchanged Rope first, then ``"documented"`` if that reaches ``to``.
        documented: The longer context that the model's release documents, if phasor knows one.
    """

    model: str
    kinds: tuple[str, ...]
    labels: tuple[str, ...]
    inside: str
    replaced: tuple[str, ...] | None
    context: int
    to: int
    ways: Mapping[str, Way]
    documented: DocumentedExtension | None

    @property
    def recommended(self) -> str | None:
        """The way for which there is evidence: what the release documents. None if it does not."""
        return DOCUMENTED if DOCUMENTED in self.ways else None

    @property
    def title(self) -> str:
        """Layers and lengths, in half a line."""
        return f"{', '.join(self.kinds)} layers: from {self.context} to {self.to} tokens"

    @property
    def judgement(self) -> tuple[str, ...]:
        """What to take, or that nothing is known and has to be measured; in sentences."""
        known = self.documented
        if known is None:
            return (
                "No release of this model is known to document a longer context, so no law is "
                "recommended.",
                _MEASURE,
            )
        says = (
            f"The release of {known.model} documents YaRN with factor {known.law.factor:g} from "
            f"{known.law.original_max_positions} tokens, for up to {known.reach}. "
            f"Source: {known.source}."
        )
        if self.recommended is not None:
            return says, f"Recommended: that, called {DOCUMENTED!r} here."
        return says, f"For {self.to} tokens no law is recommended.", _MEASURE

    def way(self, law: str | None) -> Way:
        """The way with this law; with None the recommended one.

        Raises:
            SpecError: If no such law is among the ways, or none is recommended.
        """
        name = self.recommended if law is None else law
        if name is None:
            raise SpecError(
                f"law must be given, since none is recommended: one of {', '.join(self.ways)}"
            )
        if name not in self.ways:
            raise _no_such_law(name, self.ways)
        return self.ways[name]

    def config_with(self, config: Mapping[str, Any], law: str | None) -> dict[str, Any]:
        """The Hugging Face config that the plan is about, changed for the longer context.

        Args:
            config: The whole file, which stays as it is.
            law: As for `way`.

        Returns:
            A copy with the keys of the way set, and those that they replace removed.

        Raises:
            ConfigError: If a config cannot express the law, or has no config at ``inside``.
            SpecError: As for `way`.
        """
        way = self.way(law)
        if way.config is None:
            raise ConfigError(str(way.refused))
        changed = copy.deepcopy(dict(config))
        inner = changed
        for key in filter(None, self.inside.split(".")):
            if not isinstance(inner.get(key), dict):
                raise ConfigError(f"config must hold another one at {self.inside!r}, and does not")
            inner = cast(dict[str, Any], inner[key])
        for key in self.replaced or ():
            inner.pop(key, None)
        inner.update(copy.deepcopy(dict(way.config)))
        return changed

    def __repr__(self) -> str:
        return f"ExtensionPlan({self.model!r}, {self.title}, ways {', '.join(self.ways)})"

    def __str__(self) -> str:
        ways = (f"  {way.extension}" for way in self.ways.values())
        return "\n".join([f"{self.model}, {self.title}", *self.judgement, *ways])

    def as_plain(self, law: str | None) -> dict[str, Any]:
        """Everything as JSON values, with the config of ``law`` or of the recommended one."""
        name = self.recommended if law is None else law
        chosen = None if name is None else self.way(name)
        known = self.documented
        return {
            "model": self.model,
            "kinds": list(self.kinds),
            "labels": list(self.labels),
            "inside": self.inside,
            "context": self.context,
            "to": self.to,
            "documented": None
            if known is None
            else {"model": known.model, "reach": known.reach, "source": known.source},
            "recommended": self.recommended,
            "judgement": list(self.judgement),
            "law": name,
            "rope": None if chosen is None else chosen.rope.to_dict(),
            "config": None if chosen is None else chosen.config,
            "replaced": None if self.replaced is None else list(self.replaced),
            "refused": None if chosen is None else chosen.refused,
            "ways": [
                {
                    "law": name,
                    "pairs_affected": way.extension.pairs_affected,
                    "slowest_turns": way.extension.slowest_turns,
                    "sign_change": way.extension.sign_change,
                    "resolution": way.extension.resolution,
                    "attention_factor": way.extension.attention_factor,
                    "evidence": way.extension.evidence,
                }
                for name, way in self.ways.items()
            ],
        }


def plan(
    ropes: LayerRopes,
    kind: str | Sequence[str] | None,
    context: int | None,
    to: int,
    *,
    factors: Sequence[float] | None = None,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
) -> ExtensionPlan:
    """The laws that extend a model's layers to ``to`` tokens, and what its release documents.

    Recommended is only what the release documents. The numbers of the laws are computed from
    angles, which no paper has shown to predict perplexity.

    Args:
        ropes: The model.
        kind: The kind of layers to extend, or several kinds with equal ropes; kinds that share
            their config block are included. None if all ropes of the model are equal.
        context: Tokens of the training; None for the model's own ``context``.
        to: Tokens of the wanted context.
        factors: As for `extensions`.
        parameters: As for `extensions`.

    Raises:
        SpecError: If the kind must be named or does not rotate, no context is known, ``to`` is not
            above it, ``factors`` or ``parameters`` do not fit, or there are so many pairs or
            distances that it would take minutes.

    >>> from phasor import preset
    >>> planned = plan(preset("qwen3-8b"), None, None, 131072)
    >>> planned.recommended, planned.documented.law.factor
    ('documented', 4.0)
    >>> plan(preset("llama-3-8b"), None, None, 131072).recommended
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
    trained = resolved(rope, length)
    unchanged, *laws = extensions(trained, length, to, factors=factors, parameters=parameters)
    candidates = [unchanged]
    documented = documented_extension(ropes)
    if documented is not None and to <= documented.reach:
        scaled = replace(rope, scaling=documented.law)
        candidates.append(_extension(DOCUMENTED, trained, length, scaled, to))
    replaceable = REPLACED + REPLACED_OF_KINDS if ropes.has_blocks_by_kind else REPLACED
    in_file = ropes.in_config.keys
    return ExtensionPlan(
        model=ropes.name,
        kinds=tuple(names),
        labels=tuple(dict.fromkeys(labels)),
        inside=ropes.in_config.inside,
        replaced=tuple(key for key in replaceable if key in in_file) if in_file else None,
        context=length,
        to=to,
        ways={way.name: _way(way, rope, ropes, names) for way in (*candidates, *laws)},
        documented=documented,
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
    rope = original if extension.name == UNCHANGED else extension.rope
    if extension.rule is not None:
        return replace(rope, scaling=extension.rule)
    if isinstance(rope.scaling, NTK) and not isinstance(rope.axes, Axial):
        return with_raised_base(rope, rope.scaling.factor)
    return rope


def with_raised_base(rope: Rope, factor: float) -> Rope:
    """NTK-aware scaling as a larger base: ``base * factor ** (n / (n - 1))`` for ``n`` pairs."""
    assert rope.base is not None, "a law scales the powers of a base"
    power = Decimal(rope.num_pairs) / (rope.num_pairs - 1)
    return replace(rope, base=float(Decimal(rope.base) * Decimal(factor) ** power), scaling=None)
