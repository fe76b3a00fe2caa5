"""The laws that extend a model's layers, the law that its release documents, and their configs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from phasor._checks import whole
from phasor.axes import Axial
from phasor.describe import static_rope, to_plain
from phasor.errors import ConfigError, SpecError
from phasor.extending.cosines import find_first_negative
from phasor.extending.laws import EVIDENCE, UNCHANGED, extended_ropes, find_law
from phasor.extending.phases import Coverage, coverage
from phasor.files.configs.cache_size import CacheSize, cache_size
from phasor.files.dialects.model_files import FileKeys, keys_for_file
from phasor.files.presets import DocumentedExtension, documented_extension
from phasor.layers import LayerRopes, one_layer
from phasor.rope import Rope
from phasor.scaling import NTK

DOCUMENTED = "documented"
_MEASURING_ADVICE = (
    "Measure the laws on your own weights and texts: perplexity at the full length, whether the "
    "model finds a fact at every depth, and both again at the trained length, which a law can make "
    "worse. Fine-tuning improves any law."
)
# limits on pairs and on pairs * distances, so that a comparison takes seconds
_MOST_PAIRS, _MOST_COSINES = 1 << 11, 1 << 31
# fields of a plan and of an option that are JSON values already
_PLAN_FIELDS = (
    "model", "kinds", "labels", "inside", "context", "to", "recommended", "judgement",
)  # fmt: skip
_OPTION_NUMBERS = (
    "pairs_with_new_phases", "slowest_turns", "sign_change", "resolution", "evidence",
)  # fmt: skip
_FIXED_CLASS_REASON = (
    "the class of this model ignores laws and bases in its config; rotate with the rope itself "
    "(store it with Rope.to_json)"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtensionOption:
    """One law for the longer context, and its effects."""

    # a name in `phasor.scaling.LAWS`, "unchanged", or "documented" for the model's release
    name: str
    rope: Rope  # for the longer context, with a static law
    coverage: Coverage  # the phases that did not occur in training
    # the first distance below ``coverage.to`` where ``C(r) = sum_k cos(r * inv_freq[k])`` is
    # negative: from there on a similar key may score below a random one (Men et al. 2405.14591,
    # Theorem 1)
    sign_change: int | None
    # new / old frequency of the fastest pair, which distinguishes neighbouring tokens; 1 if all
    # frequencies are 0
    resolution: float
    # ``rope`` as a config states it: NTK-aware scaling as a larger base, rules unresolved
    config_rope: Rope
    # the keys for the Hugging Face config and the programs that read them; None if it has none
    file_keys: FileKeys | None
    refused: str | None  # the reason, if ``file_keys`` is None

    @property
    def config(self) -> dict[str, Any] | None:
        """The keys to set in the Hugging Face config; None if the format cannot express it."""
        return self.file_keys and self.file_keys.to_set

    @property
    def pairs_with_new_phases(self) -> int:
        """Number of pairs with a phase that did not occur in training."""
        return int(self.coverage.has_new_phases.sum())

    @property
    def slowest_turns(self) -> float:
        """Turns that the slowest pair makes over the longer context."""
        return float(self.coverage.extended_turns.min())

    @property
    def evidence(self) -> str:
        """Measurements of the law in papers, on other models; "" if none are known."""
        return EVIDENCE.get(self.name, "")

    def __repr__(self) -> str:
        return f"ExtensionOption({self})"

    def __str__(self) -> str:
        sign = "never" if self.sign_change is None else f"from {self.sign_change}"
        return (
            f"{self.name}: {self.pairs_with_new_phases} of {self.rope.num_pairs} pairs show new "
            f"phases, C(r) < 0 {sign}, angle between neighbours times {self.resolution:.3g}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtensionPlan:
    """The laws for layers that share one rope, and the law that the model's release documents."""

    model: str  # the model's name
    kinds: tuple[str, ...]  # the kinds of layers to extend
    labels: tuple[str, ...]  # their blocks in ``rope_parameters``; empty if all layers share one
    inside: str  # path in the config file where the keys go, joined by dots
    has_file: bool  # whether the keys are for a Hugging Face config that phasor read
    context: int  # tokens of the training
    to: int  # tokens of the wanted context
    # by name: first the unchanged Rope, then "documented" if that reaches ``to``
    options: Mapping[str, ExtensionOption]
    documented: DocumentedExtension | None  # the longer context of the release, if it is known
    cache: CacheSize  # for one sequence of ``context`` tokens and one of ``to``

    @property
    def recommended(self) -> str | None:
        """The only option with evidence: the one that the release documents, or None."""
        return DOCUMENTED if DOCUMENTED in self.options else None

    @property
    def title(self) -> str:
        """Layers and lengths, in a few words."""
        return f"{', '.join(self.kinds)} layers: from {self.context} to {self.to} tokens"

    @property
    def judgement(self) -> tuple[str, ...]:
        """Sentences about the documented law, or that none is known and you need to measure."""
        release = self.documented
        if release is None:
            return (
                "No law is recommended: no release of this model is known to document a longer "
                "context.",
                _MEASURING_ADVICE,
            )
        if release.model == self.model:
            subject = f"The release of {release.model}"
        else:
            subject = f"Its layers are as in {release.model}, which"
        finding = (
            f"{subject} documents YaRN with factor {release.law.factor:g} from "
            f"{release.law.original_max_positions} tokens, for up to {release.reach}. "
            f"Source: {release.source}."
        )
        if self.recommended is not None:
            return finding, f"Recommended: this setting (row {DOCUMENTED!r})."
        return finding, f"For {self.to} tokens no law is recommended.", _MEASURING_ADVICE

    @property
    def costs(self) -> tuple[str, ...]:
        """The memory of keys and values before and after, with its formula."""
        if self.cache.bytes is None:
            return (f"Keys and values of a sequence: not counted, because {self.cache.formula}.",)
        before, after = (f"{count / 2**30:.4g} GiB" for count in self.cache.bytes)
        return (
            f"Keys and values of a sequence: {before} at {self.context} tokens, "
            f"{after} at {self.to}.",
            f"  {self.cache.formula}",
        )

    def option(self, law: str | None) -> ExtensionOption:
        """The option with this law; for None the recommended one."""
        name = self.recommended if law is None else law
        if name is None:
            raise SpecError(
                f"law must be given, because none is recommended: one of {', '.join(self.options)}"
            )
        return self.options[find_law(name, self.options)]

    def config_with(self, config: Mapping[str, Any], law: str | None) -> dict[str, Any]:
        """A copy of the Hugging Face config of the model, changed for `option`.

        Raises:
            ConfigError: If a config cannot express the law, or has no config at ``inside``.
        """
        option = self.option(law)
        if option.file_keys is None:
            raise ConfigError(str(option.refused))
        new_config = copy.deepcopy(dict(config))
        inner = new_config
        for key in filter(None, self.inside.split(".")):
            if not isinstance(inner.get(key), dict):
                raise ConfigError(f"config must hold another config at {self.inside!r}")
            inner = cast(dict[str, Any], inner[key])
        for key in option.file_keys.to_remove:
            inner.pop(key, None)
        inner.update(copy.deepcopy(option.file_keys.to_set))
        return new_config

    def __repr__(self) -> str:
        return f"ExtensionPlan({self.model!r}, {self.title}, options {', '.join(self.options)})"

    def __str__(self) -> str:
        options = (f"  {option}" for option in self.options.values())
        return "\n".join([f"{self.model}, {self.title}", *self.judgement, *options])

    def as_plain(self, law: str | None) -> dict[str, Any]:
        """Everything as JSON values, with the config for ``law`` or for the recommended law."""
        chosen = None if law is None and self.recommended is None else self.option(law)
        release, tokens = self.documented, self.cache.bytes
        cache = tokens and dict(zip(("before", "after"), tokens, strict=True))
        return {name: to_plain(getattr(self, name)) for name in _PLAN_FIELDS} | {
            "cache": {"bytes": cache, "formula": self.cache.formula},
            "documented": release
            and {name: getattr(release, name) for name in ("model", "reach", "source")},
            "law": chosen and chosen.name,
            "rope": chosen and chosen.config_rope.to_dict(),
            "config": chosen and chosen.config,
            "remove": chosen and chosen.file_keys and list(chosen.file_keys.to_remove),
            "readers": chosen and chosen.file_keys and chosen.file_keys.readers,
            "refused": chosen and chosen.refused,
            "options": [
                {"law": name, "attention_factor": option.rope.attention_factor}
                | {number: getattr(option, number) for number in _OPTION_NUMBERS}
                for name, option in self.options.items()
            ],
        }


def plan_extension(
    ropes: LayerRopes | Rope,
    to: int,
    *,
    kind: str | Sequence[str] | None = None,
    context: int | None = None,
    factors: Sequence[float] | None = None,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
) -> ExtensionPlan:
    """The laws that extend a model's layers to ``to`` tokens, and the one its release documents.

    Only the documented law is recommended. The numbers of the laws are computed from angles, which
    no paper has shown to predict perplexity. The options are no change, linear interpolation and
    NTK-aware scaling by the ratio of the lengths, dynamic NTK, YaRN and Llama 3 with their
    published parameters, and LongRoPE if its searched ``factors`` are given. Layers that already
    have a law keep its kind, with its factor multiplied by the ratio.

    Args:
        ropes: The model, or one Rope for all its layers.
        to: Tokens in the longer context.
        kind: The kind of layers to extend, or several kinds with equal ropes; kinds in the same
            config block are included. None if all ropes of the model are equal.
        context: Tokens in training; None for the model's own ``context``.
        factors: LongRoPE's divisor for each pair; only for layers without a law.
        parameters: For a law, by name, values that replace the usual ones, such as
            ``{"yarn": {"beta_fast": 16.0}}``.

    >>> from phasor import preset
    >>> planned = plan_extension(preset("qwen3-8b"), 131072)
    >>> planned.recommended, planned.documented.law.factor
    ('documented', 4.0)
    >>> linear = planned.options["linear"]
    >>> linear.pairs_with_new_phases, linear.sign_change, round(linear.resolution, 3)
    (0, 86767, 0.312)
    """
    if isinstance(ropes, Rope):
        ropes = one_layer(ropes)
    length = ropes.context if context is None else context
    if length is None:
        raise SpecError(
            f"context must be given, because the description of {ropes.name} has none: how many "
            f"tokens was it trained on?"
        )
    names, rope = _find_kinds(ropes, kind)
    if rope.num_pairs > _MOST_PAIRS:
        raise SpecError(
            f"laws are compared for at most {_MOST_PAIRS} pairs, got {rope.num_pairs}; is this "
            f"really the model's head_dim?"
        )
    whole("to", to, least=2, most=longest_plan(rope))
    trained = static_rope(rope, length)
    ropes_by_law = extended_ropes(trained, length, to, factors=factors, parameters=parameters)
    documented = documented_extension(ropes)
    if documented is not None and to <= documented.reach:
        scaled = replace(rope, scaling=documented.law)
        # after the unchanged rope, before the other laws
        ropes_by_law = {UNCHANGED: trained, DOCUMENTED: scaled} | ropes_by_law
    fastest = trained.inv_freq.argmax()

    def make_option(name: str, scaled: Rope) -> ExtensionOption:
        static = scaled.at(to)
        config_rope = _as_in_configs(rope if name == UNCHANGED else scaled)
        file_keys, refused = _file_keys(ropes, names, config_rope, length, to)
        before, after = trained.inv_freq[fastest], static.inv_freq[fastest]
        return ExtensionOption(
            name=name,
            rope=static,
            coverage=coverage(trained, length, static, to),
            sign_change=find_first_negative(static, to),
            resolution=float(after / before) if before else 1.0,
            config_rope=config_rope,
            file_keys=file_keys,
            refused=refused,
        )

    has_kind_blocks, in_config = ropes.has_blocks_by_kind, ropes.in_config
    return ExtensionPlan(
        model=ropes.name,
        kinds=tuple(names),
        labels=tuple(dict.fromkeys(map(in_config.label, names))) if has_kind_blocks else (),
        inside=in_config.path,
        has_file=bool(in_config.values),
        context=length,
        to=to,
        options={name: make_option(name, scaled) for name, scaled in ropes_by_law.items()},
        documented=documented,
        cache=cache_size(ropes, length, to),
    )


def longest_plan(rope: Rope) -> int:
    """The longest context for which laws of ``rope`` are compared, limited by computing time."""
    return _MOST_COSINES // rope.num_pairs


def _find_kinds(ropes: LayerRopes, kind: str | Sequence[str] | None) -> tuple[list[str], Rope]:
    """The kinds of layers to extend, with those in the same config block, and their rope."""
    rotating = [name for name, rope in ropes.kinds.items() if rope is not None]
    if kind is None and not rotating:
        raise SpecError(f"no layer of {ropes.name} has a rotary embedding to extend")
    if kind is None and len(ropes.ropes) > 1:
        layers = f"the layers of {ropes.name} differ"
        raise SpecError(f"kind must be given, because {layers}: one of {', '.join(rotating)}")
    names = rotating if kind is None else [kind] if isinstance(kind, str) else list(kind)
    rope = ropes.kinds.get(names[0]) if names else None
    if rope is None or any(ropes.kinds.get(name) != rope for name in names):
        raise SpecError(
            f"kind must be one of {', '.join(rotating) or '(none rotates)'}, got {kind!r}"
        )
    same_rope = [name for name, kind_rope in ropes.kinds.items() if kind_rope == rope]
    if not ropes.has_blocks_by_kind:
        return same_rope, rope
    label = ropes.in_config.label
    labels = {label(name) for name in names}
    return [name for name in same_rope if label(name) in labels], rope


def _as_in_configs(rope: Rope) -> Rope:
    """The rope with a larger base instead of NTK-aware scaling, which configs have no key for."""
    is_axial = isinstance(rope.axes, Axial)
    if not isinstance(rope.scaling, NTK) or rope.base is None or is_axial:
        return rope
    return replace(rope, base=rope.scaling.raised_base(rope.base, rope.num_pairs), scaling=None)


def _file_keys(
    ropes: LayerRopes, names: list[str], rope: Rope, context: int, to: int
) -> tuple[FileKeys | None, str | None]:
    """The config keys that give the kinds ``names`` this rope, or the reason why there are none."""
    if ropes.in_config.ignores_scaling:
        return None, _FIXED_CLASS_REASON
    extended = replace(ropes, kinds=dict(ropes.kinds) | dict.fromkeys(names, rope))
    try:
        return keys_for_file(extended, context, to), None
    except ConfigError as error:
        return None, str(error)
