"""The laws that extend a rope to a longer context, and published measurements of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

from phasor._checks import choice, did_you_mean, find_name, whole
from phasor.axes import Mixed
from phasor.describe import without_law
from phasor.errors import SpecError
from phasor.rope import Rope, with_frequencies
from phasor.scaling import LAWS, NTK, DynamicNTK, Law, Linear, Llama3, LongRope, PerPair, Rule, Yarn

UNCHANGED = "unchanged"
#: Measurements of each law on trained models, with their sources.
EVIDENCE: Mapping[str, str] = {
    UNCHANGED: "Llama 2 13B has a loss of 1.50 at 4096 tokens and 8.86 at 8192 (Su, ReRoPE).",
    "linear": "Llama 2 fine-tuned with it has perplexity 3.34 at 8192 tokens (YaRN 2309.00071, "
    "Table 1). Without fine-tuning, a small model got worse than without scaling (Su, "
    "kexue.fm/9706).",
    "ntk": "Without fine-tuning, the loss of Llama 2 13B is 1.54 at 8192 tokens, and 1.61 instead "
    "of 1.50 at 4096 (Su, ReRoPE). Fine-tuned, its perplexity at 8192, 3.59, is worse than those "
    "of linear and YaRN (2309.00071, Table 1).",
    "dynamic_ntk": "No measurement is quoted here. InternLM 2.5 is released with it. Cached keys "
    "keep the frequencies of the length at which they were computed.",
    "yarn": "Llama 2 fine-tuned with it has perplexity 3.35 at 8192 tokens and 6.04 at 10240, "
    "where linear has 8.07 and NTK 6.24 (2309.00071, Table 1). In LongRoPE2's test at 128k (RULER) "
    "it scores 49.4, NTK 73.2 (2502.20082). DeepSeek V3, Kimi K2 and gpt-oss are "
    "released with it.",
    "llama3": "No comparison with other laws is quoted here. Llama 3.1 to 3.3 are released with "
    "it, after training at that length (2407.21783).",
    "longrope": "At 128k (RULER) it scores 73.4, NTK 73.2, YaRN 49.4, and its successor LongRoPE2 "
    "82.0 (2502.20082).",
}


def extended_ropes(
    rope: Rope,
    context: int,
    to: int,
    *,
    factors: Sequence[float] | None = None,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Rope]:
    """``rope`` unchanged, and extended from ``context`` to ``to`` tokens by each law, by name.

    See `plan_extension`. NTK laws are left out if an axis has a single pair; explicit frequencies,
    and frequencies of a law without a factor, are divided by ``to / context``. Rules (dynamic NTK,
    LongRoPE) are returned before they pick a law.
    """
    if to <= whole("context", context, least=2):
        raise SpecError(
            f"to must be above the context of {context} tokens, got {to}: fewer tokens need no "
            f"other law"
        )
    if factors is not None and (rope != without_law(rope) or rope.explicit_inv_freq is not None):
        raise SpecError(
            "factors divide unscaled frequencies, but this rope has a law or explicit frequencies; "
            "pass the Rope from before the extension, with its context"
        )
    ropes = {UNCHANGED: rope, **_stretch(rope, context, to)}
    if factors is not None:
        divisors = tuple(factors)
        rule = LongRope(
            short_factors=(1.0,) * len(divisors), long_factors=divisors,
            original_max_positions=context, factor=to / context,
        )  # fmt: skip
        ropes["longrope"] = replace(rope, scaling=rule)
    for name, values in (parameters or {}).items():
        law = find_law(name, ropes)
        ropes[law] = _set_parameters(law, ropes[law], values)
    return ropes


def find_law(name: str, laws: Mapping[str, Any]) -> str:
    """The law that ``name`` means, in upper or lower case."""
    law = find_name(name, laws)
    if law is not None:
        return law
    names = ", ".join(laws)
    if find_name(name, ["longrope"]):
        raise SpecError(
            "longrope needs factors, a divisor for each pair. They come from a search over the "
            "model's loss (2402.13753), which phasor cannot do; pass them (--factors FILE on the "
            f"command line), or use one of {names}"
        )
    hint = did_you_mean(name, laws)
    raise SpecError(f"law must be one of {names}, got {name!r}" + (hint and f"; {hint}"))


def _set_parameters(name: str, rope: Rope, values: Mapping[str, Any]) -> Rope:
    """``rope`` with some fields of its law replaced."""
    law = rope.scaling
    parameter_names = (
        [] if law is None or name == UNCHANGED else [field.name for field in fields(law)]
    )
    for parameter in values:
        if not parameter_names:
            raise SpecError(f"{name} has no parameters to set, got {parameter!r}")
        choice(f"a parameter of {name}", parameter, parameter_names)
    return rope if law is None else replace(rope, scaling=replace(law, **values))


def _stretch(rope: Rope, context: int, to: int) -> dict[str, Rope]:
    """``rope`` extended by each law, by name; rules are returned before they pick a law."""
    ratio, law = to / context, rope.law()
    if isinstance(rope.axes, Mixed):
        rows = tuple(tuple(f / ratio for f in row) for row in rope.axes.inv_freq)
        return {"linear": replace(rope, axes=Mixed(rows))}
    if rope.explicit_inv_freq is None and rope == without_law(rope):
        lengths: dict[str, Any] = {"factor": ratio, "original_max_positions": context}
        laws: dict[str, Law | Rule] = {"linear": Linear(factor=ratio)}
        if min(rope.axes.spectra(rope.num_pairs)) > 1:
            laws |= {"ntk": NTK(factor=ratio), "dynamic_ntk": DynamicNTK(**lengths)}
        laws |= {"yarn": Yarn(**lengths), "llama3": Llama3(**lengths)}
        return {name: replace(rope, scaling=chosen) for name, chosen in laws.items()}
    changed_fields: dict[str, Any] = {}
    if isinstance(law, PerPair):
        changed_fields = {"factors": tuple(ratio * factor for factor in law.factors)}
    elif hasattr(law, "factor"):
        changed_fields = {"factor": ratio * cast(Any, law).factor}
    if law is not None and changed_fields:
        name = next(name for name, kind in LAWS.items() if kind is type(law))
        return {name: replace(rope, scaling=replace(law, **changed_fields))}
    inv_freq = tuple(float(f / ratio) for f in rope.inv_freq)
    return {"linear": with_frequencies(rope, explicit_inv_freq=inv_freq)}
