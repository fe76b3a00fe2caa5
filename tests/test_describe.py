"""A Rope in words: each sentence states a number that can be checked."""

from dataclasses import replace

import pytest

from phasor import Rope, preset
from phasor.axes import Sectioned
from phasor.describe import as_plain, pair_rows, ranges, sentences, static_rope
from phasor.scaling import Cope, Linear, LongRope, PerPair, Proportional, Resonance, Yarn

PLAIN = Rope(head_dim=128, pairing="half", base=10_000.0)


SLICE = Rope(
    head_dim=192, pairing="interleaved", pairing_out="half", rotary_dim=64, rotary_start=128
)
# pair k turns once in 8192 positions iff 8192 * 10000**(-k/64) >= 2 pi: k <= 49
SAID: dict[str, Rope] = {
    "Pairs 50-63 never complete a turn within 8192 positions.": PLAIN,
    "Pairs 0-63 divided by 8.": replace(PLAIN, scaling=Linear(factor=8.0)),
    "Pairs 0-15 kept; 16-63 stopped.": replace(PLAIN, scaling=Proportional(fraction=0.25)),
    "Pairs 0-44 kept; 45-62 divided by 1.00687 to 146.642; 63 stopped.": (
        replace(PLAIN, scaling=Cope())
    ),
    "Pairs 0 kept; 1 divided by 2; 2-63 divided by 8.": (
        replace(PLAIN, scaling=PerPair(factors=(1.0, 2.0, *[8.0] * 62)))
    ),
    "Pairs 0-25 kept; 26-49 divided by 1.03627 to 6.25; 50-63 divided by 8.": (
        replace(PLAIN, scaling=Yarn(factor=8.0, original_max_positions=8192))
    ),
    "Coordinates 128 to 191 of 192 turn and the others are unchanged, in 32 pairs (2i, 2i + 1), "
    "and are written back as (i, i + 32).": SLICE,
    "3 position axes drive 16, 24, 24 pairs, in consecutive sections of one spectrum.": (
        replace(PLAIN, axes=Sectioned((16, 24, 24)))
    ),
}


@pytest.mark.parametrize("said", SAID)
def test_words_say_what_the_rope_does(said):
    """Pairs are grouped by what happened to them; slice, output and axes are named."""
    assert said in sentences(SAID[said], 8192)


def test_words_tell_resonance_in_both_directions():
    """Resonance speeds some pairs up and slows others down."""
    law = next(s for s in sentences(replace(PLAIN, scaling=Resonance()), None) if "0-63" in s)
    low, high = (float(number.rstrip(".")) for number in law.split("divided by ")[1].split(" to "))
    assert low < 1 < high


def test_words_give_the_temperature():
    """GPT-OSS multiplies cos and sin by 1.34657 and so its logits by 1.81326."""
    said = sentences(preset("gpt-oss-20b")[0], None)[-1]
    assert "Cos and sin are multiplied by the attention factor 1.34657" in said
    assert "head by 1.81326" in said


def test_rows_hold_what_the_pair_does():
    """inv_freq, wavelength, turns and divisor of a divided pair."""
    row = pair_rows(replace(PLAIN, scaling=Linear(factor=4.0)), 1000)[16]
    assert row.inv_freq == 0.025
    assert row.wavelength == pytest.approx(251.32741228718345, rel=1e-15)
    assert row.turns == pytest.approx(1000 / 251.32741228718345, rel=1e-15)
    assert row.divided_by == 4.0


def test_a_rule_is_resolved_at_the_length_or_where_it_starts():
    """Without a length a rule stands where it was trained."""
    rule = LongRope(
        short_factors=(1.0,) * 64, long_factors=(2.0,) * 64, original_max_positions=64, factor=2.0
    )
    rope = replace(PLAIN, scaling=rule)
    assert static_rope(rope, None).scaling.factors[0] == 1.0
    assert static_rope(rope, 65).scaling.factors[0] == 2.0


def test_plain_values_keep_layers_without_a_rope():
    """A NoPE layer is null in JSON."""
    plain = as_plain(preset("smollm3-3b"), None, None)
    assert None in plain["kinds"].values()


def test_ranges_of_nothing_are_empty():
    """No index, no text."""
    assert ranges([]) == ""
