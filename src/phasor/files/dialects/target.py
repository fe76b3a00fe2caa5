"""What all targets share: their description, the parts that they are given, and their refusals.

A target is a program that rotates. Its file lists as data what the program can express, and has
one function that writes the settings and the code for a Rope.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from phasor._reals import in_reals
from phasor.axes import AXES, Axes, OneAxis
from phasor.describe import plain_fields
from phasor.errors import ConfigError, PhasorError, SpecError
from phasor.files.configs.layer_pattern import LayerPattern
from phasor.layers import LayerRopes, QueryFactor
from phasor.pairings import Pairing
from phasor.rope import Rope, real_inv_freq, with_frequencies, with_listed_frequencies
from phasor.scaling import NTK, Linear, NTKFixed, NTKOld, Rule, Yarn
from phasor.scaling.laws import yarn_multiplier

Keys = dict[str, Any]

#: What to do if a program cannot pick the law of a rule itself.
PICK_LAW = "translate rope.at(seq_len), or give --seq-len TOKENS"

#: For programs that get the cos and sin, or the angles, of each token.
EVERY_AXES = tuple(AXES.values())

#: The factor on queries of Llama 4's releases, which some programs have as constants.
LLAMA4_FACTOR = QueryFactor(strength=0.1, length=8192, first=1)

#: A note for a factor on the logits for which a program has no setting.
SOFTMAX_NOTE = "Multiply the softmax scale by {factor!r} as well, as the model does."


@dataclass(frozen=True, eq=False)  # settings may be arrays
class ProgramSettings:
    """The settings of a target for the layers of one rope, or for the whole model."""

    settings: Mapping[str, Any]  # by the target's own names: JSON values and float64 arrays
    code: str  # Python with its imports, a command, or a piece of a file
    notes: tuple[str, ...] = ()  # what else the user has to do, a sentence each
    # by kind of layer, the rope that the target then performs, in the pairing that it reads; a note
    # lists pairs that do not turn. If it is empty, `translate` fills in the ropes that it asked for
    ropes: Mapping[str, Rope] = field(default_factory=dict[str, Rope])
    # whether ``code`` reads the settings as variables; if not, it contains them
    as_variables: bool = False

    def as_plain(self) -> dict[str, Any]:
        """Everything as JSON values: arrays as lists, infinities in them as the text ``"inf"``."""
        lists: dict[str, Any] = {
            name: [x if math.isfinite(x) else str(x) for x in value.tolist()]
            for name, value in self.settings.items()
            if isinstance(value, np.ndarray)
        }
        return plain_fields(replace(self, settings={**self.settings, **lists}))


class TranslationError(ConfigError):
    """A rope that a target cannot express.

    Attributes:
        reason: The features that it cannot express, alone or together, joined by " and ".
        facts: ``feature`` describes these features; ``because``, if known, is what the program's
            code does instead; ``axes`` is there if each axis has its own base or law.
        nearest: The nearest rope that the target can express; None if none is near.
        radians: The largest error of a pair's angle with ``nearest``, at the last position of the
            context, whole turns included; None without ``nearest``.
    """

    def __init__(
        self,
        message: str,
        reason: str = "",
        facts: Mapping[str, object] = PhasorError.facts,
        *,
        nearest: Rope | None = None,
        radians: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason, self.facts = reason, facts
        self.nearest = nearest
        self.radians = radians


class RefusalError(TranslationError):
    """The error of `Target.refuse`, to which `translate` adds the nearest rope and its distance."""

    def __init__(
        self,
        error: TranslationError,
        rope: Rope,
        candidates: Iterable[Rope] | None,
        context: int | None,
    ) -> None:
        super().__init__(str(error), error.reason, error.facts)
        self.rope, self.context = rope, context
        self.candidates = plain_candidates(rope) if candidates is None else [*candidates]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A program that rotates, and what it can express."""

    name: str  # by which `translate` finds it
    program: str  # a short phrase: the settings and the program that reads them
    source: str  # where its arguments are documented
    # "run" if the tests run the program itself; else they run a function that is written from its
    # documentation, and "engine" means that tools/engines.py has run the program
    checked: Literal["run", "engine", "description"]
    # makes settings for a rope that has passed `check`, and the context; their code reads them as
    # variables and rotates an array from its first coordinate on
    write_rope: Callable[[Rope, int], ProgramSettings] | None = None
    # or makes settings for the whole model
    write: Callable[[LayerRopes, int], ProgramSettings] | None = None
    alternative: str = ""  # the target of the same program that can express more
    package: str = ""  # what the tests install; ``name`` unless given
    # the only pairing that it has for a rope's law and axes, so that weights have to be reordered;
    # None if it has both, or if reading its file back tells which (`by_reading`)
    only_pairs: Callable[[Rope], Pairing | None] = lambda rope: None
    # whether ``write`` reads ``pairing_out``; if not, the target writes the pairs that it reads
    other_pairs_out: bool = False
    partial: bool = True  # whether it can rotate a part of the head only
    backwards: bool = False  # whether it can turn pairs clockwise
    axes: tuple[type[Axes], ...] = (OneAxis,)
    # the rules that it applies by itself; any other rule has to be replaced by its law
    rules: tuple[type[Rule], ...] = ()
    # the note for a factor on the logits; none where ``write`` has a setting or a note of its own
    softmax_note: str = SOFTMAX_NOTE
    # where the code of each model's class decides which pairs turn, a phrase for the note about it
    class_decides: str = ""
    # the part of the program that has to skip layers without a rotation, for a note; "" for none
    leaves_layers: str = ""
    # whether the program's own code for models with such a factor multiplies queries by it, in
    # layers with this rope
    query_factor: Callable[[QueryFactor, Rope | None], bool] = lambda factor, rope: False

    def check(self, rope: Rope) -> None:
        """Refuse a rope that the program cannot express, whatever its frequencies are."""
        law = rope.scaling
        if isinstance(law, Rule) and not isinstance(law, self.rules):
            feature = f"{type(law).__name__}, which picks a law by the length of the sequence"
            raise self.lacks("rule", feature, "it keeps one law for all lengths", way_out=PICK_LAW)
        if not isinstance(rope.axes, self.axes):
            # with one spectrum it rotates in the same way where all coordinates are equal
            has_one_spectrum = rope.axes.spectra(rope.num_pairs) == (rope.num_pairs,)
            feature = f"positions of {rope.axes.n_axes} axes ({type(rope.axes).__name__})"
            candidates = [drop_axes(rope)] if has_one_spectrum else []
            self.refuse("axes", feature, rope, candidates)
        if rope.direction < 0 and not self.backwards:
            forwards = replace(rope, direction=1)
            self.refuse("clockwise", "pairs that turn clockwise", rope, [forwards])
        if rope.rotary_dim < rope.head_dim and not self.partial:
            feature = f"{rope.rotary_dim} rotated coordinates of {rope.head_dim}"
            self.refuse("part", feature, rope, [])

    def only_rope(self, ropes: LayerRopes) -> Rope:
        """The rope of all layers, for programs with a single one; a refusal suggests the first."""
        first, *other_ropes = ropes.ropes
        if other_ropes:
            kinds = " and ".join(kind for kind, rope in ropes.kinds.items() if rope is not None)
            candidates = [first] if first.num_pairs == other_ropes[0].num_pairs else []
            self.refuse("ropes", f"different ropes in {kinds} layers", other_ropes[0], candidates)
        return first

    def lacks(
        self, reason: str, feature: str, because: str = "", *, way_out: str = ""
    ) -> TranslationError:
        """The error for a feature that the program lacks.

        ``reason`` is a word for the feature, and ``because`` what the program's code does instead.
        """
        facts = {"feature": feature, "because": because} if because else {"feature": feature}
        sentence = f"{self.name} cannot express {': '.join(facts.values())}"
        return TranslationError("; ".join(filter(None, (sentence, way_out))), reason, facts)

    def refuse(
        self,
        reason: str,
        feature: str,
        rope: Rope,
        candidates: Iterable[Rope] | None = None,
        context: int | None = None,
        because: str = "",
        *,
        way_out: str = "",
    ) -> NoReturn:
        """Raise the error of `lacks` for a feature of ``rope``, with the nearest rope.

        The error names the nearest of the ``candidates`` (by default those of `plain_candidates`),
        compared at the end of ``context`` (by default the model's). A candidate that the program
        cannot express either is replaced by the candidates of its own refusal.
        """
        error = self.lacks(reason, feature, because, way_out=way_out)
        raise RefusalError(error, rope, candidates, context)


def as_json(
    keys: Keys, notes: Iterable[str] = (), ropes: Mapping[str, Rope] | None = None
) -> ProgramSettings:
    """The settings for a program that reads a file of JSON."""
    return ProgramSettings(keys, json.dumps(keys, indent=2), tuple(notes), ropes or {})


def as_yaml(keys: Keys, notes: Iterable[str], ropes: Mapping[str, Rope]) -> ProgramSettings:
    """The settings for a program that reads a file of YAML, of any version."""
    code = "\n".join(f"{name}: {json.dumps(value)}" for name, value in keys.items())
    code = re.sub(r'"(\w+)":', r"\1:", code)
    # version 1.1 takes a number with an exponent and no point for a text
    code = re.sub(r"(?<![.\w])(\d+)e", r"\1.0e", code)
    return ProgramSettings(keys, code, tuple(notes), ropes)


def rotating(ropes: LayerRopes) -> dict[str, Rope]:
    """The ropes by kind of layer, for the kinds that have one."""
    return {kind: rope for kind, rope in ropes.kinds.items() if rope is not None}


def law_numbers(law: Any, *fields: str, **names: str) -> Keys:
    """A law's numbers: ``fields`` under their own names, ``names`` under a program's names."""
    names = {field: field for field in fields} | names
    return {name: getattr(law, field) for field, name in names.items()}


def slice_width(rope: Rope) -> int:
    """Coordinates from the first rotated one to the end of the head."""
    return rope.head_dim - rope.rotary_start


def softmax_notes(factor: float) -> list[str]:
    """The note on what the user has to do about a factor on the logits."""
    return [] if factor == 1 else [SOFTMAX_NOTE.format(factor=factor)]


def has_steps(factor: QueryFactor, _rope: Rope | None = None) -> bool:
    """Whether the factor on queries has the form of Llama 4 and Mistral."""
    return factor.form == "steps"


def change_ropes(ropes: LayerRopes, change: Callable[[Rope], Rope]) -> LayerRopes:
    """The model with ``change(rope)`` instead of each rope."""
    kinds = {kind: None if rope is None else change(rope) for kind, rope in ropes.kinds.items()}
    return ropes if kinds == ropes.kinds else replace(ropes, kinds=kinds)


def set_pairing(rope: Rope, pairing: Pairing) -> Rope:
    """The rope in this pairing, for weights whose rows are reordered."""
    return rope if rope.pairing == pairing else replace(rope, pairing=pairing, pairing_out=None)


def main_and_local(ropes: LayerRopes) -> tuple[Rope, Rope | None]:
    """The rope of a model and None, or its two ropes: that of sliding layers comes second."""
    kinds = sorted(rotating(ropes).items(), key=lambda item: "sliding" in item[0])
    first, *other_ropes = dict.fromkeys(rope for _, rope in kinds)
    return first, other_ropes[0] if other_ropes else None


def layers_with(ropes: LayerRopes, rope: Rope | None) -> LayerPattern:
    """The layers that have this rope, or none."""
    kinds = {kind for kind, kind_rope in ropes.kinds.items() if kind_rope == rope}
    return LayerPattern(tuple(kind in kinds for kind in ropes.layer_kinds))


def is_latent(ropes: LayerRopes, rope: Rope) -> bool:
    """Whether the rope fits latent attention as in DeepSeek: one rotated key for all heads."""
    whole_head = rope.rotary_dim == rope.head_dim and isinstance(rope.axes, OneAxis)
    return rope.pairing == "interleaved" and whole_head and ropes.num_kv_heads == 1


def model_family(ropes: LayerRopes) -> str:
    """The model's type, or the name of its preset."""
    return ropes.in_config.values.get("model_type", ropes.name)


def keyword_lines(names: Iterable[str]) -> str:
    """The lines of a call whose keyword arguments are variables of the same names."""
    return "".join(f"    {name}={name},\n" for name in names)


#: The imports of code that computes cos and sin from the coordinates of tokens.
ROWS_IMPORTS = "import torch\nfrom phasor.angles import cos_sin\n"


def angles_code(x: str, *, interleaved: bool) -> str:
    """The float32 angle of each coordinate, ``[seq, rotary_dim]``, on the device of ``x``."""
    repeat = "repeat_interleave(2, dim=1)" if interleaved else "repeat(1, 2)"
    return (
        "torch.tensor(\n    np.arctan2(*cos_sin(positions, rope)[::-1]), "
        f"dtype=torch.float32, device={x}.device\n).{repeat}"
    )


def base_and_divisors(rope: Rope, largest: float = 1e30) -> tuple[float, NDArray[np.float64]]:
    """A base, and the divisors of its powers; negative for pairs that turn clockwise.

    The divisor of a pair that does not turn is ``largest``. By default that is the number that
    converters write, because some devices cannot handle infinity.
    """
    base = rope.base or 10_000.0
    plain = with_frequencies(rope, base=base, inv_freq_dtype="exact")
    with np.errstate(divide="ignore", over="ignore"):
        divisors = rope.direction * plain.inv_freq / rope.inv_freq
    return base, np.clip(divisors, -largest, largest)  # programs store them in float32


def first_length(gain: float, length: int) -> float:
    """The length before the extension, for programs that read LongRoPE.

    From it and ``length`` they compute the factor on cos and sin, which is 1 or more.
    """
    original = length if gain == 1 else length ** (1 / gain**2)
    whole = round(original)  # a factor that was computed from a whole length has a rounding error
    return whole if math.isclose(original, whole, rel_tol=1e-12) else original


def linear_factor(rope: Rope) -> float | None:
    """The one divisor of all of the base's powers; None if there is no such divisor."""
    law = rope.scaling
    if rope.base is None or rope.direction < 0 or not isinstance(law, (Linear, type(None))):
        return None
    return 1.0 if law is None else law.factor


def yarn_ramp(rope: Rope) -> tuple[int, int] | None:
    """The whole pairs at which YaRN's ramp begins and ends; None for other laws and ramps.

    Also None in heads so narrow that it would end before it begins: there programs differ.
    """
    law, base = rope.scaling, rope.base
    if not isinstance(law, Yarn) or not law.truncate or base is None:
        return None
    begin, end = (
        rope.num_pairs
        * math.log(law.original_max_positions / (2 * math.pi * turns))
        / math.log(base)
        for turns in (law.beta_fast, law.beta_slow)
    )
    ramp = max(math.floor(begin), 0), min(math.ceil(end), rope.rotary_dim - 1)
    return ramp if ramp[0] <= ramp[1] else None


def mscales(law: Yarn) -> Keys:
    """``mscale`` and ``mscale_all_dim`` that give the law's factors without ``attention_factor``.

    Programs compute the factor on cos and sin as `yarn_multiplier` of ``mscale`` over that of
    ``mscale_all_dim``; for a ``factor`` of at most 1 both are 1.
    """
    mscale = law.mscale
    if law.attention_factor is not None and law.factor > 1:
        multiplier = law.attention_factor * yarn_multiplier(law.factor, law.mscale_all_dim)
        mscale = (multiplier - 1) / (yarn_multiplier(law.factor, 1.0) - 1)
    return {"mscale": mscale, "mscale_all_dim": law.mscale_all_dim}


@in_reals
def simplify_law(rope: Rope) -> Rope:
    """The same rotation without a law or with `Linear`, if possible."""
    law = rope.scaling
    is_kept = isinstance(law, (Linear, Rule)) and law != Linear(factor=1.0)
    if law is None or is_kept or rope.logit_factor != 1:
        return rope
    plain, scaled = real_inv_freq(replace(rope, scaling=None)), real_inv_freq(rope)
    ratio = plain[0] / scaled[0] if scaled[0] else Decimal(0)
    pairs = reversed([*zip(plain, scaled, strict=True)])  # most laws scale the slow pairs
    # equal except for rounding in 60 digits
    if any(abs(f - s * ratio) > f * Decimal("1e-40") for f, s in pairs):
        return rope
    return replace(rope, scaling=None if ratio == 1 else Linear(factor=float(ratio)))


def ntk_as_base(rope: Rope) -> Rope:
    """The rope with a raised base instead of an NTK law, if that base is above 1."""
    law = rope.scaling
    with suppress(SpecError):
        if isinstance(law, (NTK, NTKOld, NTKFixed)):
            assert rope.base is not None, "a law scales the powers of a base"
            if isinstance(law, NTK):
                return replace(rope, base=law.raised_base(rope.base, rope.num_pairs), scaling=None)
            # NTKFixed divides all pairs once more, by the divisor of its fastest pair
            rest = Linear(factor=law.factor ** (1 / rope.num_pairs))
            scaling = rest if isinstance(law, NTKFixed) else None
            return replace(rope, base=rope.base * law.factor, scaling=scaling)
    return rope


def plain_candidates(rope: Rope) -> list[Rope]:
    """Ropes near ``rope`` with a base and at most a linear law, which most programs can express.

    They are ``rope`` without its law; with the base that fits the scaled frequencies best; and with
    such a base and a linear law that makes the fastest pair exact. For YaRN with a ramp between
    fractional pairs, also the same with whole pairs.
    """
    scaled = rope.inv_freq
    plain = with_frequencies(rope, base=rope.base)
    fastest = float(scaled.max())
    candidates = [plain, replace(plain, base=_nearest_base(scaled))]
    if isinstance(rope.scaling, Yarn) and not rope.scaling.truncate:
        candidates.append(replace(rope, scaling=replace(rope.scaling, truncate=True)))
    if fastest > sys.float_info.min and fastest != 1:
        divided = Linear(factor=1 / fastest)
        candidates.append(replace(plain, base=_nearest_base(scaled / fastest), scaling=divided))
    return candidates


def drop_axes(rope: Rope) -> Rope:
    """The rope with one axis, which turns alike at positions with equal coordinates."""
    return replace(with_listed_frequencies(rope), axes=OneAxis())


def round_base(rope: Rope) -> Rope:
    """The rope with one axis and its base rounded to a whole number."""
    return replace(rope, axes=OneAxis(), base=whole_base(rope))


def whole_base(rope: Rope) -> float:
    """The whole number nearest to the rope's base."""
    return float(max(2, round(rope.base or 2)))


def _nearest_base(inv_freq: NDArray[np.float64]) -> float:
    """The base whose frequencies differ least from these, judged by the worst pair."""
    exponents = -np.arange(len(inv_freq)) / len(inv_freq)
    low, high = 0.01, 60.0
    for _ in range(6):  # each step leaves a hundredth of the interval
        grid = np.linspace(low, high, 201)
        best = int(np.argmin(np.abs(np.exp(grid[:, None] * exponents) - inv_freq).max(axis=1)))
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 200)])
    return math.exp((low + high) / 2)
