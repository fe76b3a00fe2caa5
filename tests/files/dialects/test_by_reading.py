"""Settings are the first that a program's reader takes, and a refusal names what it lacks.

The program here is a toy: it turns whole heads by a whole base, halves alone, and by no law but a
whole number that divides positions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from phasor import ConfigError, LayerRopes, PhasorWarning, Rope
from phasor.axes import InterleavedSections
from phasor.files.configs.source import JsonObject
from phasor.files.dialects.by_reading import (
    Dialect,
    FaultError,
    find_settings,
    settings_by_rope,
    settings_for_rope,
    settings_or_refusal,
)
from phasor.files.dialects.target import Keys, Target, TranslationError
from phasor.layers import one_layer
from phasor.scaling import DynamicNTK, Linear, LongRope, PerPair, Yarn

from ..refusals import refused

CONTEXT = 4096
PLAIN = Rope(head_dim=8, pairing="half", base=500.0)
TOY = Target(name="toy", program="a toy", source="here", checked="description")


def read(file: JsonObject) -> LayerRopes:
    """What the toy makes of its file."""
    base, by = (file.require(key, file.whole(key)) for key in ("base", "by"))
    rope = Rope(head_dim=8, pairing="half", base=float(base), scaling=Linear(factor=float(by)))
    kinds = ("rope",) * file.require("layers", file.whole("layers"))
    return LayerRopes(name="toy", layer_kinds=kinds, kinds={"rope": rope})


def settings(ropes: LayerRopes, _context: int) -> Iterator[Keys]:
    """Of a base that is no whole number, one that its reader refuses."""
    rope, law = ropes.ropes[0], ropes.ropes[0].scaling
    base = rope.base and (int(rope.base) if rope.base.is_integer() else rope.base)
    yield {"base": base, "by": 1}
    if isinstance(law, Linear):
        yield {"base": base, "by": law.factor}


DIALECT = Dialect(read=read, settings=settings, sizes=lambda ropes, context: {"layers": len(ropes)})


def refusal(rope: Rope, dialect: Dialect = DIALECT) -> TranslationError:
    """Why the toy cannot."""
    with pytest.raises(TranslationError) as caught:
        settings_or_refusal(TOY, dialect, one_layer(rope), CONTEXT)
    return caught.value


def test_the_first_settings_that_are_taken_are_written() -> None:
    """Those before them, which turn otherwise, are not."""
    for law, by in ((None, 1), (Linear(factor=4.0), 4)):
        found = find_settings(DIALECT, one_layer(replace(PLAIN, scaling=law)), CONTEXT)
        assert found is not None
        assert found.keys == {"base": 500, "by": by}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scaling": PerPair(factors=(1.0, 2.0, 3.0, 4.0))}, "law"),
        ({"base": 500.5}, "base"),
        ({"rotary_dim": 4}, "part"),
        ({"rotary_dim": 4, "rotary_start": 4}, "start"),
        ({"base": None, "explicit_inv_freq": (1.0, 0.5, 0.3, 0.1)}, "base"),
        # of two, the first: what it lacks with the other made plain
        ({"scaling": Linear(factor=1.5), "base": 500.5}, "law"),
        ({"scaling": Linear(factor=2.0), "base": 500.5}, "base"),
    ],
)
def test_a_refusal_names_the_first_property_that_is_refused_by_itself(
    change: Keys, reason: str
) -> None:
    """With all the others plain."""
    assert refusal(replace(PLAIN, **change)).reason == reason


def test_of_properties_that_are_refused_together_all_are_named() -> None:
    """Without one of them the rope would be said, though by itself each is said as well."""
    both = replace(PLAIN, scaling=Linear(factor=2.0), rotary_dim=4)
    said = [replace(both, scaling=None), replace(both, rotary_dim=8), PLAIN]

    def read(file: JsonObject) -> LayerRopes:
        return one_layer(said[file.require("number", file.whole("number", least=0))])

    def settings(ropes: LayerRopes, _context: int) -> Iterator[Keys]:
        yield from ({"number": i} for i, rope in enumerate(said) if rope == ropes[0])

    error = refusal(both, replace(DIALECT, read=read, settings=settings))
    assert error.reason == "law and part"


def test_what_a_reader_warns_of_is_not_shown_to_the_user() -> None:
    """The user gave a rope."""

    def doubt(file: JsonObject) -> LayerRopes:
        warnings.warn("two numbers disagree", PhasorWarning, stacklevel=1)
        return read(file)

    assert find_settings(replace(DIALECT, read=doubt), one_layer(PLAIN), CONTEXT) is not None


def test_a_rule_that_it_lacks_is_to_pick_its_law() -> None:
    """One by the length has no number in such a file."""
    rule = DynamicNTK(factor=2.0, original_max_positions=2048)
    error = refusal(replace(PLAIN, scaling=rule))
    assert error.reason == "law"
    assert "rope.at(seq_len)" in str(error)


def test_the_other_pairing_is_one_that_weights_are_reordered_to() -> None:
    """Only where the settings state no pairing."""
    rope = replace(PLAIN, pairing="interleaved")
    assert refusal(rope).reason == "pairs"
    found = find_settings(replace(DIALECT, has_both_pairings=False), one_layer(rope), CONTEXT)
    assert found is not None
    assert found.performed == {"rope": PLAIN}


def test_layers_that_do_not_rotate_are_the_classes_where_no_word_says_them() -> None:
    """A program that could say them does not."""
    kinds = {"rope": PLAIN, "nope": None}
    model = LayerRopes(name="model", layer_kinds=("rope", "nope"), kinds=kinds)
    with refused("still layers"):
        settings_or_refusal(TOY, DIALECT, model, CONTEXT)
    assert find_settings(replace(DIALECT, states_still_layers=False), model, CONTEXT) is not None


def test_ropes_of_which_it_has_one_at_a_time_are_refused_together() -> None:
    """The nearest is the first."""
    kinds = {"full": PLAIN, "sliding": replace(PLAIN, base=600.0)}
    model = LayerRopes(name="model", layer_kinds=("full", "sliding"), kinds=kinds)
    with refused("ropes") as caught:
        settings_or_refusal(TOY, DIALECT, model, CONTEXT)
    assert caught.value.candidates == [PLAIN]


def test_rules_are_compared_at_the_lengths_where_they_pick_another_law() -> None:
    """Not at the context alone, where these two are the same."""
    rule = LongRope(
        short_factors=(1.0,) * 4,
        long_factors=(1.0, 2.0, 3.0, 4.0),
        original_max_positions=1024,
        factor=1.0,
    )
    read_rule = replace(rule, short_factors=(2.0,) * 4)
    for other, taken in ((rule, True), (read_rule, False)):
        back = one_layer(replace(PLAIN, scaling=other))
        dialect = replace(DIALECT, read=Mock(return_value=back))
        found = find_settings(dialect, one_layer(replace(PLAIN, scaling=rule)), CONTEXT)
        assert (found is not None) == taken


def test_settings_that_the_reader_refuses_are_not_the_programs_error() -> None:
    """They are not written."""

    def refuse(file: JsonObject) -> LayerRopes:
        raise ConfigError("no")

    assert find_settings(replace(DIALECT, read=refuse), one_layer(PLAIN), CONTEXT) is None


def test_a_list_has_the_rounding_of_the_frequencies_in_it() -> None:
    """A law by its name has none: programs round frequencies that they compute."""

    def read_list(file: JsonObject) -> LayerRopes:
        found = file.require("list", file.items("list"))
        return one_layer(replace(PLAIN, base=None, explicit_inv_freq=found))

    def list_blocks(ropes: LayerRopes, _context: int) -> Iterator[Keys]:
        yield {"list": ropes.ropes[0].inv_freq.tolist()}

    rounded = replace(PLAIN, inv_freq_dtype="float32")
    lists = Dialect(read=read_list, settings=list_blocks, sizes=lambda ropes, context: {})
    for dialect, is_list, wanted in (
        (lists, True, {"list": rounded.inv_freq.tolist()}),
        (lists, False, {"list": PLAIN.inv_freq.tolist()}),
        (DIALECT, False, {"base": 500, "by": 1}),
    ):
        found = settings_for_rope(
            TOY, dialect, rounded, CONTEXT, is_list=Mock(return_value=is_list)
        )
        assert found == wanted
    assert rounded.inv_freq.tolist() != PLAIN.inv_freq.tolist()


def test_a_refusal_says_the_first_fault_of_the_programs_code() -> None:
    """Only the settings for the rope count."""

    def faulty(file: JsonObject) -> LayerRopes:
        if file.values["by"] != 1:
            raise FaultError("its division is broken")
        return read(file)

    dialect = replace(DIALECT, read=faulty)
    divided = refusal(replace(PLAIN, scaling=Linear(factor=2.0)), dialect)
    assert divided.reason == "law"
    assert divided.facts == {
        "feature": "the law Linear with these numbers",
        "because": "its division is broken",
    }
    assert "because" not in refusal(replace(PLAIN, base=500.5), dialect).facts


def test_a_law_that_is_said_without_its_factor_is_refused_for_the_factor() -> None:
    """On cos and sin, of which the toy has none."""
    plain = Yarn(factor=1.0, original_max_positions=64, attention_factor=1.0)
    assert find_settings(DIALECT, one_layer(replace(PLAIN, scaling=plain)), CONTEXT) is not None
    law = replace(plain, attention_factor=1.5)
    assert refusal(replace(PLAIN, scaling=law)).reason == "gain"


def test_axes_that_drive_the_same_pairs_are_the_same() -> None:
    """Interleaved sections may count more pairs than there are."""
    one, other = (
        replace(PLAIN, axes=InterleavedSections(counts)) for counts in ((2, 1, 1), (9, 1, 1))
    )
    assert one != other
    dialect = replace(DIALECT, read=Mock(return_value=one_layer(one)))
    assert find_settings(dialect, one_layer(other), CONTEXT) is not None


def test_each_rope_of_a_model_gets_settings_in_the_pairs_of_all() -> None:
    """The toy turns halves alone, so all weights are reordered; both ropes are said."""
    kinds = {"full": replace(PLAIN, pairing="interleaved"), "sliding": replace(PLAIN, base=600.0)}
    model = LayerRopes(name="model", layer_kinds=("full", "sliding"), kinds=kinds)
    dialect = replace(DIALECT, has_both_pairings=False)
    no_list = Mock(return_value=False)
    said, settings_of = settings_by_rope(TOY, dialect, model, CONTEXT, is_list=no_list)
    assert said.kinds == {"full": PLAIN, "sliding": kinds["sliding"]}
    assert {rope: found.keys for rope, found in settings_of.items()} == {
        PLAIN: {"base": 500, "by": 1},
        kinds["sliding"]: {"base": 600, "by": 1},
    }
    with refused("pairs"):
        settings_by_rope(TOY, DIALECT, model, CONTEXT, is_list=no_list)


def test_ropes_that_are_said_in_no_common_pairing_are_refused_together() -> None:
    """Each by itself is said."""

    def read_pairs(file: JsonObject) -> LayerRopes:
        pairing = "half" if file.require("base", file.whole("base")) == 500 else "interleaved"
        return one_layer(replace(read(file)[0] or PLAIN, pairing=pairing))

    kinds = {"full": PLAIN, "sliding": replace(PLAIN, base=600.0)}
    model = LayerRopes(name="model", layer_kinds=("full", "sliding"), kinds=kinds)
    dialect = replace(DIALECT, read=read_pairs, has_both_pairings=False)
    with refused("ropes"):
        settings_by_rope(TOY, dialect, model, CONTEXT, is_list=Mock(return_value=False))
