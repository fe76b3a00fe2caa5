"""Two Ropes compared: the parting that is found is the first there is."""

import cmath
import math
from dataclasses import replace

import pytest

from phasor import LayerRopes, QueryFactor, Rope, SpecError, preset
from phasor.axes import Sectioned
from phasor.identification import diff
from phasor.numpy import rotate
from phasor.scaling import NTK, DynamicNTK, Linear, Yarn

PLAIN = Rope(head_dim=64, pairing="half", base=10_000.0)


def by_search(inv_freqs, context, tolerance):
    """The first position and pair at which two lists of frequencies part, position by position."""
    for position in range(context):
        for pair, (a, b) in enumerate(zip(*inv_freqs, strict=True)):
            apart = abs(cmath.exp(1j * position * a) - cmath.exp(1j * position * b))
            if apart > tolerance:
                return position, pair
    return None


@pytest.mark.parametrize("factor", [1.00001, 1.01, 2.0, 8.0])
@pytest.mark.parametrize("tolerance", [1e-3, 0.1, 1.5])
def test_the_earliest_parting_is_what_a_search_finds(factor, tolerance):
    """The closed form gives the position and pair that trying every position gives."""
    plain = [10_000.0 ** (-2 * k / 64) for k in range(32)]
    expected = by_search((plain, [f / factor for f in plain]), 2000, tolerance)
    found = diff(
        PLAIN, replace(PLAIN, scaling=Linear(factor=factor)), context=2000, tolerance=tolerance
    )
    got = (found.earliest.position, found.earliest.pair) if found.earliest else None
    assert got == expected


def test_a_parting_reports_the_distance_there():
    """The error is the distance of the two unit vectors at that position."""
    found = diff(PLAIN, replace(PLAIN, scaling=Linear(factor=2.0)), tolerance=1e-3).earliest
    a, b = (cmath.exp(1j * found.position * f) for f in found.inv_freq)
    assert found.error == pytest.approx(abs(a - b), abs=1e-12)


def test_equal_ropes_do_not_differ():
    """A Rope agrees with itself and with one that says the same in other words."""
    assert not diff(PLAIN, PLAIN)
    assert not diff(PLAIN, replace(PLAIN, scaling=Linear(factor=1.0)))


def test_a_tiny_difference_shows_late():
    """A base that is off by a part in 1e9 passes a tolerance of 1e-6 far out, or not at all."""
    other = replace(PLAIN, base=10_000.0 * (1 + 1e-9))
    assert not diff(PLAIN, other, context=1000)
    assert diff(PLAIN, other, context=10**9).earliest.position > 10_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pairing", "interleaved"),
        ("direction", -1),
        ("axes", Sectioned((16, 16))),
        ("pairing_out", "interleaved"),
    ],
)
def test_a_layout_field_that_differs_is_named(field, value):
    """Every layout field is compared, and what is written apart from what is read."""
    found = diff(PLAIN, replace(PLAIN, **{field: value})).fields
    assert found[field] == ("half" if field == "pairing_out" else getattr(PLAIN, field), value)
    assert set(found) <= {field, "pairing_out"}


def test_factors_on_logits_are_compared():
    """Two ropes of equal angles differ when their temperatures do."""
    law = Yarn(factor=4.0, original_max_positions=4096)
    one = replace(PLAIN, scaling=law)
    two = replace(PLAIN, scaling=replace(law, attention_factor=1.0))
    found = diff(one, two)
    assert found.earliest is None
    assert found.attention_factors == pytest.approx((1 + 0.1 * math.log(4), 1.0))
    assert found.logit_factors == pytest.approx(((1 + 0.1 * math.log(4)) ** 2, 1.0))
    assert found.softmax_factors is None


def test_ropes_of_different_width_have_no_common_pairs():
    """Heads of different width differ in layout, and no pair is compared."""
    found = diff(PLAIN, Rope(head_dim=128, pairing="half"))
    assert set(found.fields) == {"head_dim", "rotary_dim"}
    assert found.earliest is None


@pytest.mark.parametrize(
    "bad", [{"context": 0}, {"tolerance": 0.0}, {"tolerance": 3.0}, {"tolerence": 1.0}]
)
def test_arguments_out_of_bounds_are_refused(bad):
    """The error names the argument."""
    with pytest.raises(SpecError, match=next(iter(bad))):
        diff(PLAIN, replace(PLAIN, scaling=NTK(factor=2.0)), **bad)


EIGHT = Rope(head_dim=8, pairing="half")
RULE = replace(EIGHT, scaling=DynamicNTK(factor=2.0, original_max_positions=64))


def model(rope):
    """One layer that rotates so."""
    return LayerRopes(name="m", layer_kinds=("any",), kinds={"any": rope}, context=64)


def test_rules_of_models_pick_their_law_at_the_length_given():
    """And at the context otherwise."""
    a, b = model(RULE), model(RULE.at(128))
    assert not diff(a, b, seq_len=128)
    assert diff(a, b)


@pytest.mark.parametrize(
    ("sides", "given", "message"),
    [
        ((EIGHT, EIGHT), {"seq_len": 5}, "seq_len picks the laws of models"),
        ((EIGHT, lambda x, p: rotate(x, p, EIGHT)), {"seq_len": 5}, "seq_len picks the laws"),
        ((EIGHT, EIGHT), {"head_dim": 8}, "head_dim controls how a function is called"),
        (
            (model(EIGHT), model(EIGHT)),
            {"head_dim": 8},
            "head_dim controls how a function is called",
        ),
        ((EIGHT, lambda x, p: x), {"head_dim": 16}, "as wide as the model's, 8, got 16"),
        ((lambda x, p: x, lambda x, p: x), {}, "functions need the width of a head: give head_dim"),
        ((model(EIGHT), EIGHT), {}, "a model is compared with a model"),
    ],
)
def test_arguments_that_mean_nothing_to_the_two_sides_are_refused(sides, given, message):
    """Rather than left out of the comparison."""
    with pytest.raises(SpecError, match=message):
        diff(*sides, **given)


@pytest.mark.parametrize("form", ["steps", "log", "power"])
def test_factors_of_queries_count_within_the_context(form):
    """Where none of them has begun yet, two models agree; a strength of 0 is no factor."""
    rope = {"name": "toy", "layer_kinds": ("rope",), "kinds": {"rope": PLAIN}}

    def model(strength, length):
        factor = QueryFactor(strength=strength, length=length, form=form)
        return LayerRopes(**rope, query_factors={"rope": factor})

    plain = LayerRopes(**rope)
    assert not diff(plain, model(0.0, 8), context=100)
    assert not diff(model(0.1, 10**12), model(-0.2, 10**13), context=100)
    assert diff(plain, model(0.1, 8), context=100)
    assert diff(model(0.1, 50), model(0.1, 60), context=100)


def test_models_of_other_depth_that_turn_alike_do_not_differ():
    """What is compared is the layers that both have, over positions that are said."""
    found = diff(preset("llama-3-8b"), preset("llama-3-70b"))
    assert not found
    assert found.layer_counts == (32, 80)
    assert str(found) == (
        "llama-3-8b and llama-3-70b, positions 0 to 8191\n"
        "They agree within 1e-06 on every pair of every layer.\n"
        "  Layers: 32 and 80; the layers that both have rotate alike."
    )
