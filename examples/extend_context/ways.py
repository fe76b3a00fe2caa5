"""The ways to a longer context that are compared, and what was published about their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from settings import Settings

from phasor import Rope
from phasor.scaling import NTK, DynamicNTK, Hope, Law, Linear, Llama3, NTKMixed, PartNTK, Rule, Yarn
from phasor.torch.papers import ReRope

Stage = Literal["zero-shot", "fine-tuned"]
STAGES: tuple[Stage, ...] = ("zero-shot", "fine-tuned")


@dataclass(frozen=True, kw_only=True)
class Way:
    """A Rope for the longer context, or attention that does without one.

    Attributes:
        title: Its name in tables and pictures.
        rope: What rotates; its scaling may be a rule.
        window: Tokens that one sees; None for all before.
        distance: How distances are cut; None where they are not.
        tuned_as: Whose fine-tuned weights it takes: its own name, another's, or None for none.
    """

    title: str
    rope: Rope
    window: int | None = None
    distance: ReRope | None = None
    tuned_as: str | None = None


def ways(settings: Settings) -> dict[str, Way]:
    """Every way by its name, the unchanged Rope first and the references last."""
    factor, context = settings.factor, settings.context
    stretch = {"factor": factor, "original_max_positions": context}
    laws: dict[str, tuple[str, Law | Rule | None]] = {
        "none": ("unchanged", None),
        "linear": ("linear (PI)", Linear(factor=factor)),
        "ntk": ("NTK-aware", NTK(factor=factor)),
        "ntk_mixed": ("NTK mixed", NTKMixed(factor=factor)),
        "dynamic_ntk": ("dynamic NTK", DynamicNTK(factor=1.0, original_max_positions=context)),
        "part_ntk": ("NTK by parts", PartNTK(**stretch)),
        "yarn": ("YaRN", Yarn(**stretch)),
        "llama3": ("Llama 3", Llama3(**stretch)),
        "hope": ("HoPE", Hope(original_max_positions=context)),
    }

    def rope(law: Law | Rule | None) -> Rope:
        return Rope(head_dim=settings.head_dim, pairing="half", base=settings.base, scaling=law)

    # at the longer length the rule is that very law, so that training there is the same training
    shared = {"dynamic_ntk": "ntk"}
    found = {
        name: Way(title=title, rope=rope(law), tuned_as=shared.get(name, name))
        for name, (title, law) in laws.items()
    }
    plain = rope(None)
    return found | {
        "rerope": Way(title="ReRoPE", rope=plain, distance=ReRope(width=context // 2)),
        "window": Way(title=f"window of {context}", rope=plain, window=context, tuned_as="window"),
    }


def is_rule(way: Way) -> bool:
    """Whether the length of the sequence picks the law."""
    return isinstance(way.rope.scaling, Rule)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published order of two ways: the loss of ``better`` is below that of ``worse``."""

    better: tuple[Stage, str]
    worse: tuple[Stage, str]
    source: str


_SU = "Su (kexue.fm/9706, 9708)"
_CHEN = "Chen et al. (2306.15595)"
_PENG = "Peng et al. (2309.00071)"


def claims() -> list[Claim]:
    """What was published, as pairs that can be measured here.

    Su: accuracy of a small model at 8 times its context. Chen et al.: interpolation needs little
    fine-tuning, where the unchanged Rope adapts slowly. Peng et al., table of perplexities after
    fine-tuning: YaRN and linear are close, NTK-aware is behind.
    """

    def zero(better: str, worse: str) -> Claim:
        return Claim(better=("zero-shot", better), worse=("zero-shot", worse), source=_SU)

    def tuned(better: str, worse: str, source: str) -> Claim:
        return Claim(better=("fine-tuned", better), worse=("fine-tuned", worse), source=source)

    return [
        zero("none", "linear"),
        zero("ntk", "none"),
        zero("ntk_mixed", "ntk"),
        zero("rerope", "ntk_mixed"),
        Claim(better=("fine-tuned", "linear"), worse=("zero-shot", "linear"), source=_CHEN),
        tuned("linear", "none", _CHEN),
        tuned("linear", "ntk", _PENG),
        tuned("yarn", "ntk", _PENG),
    ]
