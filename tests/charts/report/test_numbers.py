"""The numbers on the page of `phasor report`, against loops."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

import phasor
from phasor import preset
from phasor.charts import report
from phasor.scaling import Yarn

from .report_page import Page, llama_3

BASE, CONTEXT, TO = 500_000.0, 8192, 65_536  # llama-3-8b, looked at up to eight times its context
STEPS = np.array([BASE ** (-k / 64) for k in range(64)])


@pytest.fixture(scope="module")
def page():
    """The page of Llama 3, parsed."""
    return Page(llama_3())


def test_coverage_is_what_a_loop_finds(page):
    """Unchanged, a pair is first new where the context ends if it never turned; linear never is."""
    rows = page.rows("coverage")
    unchanged = [row for row in rows if row["law"] == "unchanged"]
    assert [row["pair"] for row in unchanged] == list(range(64))
    for row, step in zip(unchanged, STEPS, strict=True):
        assert row["turns_per_token"] == pytest.approx(step / (2 * math.pi), rel=1e-14)
        turned = CONTEXT * step >= 2 * math.pi
        assert row["turned"] == turned
        assert row["first_new"] == (None if turned else CONTEXT)
    assert {row["first_new"] for row in rows if row["law"] == "linear"} == {None}


def test_the_first_new_angle_of_a_law_is_what_a_loop_finds(page):
    """NTK-aware scaling: the first distance whose angle within a turn was never met."""
    rows = [row for row in page.rows("coverage") if row["law"] == "ntk"]
    for pair in (34, 35, 40, 62):
        angle = np.arange(TO) * (STEPS[pair] * 8 ** (-pair / 63)) % (2 * math.pi)
        new = np.flatnonzero(
            (angle >= CONTEXT * STEPS[pair]) & (CONTEXT * STEPS[pair] < 2 * math.pi)
        )
        assert rows[pair]["first_new"] == (new[0] if len(new) else None)


def test_the_slider_compares_what_it_shows(page):
    """Its expression counts distances below the context, in tokens; it opens at the longest."""
    spec = page.scripts["rope-0-coverage"]
    (slider,) = [one for one in spec["params"] if one["name"] == "tokens"]
    assert slider["value"] == TO
    assert (slider["bind"]["min"], slider["bind"]["max"], slider["bind"]["step"]) == (
        1024,
        TO,
        1024,
    )
    assert "datum.first_new < tokens" in json.dumps(spec)
    assert "tokens * datum.turns_per_token" in json.dumps(spec)


def test_scaling_is_what_each_law_leaves(page):
    """Linear an eighth everywhere, NTK-aware by a power, unchanged all."""
    for row in page.rows("scaling"):
        wanted = {"linear": 1 / 8, "ntk": 8 ** (-row["pair"] / 63), "unchanged": 1.0}
        if row["name"] in wanted:
            assert row["frequency"] == pytest.approx(wanted[row["name"]], rel=1e-13)


def test_cosines_are_sums_of_cosines(page):
    """C(r) / n, pair by pair, of the plain and of the interpolated rope."""
    rows = [row for row in page.rows("cosine") if row["name"] in ("unchanged", "linear")]
    assert len(rows) > 300
    for row in rows:
        slower = 8 if row["name"] == "linear" else 1
        mean = np.cos(row["distance"] * STEPS / slower).mean()
        assert row["cosine"] == pytest.approx(mean, abs=1e-11)


def test_decay_is_the_mean_length_of_partial_sums(page):
    """RoFormer's curve, by its definition."""
    for row in page.rows("decay")[::10]:
        sums = np.cumsum(np.exp(1j * row["distance"] * STEPS))
        assert row["decay"] == pytest.approx(np.abs(sums).mean(), abs=1e-9)


def kept(text, law):
    """The last column of a law's row."""
    cells = re.search(rf'<th scope="row">{law}</th>((?:<td>[^<]*</td>)+)', text)[1]
    return re.findall("<td>([^<]*)</td>", cells)[-1]


def weight(alpha, steps, tokens):
    """What a softmax over all tokens gives the previous one."""
    scores = np.cos(np.outer(np.arange(tokens) - 1, steps)).sum(1)
    weights = np.exp(alpha * (scores - scores.max()) / math.sqrt(128))
    return weights[1] / weights.sum()


def sharpness(steps, tokens):
    """The alpha that gives the previous token 0.99, by halving."""
    low, high = 0.0, 1000.0
    while high - low > 1e-9 * high:
        alpha = (low + high) / 2
        low, high = (alpha, high) if weight(alpha, steps, tokens) < 0.99 else (low, alpha)
    return high


def test_a_head_keeps_what_a_softmax_gives_it():
    """The previous token's weight over the longer context, of the head that had 0.99 before."""
    alpha = sharpness(STEPS, CONTEXT)
    assert f"a sharpness of at least {alpha:.4g}" in llama_3()
    for law, steps in {
        "unchanged": STEPS,
        "linear": STEPS / 8,
        "ntk": STEPS * 8 ** (-np.arange(64) / 63),
    }.items():
        assert kept(llama_3(), law) == f"{weight(alpha, steps, TO):.3g}"


def test_a_temperature_sharpens_the_head():
    """YaRN's factor on the logits multiplies the trained head's alpha."""
    rope = replace(preset("llama-2-7b")[0], scaling=Yarn(factor=4.0, original_max_positions=4096))
    alpha = sharpness(10_000.0 ** (-np.arange(64) / 64), 4096) * (0.1 * math.log(4) + 1) ** 2
    found = kept(report(preset("llama-2-7b"), to=16384), "yarn")
    assert found == f"{weight(alpha, rope.inv_freq, 16384):.3g}"


def test_precision_grows_with_position_where_angles_are_rounded(page):
    """A float32 angle is off by up to half a unit in its last place; digit rows never are."""
    rows = page.rows("precision")
    assert len({row["name"] for row in rows}) == len(phasor.papers.RECIPES)
    for row in rows:
        top = 2 * row["position"]  # the end of the octave
        if row["name"] == "float32 angle":
            # position and frequency are rounded, and their product: 2**-24 of the angle each
            assert row["error"] <= 3 * top * 2.0**-24 + 2.0**-23
        if row["name"] == "phasor, float32":
            assert row["error"] <= 2.2e-7
    last = {row["name"]: row["error"] for row in rows if row["position"] == 32768}
    assert last["float32 angle"] > 1e-3
