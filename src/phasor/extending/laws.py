"""The laws that extend a rope to a longer context, what each does, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any, cast

from phasor._checks import choice, whole
from phasor.errors import SpecError
from phasor.papers.distances import first_negative
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
    Rule,
    Yarn,
)

UNCHANGED = "unchanged"
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
            raise no_such_law(law, ropes)
        ropes[law] = _with_parameters(law, ropes[law], values)
    return tuple(extension(name, rope, context, new, to) for name, new in ropes.items())


def no_such_law(law: str, known: Mapping[str, Any]) -> SpecError:
    """The error for a law that is not among the ``known`` ones, with what LongRoPE needs."""
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


def extension(name: str, trained: Rope, context: int, scaled: Rope, to: int) -> Extension:
    """What ``scaled``, whose rule has not picked its law yet, does beside the trained Rope."""
    rope = scaled.at(to)
    before, after = trained.inv_freq, rope.inv_freq
    fastest = before.argmax()
    all_zero = before[fastest] == 0
    return Extension(
        name=name,
        rope=rope,
        rule=scaled.scaling if isinstance(scaled.scaling, Rule) else None,
        coverage=coverage(trained, context, rope, to),
        sign_change=first_negative(rope, to),
        resolution=1.0 if all_zero else float(after[fastest] / before[fastest]),
    )


def with_raised_base(rope: Rope, factor: float) -> Rope:
    """NTK-aware scaling as a larger base: ``base * factor ** (n / (n - 1))`` for ``n`` pairs."""
    assert rope.base is not None, "a law scales the powers of a base"
    power = Decimal(rope.num_pairs) / (rope.num_pairs - 1)
    return replace(rope, base=float(Decimal(rope.base) * Decimal(factor) ** power), scaling=None)
