"""`Rope`: what it accepts, what it refuses and in which words, and its JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from phasor import Rope, SpecError
from phasor.axes import AXES, Axes, OneAxis, Sectioned
from phasor.scaling import LAWS, NTK, DynamicNTK, Law, Linear, LongRope, PerPair

from . import strategies

PLAIN: dict[str, Any] = {"head_dim": 8, "pairing": "half"}
RULE = DynamicNTK(factor=2.0, original_max_positions=64)


def test_the_output_follows_the_pairing_unless_told_otherwise() -> None:
    """Replacing the pairing of a plain rope replaces it on both sides."""
    rope = dataclasses.replace(Rope(head_dim=8, pairing="half"), pairing="interleaved")
    assert rope == Rope(head_dim=8, pairing="interleaved", pairing_out="interleaved")
    assert rope.output_pairing == "interleaved"


def test_zero_is_one_number() -> None:
    """A negative zero is the same frequency, equal and of equal hash."""
    plus, minus = (
        Rope(head_dim=4, pairing="half", explicit_inv_freq=(1.0, z)) for z in (0.0, -0.0)
    )
    assert plus == minus
    assert hash(plus) == hash(minus)


def test_what_is_not_said_is_resolved() -> None:
    """A reader finds a value in every field: base, width, output pairing and axes."""
    rope = Rope(head_dim=8, pairing="interleaved")
    assert (rope.base, rope.rotary_dim, rope.rotary_start) == (10_000.0, 8, 0)
    assert (rope.output_pairing, rope.axes, rope.direction) == ("interleaved", OneAxis(), 1)
    assert (rope.scaling, rope.explicit_inv_freq, rope.inv_freq_dtype) == (None, None, "exact")
    assert rope.num_pairs == 4
    assert Rope(head_dim=8, pairing="half", rotary_dim=6).num_pairs == 3


def test_saying_a_default_is_the_same_as_not_saying_it() -> None:
    """Equal, of equal hash and equal text."""
    said = Rope(**PLAIN, base=10_000, rotary_dim=8, pairing_out="half", axes=OneAxis(), direction=1)
    assert said == Rope(**PLAIN)
    assert hash(said) == hash(Rope(**PLAIN))
    assert said.to_json() == Rope(**PLAIN).to_json()


def test_numbers_of_any_kind_make_the_same_rope() -> None:
    """NumPy scalars and ints become plain ints and floats."""
    rope = Rope(head_dim=np.int64(8), pairing="half", base=np.float32(500), rotary_dim=np.uint8(4))
    assert rope == Rope(head_dim=8, pairing="half", base=500.0, rotary_dim=4)
    assert [type(v) for v in (rope.head_dim, rope.base, rope.rotary_dim)] == [int, float, int]


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 10, "rotary_dim": 8},
        {"pairing": "interleaved"},
        {"base": 10_001.0},
        {"rotary_dim": 6},
        {"rotary_dim": 6, "rotary_start": 1},
        {"scaling": Linear(factor=2.0)},
        {"axes": Sectioned((2, 2))},
        {"direction": -1},
        {"pairing_out": "interleaved"},
        {"explicit_inv_freq": (1.0, 0.1, 0.01, 0.001)},
        {"inv_freq_dtype": "float32"},
    ],
    ids=lambda change: "-".join(change),
)
def test_every_field_tells_ropes_apart(change: dict[str, Any]) -> None:
    """Two ropes that differ in one field are not equal, nor is their text."""
    other = Rope(**PLAIN | change)
    assert other != Rope(**PLAIN)
    assert other.to_json() != Rope(**PLAIN).to_json()


PAIRINGS = "must be 'half' or 'interleaved', got"
SLICE = "rotary_start + rotary_dim must be at most head_dim (8), got"
LAW = "scaling must be a law or a rule of phasor.scaling (such as Linear(factor=2.0)), got"
FREE = {"explicit_inv_freq": (1,) * 4}
INSTEAD = "explicit_inv_freq replaces base and scaling"
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 1}, "head_dim must be a whole number from 2 to 65536, got 1"),
    ({"head_dim": 8.0}, "head_dim must be a whole number from 2 to 65536, got 8.0"),
    ({"head_dim": True}, "head_dim must be a whole number from 2 to 65536, got True"),
    ({"head_dim": 7}, "rotary_dim must be even, got 7"),
    ({"pairing": "neox"}, f"pairing {PAIRINGS} 'neox', which is 'half'"),
    ({"pairing": None}, f"pairing {PAIRINGS} None"),
    ({"pairing_out": "Half"}, f"pairing_out {PAIRINGS} 'Half'"),
    ({"base": 1.0}, "base must be a finite number > 1, got 1.0"),
    ({"base": -2}, "base must be a finite number > 1, got -2"),
    ({"base": math.nan}, "base must be a finite number > 1, got nan"),
    ({"base": math.inf}, "base must be a finite number > 1, got inf"),
    ({"base": "10000"}, "base must be a finite number > 1, got '10000'"),
    ({"rotary_dim": 0}, "rotary_dim must be a whole number >= 2, got 0"),
    ({"rotary_dim": 5}, "rotary_dim must be even, got 5"),
    ({"rotary_dim": 10}, f"{SLICE} 0 + 10; give a smaller rotary_dim"),
    ({"rotary_start": 2}, f"{SLICE} 2 + 8; give a smaller rotary_dim"),
    ({"rotary_start": -1}, "rotary_start must be a whole number >= 0, got -1"),
    ({"scaling": "linear"}, f"{LAW} 'linear'"),
    ({"scaling": Linear}, f"{LAW} <class 'phasor.scaling.laws.Linear'>"),
    (
        {"axes": (2, 2)},
        "axes must be one of phasor.axes, such as phasor.axes.Axial((16, 16)) where a head has 32 "
        "pairs, got (2, 2)",
    ),
    (
        {"axes": Sectioned((2, 3))},
        "sections [2, 3] must add up to the number of pairs (rotary_dim / 2 = 4), got 5",
    ),
    ({"direction": 0}, "direction must be one of 1, -1, got 0"),
    ({"direction": True}, "direction must be one of 1, -1, got True"),
    (
        {"inv_freq_dtype": "bfloat16"},
        "inv_freq_dtype must be one of 'exact', 'float32', got 'bfloat16'",
    ),
    (
        {"explicit_inv_freq": (1.0, 0.5)},
        "explicit_inv_freq must hold one number per pair (rotary_dim / 2 = 4), got 2",
    ),
    (
        {"explicit_inv_freq": (1, 1, 1, -1)},
        "explicit_inv_freq[3] must be a finite number >= 0, got -1",
    ),
    ({"explicit_inv_freq": 1.0}, "explicit_inv_freq must be a sequence of numbers, got 1.0"),
    (FREE | {"base": 1e4}, f"{INSTEAD}; drop base or explicit_inv_freq"),
    (FREE | {"scaling": RULE}, f"{INSTEAD}; drop scaling or explicit_inv_freq"),
]


@pytest.mark.parametrize(("change", "text"), REFUSALS, ids=lambda v: str(v)[:40])
def test_a_field_that_means_nothing_is_refused(change: dict[str, Any], text: str) -> None:
    """With the field, what was expected and what came."""
    with pytest.raises(SpecError) as caught:
        Rope(**PLAIN | change)
    assert str(caught.value) == text


def test_explicit_frequencies_replace_base_and_scaling() -> None:
    """No base is left to read, and the frequencies are the given floats."""
    rope = Rope(**PLAIN, explicit_inv_freq=[1, 0.5, 0.25, 0])
    assert (rope.base, rope.scaling, rope.explicit_inv_freq) == (None, None, (1.0, 0.5, 0.25, 0.0))
    assert rope.inv_freq.tolist() == [1.0, 0.5, 0.25, 0.0]
    assert rope.attention_factor == 1.0


def test_a_rope_is_frozen() -> None:
    """A key of caches must not change."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rope(**PLAIN).base = 2.0  # type: ignore[misc]


@given(strategies.ropes())
def test_json_is_an_exact_round_trip(rope: Rope) -> None:
    """Text and back is the same Rope, to the last bit of every float."""
    again = Rope.from_json(rope.to_json())
    assert again == rope
    assert hash(again) == hash(rope)
    assert again.to_json() == rope.to_json()
    assert Rope.from_dict(rope.to_dict()) == rope
    assert json.loads(rope.to_json()) == {"format": 1} | json.loads(json.dumps(rope.to_dict()))


@given(strategies.descriptions(), strategies.descriptions())
def test_ropes_are_equal_exactly_when_their_text_is(one: Any, other: Any) -> None:
    """So the text can stand for the Rope in an operator's schema."""
    left, right = Rope(**one), Rope(**other)
    assert (left == right) == (left.to_json() == right.to_json())
    assert left == Rope(**one)
    assert len({left, Rope(**one)}) == 1


@given(strategies.ropes())
def test_a_rope_survives_pickling(rope: Rope) -> None:
    """Workers of a data loader get the same value."""
    again = pickle.loads(pickle.dumps(rope))
    assert again == rope
    assert again.to_json() == rope.to_json()


def test_the_json_form_is_what_it_is() -> None:
    """Stored files must stay readable, so the text itself is fixed here."""
    rope = Rope(**PLAIN, axes=Sectioned((2, 2)), scaling=PerPair(factors=(1, 2, 3, 4)))
    assert rope.to_dict() == {
        "head_dim": 8,
        "pairing": "half",
        "base": 10000.0,
        "rotary_dim": 8,
        "rotary_start": 0,
        "scaling": {"law": "per_pair", "factors": [1.0, 2.0, 3.0, 4.0], "attention_factor": 1.0},
        "axes": {"layout": "sectioned", "sections": [2, 2]},
        "direction": 1,
        "pairing_out": None,
        "explicit_inv_freq": None,
        "inv_freq_dtype": "exact",
    }
    assert Rope.from_dict({"head_dim": 8, "pairing": "half"}) == Rope(**PLAIN)


ALL = ", ".join(sorted(field.name for field in dataclasses.fields(Rope)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"width": 1, "a": 2}, f"Rope has no field 'a', 'width'; known: {ALL}"),
        ({"scaling": {"factor": 2.0}},
         "scaling must be an object with the key \"law\", got {'factor': 2.0}"),
        ({"scaling": "ntk"}, "scaling must be an object with the key \"law\", got 'ntk'"),
        ({"axes": [2, 2]}, 'axes must be an object with the key "layout", got [2, 2]'),
        ({"scaling": {"law": "su"}},
         f"scaling.law must be one of {', '.join(map(repr, LAWS))}, got 'su'"),
        ({"axes": {"layout": "2d"}},
         f"axes.layout must be one of {', '.join(map(repr, AXES))}, got '2d'"),
        ({"scaling": {"law": "linear", "factor": 2.0, "alpha": 1}},
         "scaling 'linear' has no field 'alpha'; known: factor"),
        ({"scaling": {"law": "yarn"}}, "scaling 'yarn' lacks factor, original_max_positions"),
        ({"scaling": {"law": "linear", "factor": 0}},
         "factor must be a finite number > 0, got 0"),
        ({"pairing": None}, f"pairing {PAIRINGS} None"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_description_that_means_nothing_is_refused(change: dict[str, Any], text: str) -> None:
    """Unknown keys are never dropped, and lists of what is known help."""
    with pytest.raises(SpecError) as caught:
        Rope.from_dict(PLAIN | change)
    assert str(caught.value) == text


@pytest.mark.parametrize("missing", ["head_dim", "pairing"])
def test_a_description_must_say_width_and_pairing(missing: str) -> None:
    """The two fields without a default."""
    plain = {key: value for key, value in PLAIN.items() if key != missing}
    with pytest.raises(SpecError, match=f"^{missing} must be given: "):
        Rope.from_dict(plain)
    with pytest.raises(SpecError, match=r"^head_dim must be given: "):
        Rope.from_dict({})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"^text must be JSON as Rope\.to_json writes it: Expecting "),
        ("[" * 100_000, r"^text must be JSON as Rope\.to_json writes it: "),
        ("[1]", r"^text must be a JSON object, got '\[1\]'$"),
        ("null", r"^text must be a JSON object, got 'null'$"),
        ('{"format": 1, "head_dim": NaN, "pairing": "half"}', "^head_dim must be .*, got nan"),
        (
            '{"head_dim": 8, "pairing": "half", "inv_freq": null}',
            "^text must be a Rope as phasor's JSON in format 1, got none; write it again ",
        ),
        ('{"format": 2}', "^text must be a Rope as phasor's JSON in format 1, got format 2; "),
    ],
    ids=["broken", "deep", "list", "null", "nan", "without", "later"],
)
def test_text_that_is_no_rope_is_refused(text: str, message: str) -> None:
    """Always a SpecError, whatever the text."""
    with pytest.raises(SpecError, match=message):
        Rope.from_json(text)


def test_a_law_of_somebody_else_has_no_json() -> None:
    """And hence no Rope, since its text is its identity."""

    class Halved(Law):
        def apply(self, plain: Any, base: Any) -> Any:
            return tuple(f / 2 for f in plain)

    class Backwards(OneAxis):
        pass

    with pytest.raises(SpecError, match=r"^Halved is not a law of phasor and has no JSON form; "):
        Rope(**PLAIN, scaling=Halved())
    with pytest.raises(SpecError, match=r"^Backwards is not a layout of phasor and has no JSON "):
        Rope(**PLAIN, axes=Backwards())
    assert issubclass(Backwards, Axes)


@pytest.mark.parametrize("ask", ["attention_factor", "softmax_factor", "logit_factor", "law"])
def test_a_rule_must_pick_its_law_first(ask: str) -> None:
    """The message names the rule and the way out."""
    rope = Rope(**PLAIN, scaling=RULE)
    with pytest.raises(SpecError) as caught:
        getattr(rope, ask)() if ask == "law" else getattr(rope, ask)
    assert str(caught.value) == (
        "scaling is the rule DynamicNTK, whose law depends on the length of the sequence; "
        "use rope.at(seq_len)"
    )


def test_at_a_length_only_the_scaling_changes() -> None:
    """Everything else that the Rope says stays said, and nothing is remembered."""
    rope = Rope(head_dim=10, pairing="interleaved", pairing_out="half", rotary_dim=8, base=500.0,
                rotary_start=1, direction=-1, inv_freq_dtype="float32", scaling=RULE)  # fmt: skip
    assert rope.at(128) == dataclasses.replace(rope, scaling=NTK(factor=3.0))
    assert rope.at(64) == dataclasses.replace(rope, scaling=NTK(factor=1.0))
    assert rope.scaling == RULE


def test_at_leaves_a_law_alone_and_still_checks_the_length() -> None:
    """A static law is right at every length; a length of 0 is still none."""
    rope = Rope(**PLAIN, scaling=Linear(factor=2.0))
    assert rope.at(10**9) is rope
    with pytest.raises(SpecError, match=r"^seq_len must be a whole number >= 1, got 0$"):
        rope.at(0)


def test_frequencies_of_ones_own_have_a_name_of_their_own() -> None:
    """What a Rope's frequencies are is read, not given."""
    way_out = "pass frequencies of your own as explicit_inv_freq"
    with pytest.raises(SpecError, match=way_out):
        Rope(**PLAIN, inv_freq=(1.0, 0.5, 0.25, 0.0))
    with pytest.raises(SpecError, match=way_out):
        Rope.from_dict(PLAIN | {"inv_freq": [1.0, 0.5, 0.25, 0.0]})


def test_the_frequencies_are_read_only() -> None:
    """All readers of a rope have one array."""
    with pytest.raises(ValueError, match="read-only"):
        Rope(**PLAIN).inv_freq[0] = 2.0


def test_a_rope_without_its_pairing_says_what_the_two_are() -> None:
    """A wrong guess would raise nothing and spoil every score; so it is never defaulted."""
    with pytest.raises(SpecError, match=r'^pairing must be given: "half" \(.*"interleaved"'):
        Rope(head_dim=64)
    with pytest.raises(SpecError, match=r"^head_dim must be given"):
        Rope(pairing="half")
    with pytest.raises(SpecError, match=r"keyword arguments only.*got 64 without a name"):
        Rope(64, pairing="half")


def test_a_list_of_divisors_that_is_missing_says_where_they_come_from() -> None:
    """LongRoPE's are searched for and published; a factor alone is another law's."""
    with pytest.raises(
        SpecError, match=r"^short_factors and long_factors must be given.*phasor\.load"
    ):
        LongRope(factor=4.0, original_max_positions=4096)
