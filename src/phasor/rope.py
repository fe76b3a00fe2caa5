"""`Rope`: the complete description of a rotary position embedding."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from phasor._checks import choice, number, numbers, short_repr, whole
from phasor._plain import (
    axes_from_plain,
    axes_to_plain,
    canonical_json,
    check_registered,
    law_from_plain,
    law_to_plain,
    refuse_unknown_fields,
    to_plain,
)
from phasor._reals import in_reals, nearest_float32, powers
from phasor.axes import Axes, Mixed, OneAxis
from phasor.errors import SpecError
from phasor.pairings import Pairing, checked_pairing
from phasor.scaling import Law, PerPair, Rule, Temperature

FORMAT = 1  # the format number that `Rope.to_json` writes; raise it when the fields change
WIDEST = 1 << 16  # upper limit on head_dim, far above any model's: a larger value is a mistake
# default of fields that __post_init__ fills; typed Any, so that field types need no None
_DEFAULT: Any = None
# upper limit on a frequency: enough of its 60 digits must follow the point for 128 bits of a turn
_LARGEST_INV_FREQ = Decimal(10) ** 15
_REQUIRED_FIELDS = {
    "head_dim": "the width of one attention head",
    "pairing": '"half" (GPT-NeoX, Llama in transformers) or "interleaved" (GPT-J, Meta\'s Llama); '
    "phasor.identify says which one a function has",
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """A rotary position embedding: position ``p`` becomes the rotation ``R(p)``.

    ``R(p)`` turns pair ``k`` of a head's coordinates by ``p * inv_freq[k]`` radians,
    counter-clockwise: ``y0 = x0 cos - x1 sin``, ``y1 = x0 sin + x1 cos`` (Su et al. 2104.09864,
    eq. 34), with ``inv_freq[k] = base ** (-2k / rotary_dim)`` before scaling, ``k`` from 0.

    * ``R(0)`` is the identity;
    * ``R(m) R(n) = R(m + n)``, so a score depends on ``n - m`` only;
    * the transpose of ``R(p)`` is ``R(-p)``, so the backward pass is the inverse rotation.

    A Rope is frozen and hashable; Ropes with equal fields are equal.

    Args:
        head_dim: Width of one attention head.
        pairing: Which coordinates turn together: ``"half"`` is ``(i, i + rotary_dim/2)`` (GPT-NeoX,
            Llama in transformers), ``"interleaved"`` is ``(2i, 2i + 1)`` (RoFormer, GPT-J, Meta's
            Llama). Never defaulted: a wrong guess raises nothing and spoils every score.
        base: The frequencies are negative powers of it; 10000 by default, unless the axes have
            bases of their own.
        rotary_dim: Number of rotated coordinates, even; ``head_dim`` by default.
        rotary_start: Where the rotated slice begins inside the head.
        scaling: A law or a rule of `phasor.scaling`.
        axes: One of `phasor.axes`; a single axis by default. Each axis may have its own base and
            law: ``Axial((8, 28, 28), scaling=(None, NTK(factor=2.0), NTK(factor=2.0)))``.
        direction: -1 for the few models that turn clockwise.
        pairing_out: Pairing of the result where it differs (DeepSeek reads interleaved pairs and
            writes halves); None where it is ``pairing``. `output_pairing` resolves the None.
        inv_freq_dtype: ``"exact"`` uses the real numbers of the formula; ``"float32"`` rounds each
            frequency to float32 and computes angles exactly from that, for models whose code
            keeps float32 frequencies.
        explicit_inv_freq: Frequencies in radians per position, one per pair, instead of base and
            scaling. The floats are taken as exact. To read frequencies use `inv_freq`.

    Raises:
        SpecError: Naming the field, what was expected and what came.

    >>> rope = Rope(head_dim=128, pairing="half", base=500_000.0)
    >>> rope.num_pairs
    64
    >>> Rope.from_json(rope.to_json()) == rope
    True
    """

    head_dim: int
    pairing: Pairing
    base: float | None = None
    rotary_dim: int = _DEFAULT
    rotary_start: int = 0
    scaling: Law | Rule | None = None
    axes: Axes = _DEFAULT
    direction: Literal[1, -1] = 1
    pairing_out: Pairing | None = None
    inv_freq_dtype: Literal["exact", "float32"] = "exact"
    explicit_inv_freq: tuple[float, ...] | None = None

    if not TYPE_CHECKING:  # type checkers keep the dataclass's signature

        def __new__(cls, *unnamed: object, **fields: object) -> Rope:
            """Tell the user what to write where Python would raise a bare TypeError."""
            if unnamed:
                raise SpecError(
                    "a Rope takes keyword arguments only, such as "
                    'Rope(head_dim=128, pairing="half"), '
                    f"got {short_repr(unnamed[0])} without a name"
                )
            if fields:  # copy and pickle pass no arguments
                _check_names(fields)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        def set_field(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        set_field("head_dim", whole("head_dim", self.head_dim, least=2, most=WIDEST))
        set_field("pairing", checked_pairing("pairing", self.pairing))
        if self.pairing_out is not None:
            checked_pairing("pairing_out", self.pairing_out)
            if self.pairing_out == self.pairing:
                set_field("pairing_out", None)  # so that equal ropes compare equal
        set_field("direction", choice("direction", self.direction, (1, -1)))
        choice("inv_freq_dtype", self.inv_freq_dtype, ("exact", "float32"))
        self._check_slice(set_field)
        if cast(object, self.axes) is None:
            set_field("axes", OneAxis())
        if not isinstance(cast(object, self.axes), Axes):
            raise SpecError(
                "axes must be one of phasor.axes, such as phasor.axes.Axial((16, 16)) where "
                f"a head has 32 pairs, got {short_repr(self.axes)}"
            )
        self.axes.indices(self.num_pairs)
        self._check_frequencies(set_field)
        # other classes have no JSON, which the operators need; it is written when it is asked for
        check_registered(self.axes, self.scaling, *(values_by_axis(self.axes, "scaling") or ()))

    def _check_slice(self, set_field: Any) -> None:
        set_field("rotary_start", whole("rotary_start", self.rotary_start, least=0))
        rotary_dim = cast(object, self.rotary_dim)
        width = self.head_dim if rotary_dim is None else whole("rotary_dim", rotary_dim, least=2)
        set_field("rotary_dim", width)
        if width % 2:
            raise SpecError(f"rotary_dim must be even, got {width}")
        if self.rotary_start + width > self.head_dim:
            raise SpecError(
                f"rotary_start + rotary_dim must be at most head_dim ({self.head_dim}), "
                f"got {self.rotary_start} + {width}; give a smaller rotary_dim"
            )

    def _check_frequencies(self, set_field: Any) -> None:
        if isinstance(self.axes, Mixed):
            for name in ("base", "scaling", "explicit_inv_freq"):
                if getattr(self, name) is not None:
                    raise SpecError(f"axes.Mixed holds the frequencies: drop {name}")
            return
        self._check_fields_of_axes(set_field)
        for name in ("base", "scaling"):
            if isinstance(value := getattr(self, name), (tuple, list)):
                raise SpecError(
                    f"{name} of a Rope is for all axes, got {short_repr(cast(object, value))}; "
                    f"give one for each axis to the axes: phasor.axes.Axial(sections, {name}=...)"
                )
        if self.explicit_inv_freq is None:
            if self.base is not None:
                set_field("base", number("base", self.base, above=1))
            elif values_by_axis(self.axes, "base") is None:
                set_field("base", 10_000.0)
            is_config = isinstance(cast(object, self.scaling), Mapping)
            if self.scaling is not None and not isinstance(cast(object, self.scaling), (Law, Rule)):
                raise SpecError(
                    "scaling must be a law or a rule of phasor.scaling (such as "
                    f"Linear(factor=2.0)), got {short_repr(self.scaling)}"
                    f"{'; phasor.load reads a config with that' if is_config else ''}"
                )
            return
        if self.base is not None or self.scaling is not None:
            field = "base" if self.base is not None else "scaling"
            raise SpecError(
                f"explicit_inv_freq replaces base and scaling; drop {field} or explicit_inv_freq"
            )
        inv_freq = numbers("explicit_inv_freq", self.explicit_inv_freq, least=0)
        if len(inv_freq) != self.num_pairs:
            raise SpecError(
                "explicit_inv_freq must hold one number per pair (rotary_dim / 2 = "
                f"{self.num_pairs}), got {len(inv_freq)}"
            )
        set_field("explicit_inv_freq", inv_freq)

    def _check_fields_of_axes(self, set_field: Any) -> None:
        for name in ("base", "scaling"):
            axis_values = values_by_axis(self.axes, name)
            if axis_values is None:
                continue
            for field_name in (name, "explicit_inv_freq"):
                if getattr(self, field_name) is not None:
                    raise SpecError(
                        f"{name} of the axes replaces the Rope's {field_name}, but both are given: "
                        f"drop one of them; for a Rope that has {field_name} already, "
                        f"dataclasses.replace(rope, {field_name}=None, axes=...)"
                    )
            if len(set(axis_values)) == 1:  # so that equal ropes compare equal
                set_field("axes", dataclasses.replace(cast(Any, self.axes), **{name: None}))
                set_field(name, axis_values[0])

    def __hash__(self) -> int:
        slice_ = self.pairing, self.rotary_dim
        return hash((*slice_, self.base, self.scaling, self.axes, self.explicit_inv_freq))

    @property
    def num_pairs(self) -> int:
        """Pairs of coordinates that turn together, ``rotary_dim / 2``."""
        return self.rotary_dim // 2

    @property
    def inv_freq(self) -> NDArray[np.float64]:
        """The scaled frequency of every pair, in radians per position; read-only ``[num_pairs]``.

        ``base ** (-2k / rotary_dim)`` with ``k`` from 0 (Su et al. 2104.09864, section 3.2.2),
        then the law; computed in 60-digit decimals and rounded once to float64. Never negative:
        `direction` is applied to the angles.

        >>> Rope(head_dim=4, pairing="half", base=100.0).inv_freq
        array([1. , 0.1])
        """
        return _float_inv_freq(self)

    @property
    def output_pairing(self) -> Pairing:
        """Pairing of the result: ``pairing_out``, or ``pairing`` where that is None."""
        return self.pairing if self.pairing_out is None else self.pairing_out

    @property
    def attention_factor(self) -> float:
        """The law's factor on cos and sin (YaRN, LongRoPE); 1 for most laws.

        Rotations of tensors include it; ``gain=1.0`` leaves it out. If ``scaling`` is a rule, call
        `at` first: it picks the law.
        """
        return self._temperature().attention_factor

    @property
    def softmax_factor(self) -> float:
        """The law's factor on the softmax scale, outside cos and sin; 1 for most laws.

        DeepSeek's ``mscale_all_dim`` puts YaRN's temperature there.
        """
        return self._temperature().softmax_factor

    @property
    def logit_factor(self) -> float:
        """The factor on the logits of a fully rotated head.

        The square of `attention_factor`, which is on queries and on keys, times `softmax_factor`.
        """
        return self.attention_factor**2 * self.softmax_factor

    def _temperature(self) -> Temperature:
        law = self.law()
        return Temperature() if law is None else law.temperature()

    def law(self) -> Law | None:
        """The static law that scales the frequencies, if any; a rule is refused."""
        if isinstance(self.scaling, Rule):
            raise SpecError(
                f"scaling is the rule {type(self.scaling).__name__}, whose law depends on the "
                "length of the sequence; use rope.at(seq_len)"
            )
        return self.scaling

    def at(self, seq_len: int) -> Rope:
        """This Rope for sequences of ``seq_len`` tokens: a rule is replaced by the law it picks.

        >>> from phasor.scaling import DynamicNTK
        >>> rule = DynamicNTK(factor=2.0, original_max_positions=4096)
        >>> Rope(head_dim=64, pairing="half", scaling=rule).at(8192).scaling
        NTK(factor=3.0)
        """
        seq_len = whole("seq_len", seq_len, least=1)
        if isinstance(self.scaling, Rule):
            return dataclasses.replace(self, scaling=self.scaling.at(seq_len))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON values; `from_dict` is the inverse."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["scaling"] = law_to_plain(self.scaling)
        plain["axes"] = axes_to_plain(self.axes)
        return to_plain(plain)

    def to_json(self) -> str:
        """Canonical JSON with a format number: equal Ropes have equal text."""
        kept = self.__dict__
        if "_json" not in kept:  # kept, because every call passes it to an operator
            object.__setattr__(self, "_json", canonical_json({"format": FORMAT} | self.to_dict()))
        return cast(str, kept["_json"])

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Rope:
        """The Rope with the fields that `to_dict` returned."""
        _check_names(plain)
        refuse_unknown_fields("Rope", plain, {field.name for field in fields(cls)})
        values = dict(plain)
        if values.get("scaling") is not None:
            values["scaling"] = law_from_plain("scaling", values["scaling"])
        if values.get("axes") is not None:
            values["axes"] = axes_from_plain(values["axes"])
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Rope:
        """The Rope that `to_json` wrote."""
        try:
            plain = json.loads(text)
        except (ValueError, RecursionError, TypeError) as error:
            raise SpecError(f"text must be JSON as Rope.to_json writes it: {error}") from None
        if not isinstance(plain, dict):
            raise SpecError(f"text must be a JSON object, got {text[:80]!r}")
        values = cast(dict[str, Any], plain)
        version = values.pop("format", None)
        if version != FORMAT:
            raise SpecError(
                f"text must be a Rope as phasor's JSON in format {FORMAT}, got "
                f"{'none' if version is None else f'format {short_repr(version)}'}; write it again "
                f"with Rope.to_json, or pass its fields to Rope.from_dict"
            )
        return cls.from_dict(values)


@lru_cache(maxsize=256)
@in_reals
def real_inv_freq(rope: Rope) -> tuple[Decimal, ...]:
    """The scaled frequency of every pair with 60 digits."""
    if isinstance(rope.axes, Mixed):
        pair_terms = zip(*real_terms(rope), strict=True)
        scaled = tuple(
            sum((f * f for f in axis_terms), Decimal()).sqrt() for axis_terms in pair_terms
        )
    elif rope.explicit_inv_freq is not None:
        scaled = tuple(map(Decimal, rope.explicit_inv_freq))
    else:
        scaled = _inv_freq_by_axis(rope)
    if max(scaled) > _LARGEST_INV_FREQ:
        raise SpecError(
            f"frequencies must be at most {_LARGEST_INV_FREQ:.0e} radians per position, got "
            f"{max(scaled):.3e}; check explicit_inv_freq, or the factors of the scaling law"
        )
    if rope.inv_freq_dtype == "float32":
        return tuple(Decimal(float(nearest_float32(f))) for f in scaled)
    return scaled


def real_terms(rope: Rope) -> tuple[tuple[Decimal, ...], ...]:
    """The frequencies of every pair: one row, or with `Mixed` axes one row per axis."""
    if not isinstance(rope.axes, Mixed):
        return (real_inv_freq(rope),)
    rows = rope.axes.inv_freq
    if rope.inv_freq_dtype == "float32":
        rows = [[float(nearest_float32(Decimal(f))) for f in row] for row in rows]
    return tuple(tuple(map(Decimal, row)) for row in rows)


def values_by_axis(axes: Axes, name: str) -> tuple[Any, ...] | None:
    """What the axes give instead of the Rope's ``base`` or ``scaling``: an entry for each axis."""
    return getattr(axes, name, None)


def base_of_axis(rope: Rope, axis: int) -> float | None:
    """The base of one axis: its own or the Rope's; None if frequencies are explicit."""
    bases = values_by_axis(rope.axes, "base")
    return rope.base if bases is None else bases[axis]


def law_of_axis(rope: Rope, axis: int) -> Law | None:
    """The law that scales the frequencies of one axis: its own or the Rope's."""
    laws = values_by_axis(rope.axes, "scaling")
    return rope.law() if laws is None else laws[axis]


def plain_axes(axes: Axes) -> Axes:
    """The axes without a base and a law of their own."""
    if values_by_axis(axes, "base") is None and values_by_axis(axes, "scaling") is None:
        return axes
    return dataclasses.replace(cast(Any, axes), base=None, scaling=None)


def with_frequencies(rope: Rope, **fields: Any) -> Rope:
    """The rope with only these of ``base``, ``scaling`` and ``explicit_inv_freq``, for all axes."""
    fields = {"base": None, "scaling": None, "explicit_inv_freq": None} | fields
    return dataclasses.replace(rope, axes=plain_axes(rope.axes), **fields)


def with_listed_frequencies(rope: Rope) -> Rope:
    """The rope with listed frequencies if its axes have a base or a law of their own."""
    if plain_axes(rope.axes) == rope.axes:
        return rope
    return with_frequencies(rope, explicit_inv_freq=tuple(rope.inv_freq.tolist()))


def _inv_freq_by_axis(rope: Rope) -> tuple[Decimal, ...]:
    """Each axis's steps of the powers of its base, scaled by its law."""
    pair_inv_freq = dict[int, Decimal]()
    for axis in range(rope.axes.n_axes):
        length, steps = rope.axes.ladder(axis, rope.num_pairs)
        if not steps:
            continue
        law = law_of_axis(rope, axis)
        try:
            ladder = _spectrum(base_of_axis(rope, axis) or 0.0, law, length)
        except SpecError as error:
            if values_by_axis(rope.axes, "scaling") is None:
                raise
            raise SpecError(f"scaling[{axis}] of the axes: {error}") from None
        pair_inv_freq |= {pair: ladder[step] for pair, step in steps.items()}
    return tuple(pair_inv_freq[pair] for pair in range(rope.num_pairs))


def with_inv_freq(rope: Rope, inv_freq: Sequence[float]) -> Rope:
    """The rope with other frequencies, one for each pair, and its attention factor."""
    if rope.attention_factor == 1:
        return with_frequencies(rope, explicit_inv_freq=tuple(inv_freq))
    # only a law has an attention factor
    factors = dataclasses.replace(rope, scaling=None).inv_freq / np.asarray(inv_freq)
    law = PerPair(factors=tuple(factors.tolist()), attention_factor=rope.attention_factor)
    return dataclasses.replace(rope, scaling=law)


@lru_cache(maxsize=64)
@in_reals
def _spectrum(base: float, law: Law | None, pairs: int) -> tuple[Decimal, ...]:
    """``base ** (-k / pairs)`` for each of the pairs, scaled by a law."""
    if law is None:
        return powers(Decimal(base), -1 / Decimal(pairs), pairs)
    return law.apply(_spectrum(base, None, pairs), Decimal(base))


@lru_cache(maxsize=256)
def _float_inv_freq(rope: Rope) -> NDArray[np.float64]:
    rounded = np.array([float(f) for f in real_inv_freq(rope)])
    rounded.flags.writeable = False  # cached, so all callers share it
    return rounded


#: Names that other programs have for fields of a Rope, and what to write instead.
_OTHER_NAMES = {
    **dict.fromkeys(("theta", "rope_theta", "rotary_emb_base", "freq_base"), "base=..."),
    **dict.fromkeys(("dim", "d_head", "head_size", "d_k"), "head_dim=..."),
    **dict.fromkeys(
        ("partial_rotary_factor", "rotary_pct", "rotary_percent"),
        "rotary_dim=..., the number of rotated coordinates",
    ),
    **dict.fromkeys(
        ("max_seq_len", "max_position_embeddings", "max_positions", "max_seq_length"),
        "nothing: a Rope has no largest position",
    ),
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters"), "scaling=..., a law such as phasor.scaling.Linear"
    ),
    **dict.fromkeys(("interleaved", "is_neox_style"), 'pairing="half" or "interleaved"'),
}


def _check_names(arguments: Mapping[str, object]) -> None:
    for name in arguments:
        if name in _OTHER_NAMES:
            raise SpecError(f"a Rope has no field {name!r}; write {_OTHER_NAMES[name]}")
    if "inv_freq" in arguments:
        raise SpecError(
            "inv_freq is computed by the Rope; pass frequencies of your own as explicit_inv_freq"
        )
    for name, hint in _REQUIRED_FIELDS.items():
        if name not in arguments:
            raise SpecError(f"{name} must be given: {hint}")
