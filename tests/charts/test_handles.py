"""The page with handles in a browser: it computes what phasor computes, and hands can use it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from tools.browser import BROWSER, complaints, open_browser

from phasor import Rope
from phasor.angles import cos_sin, turns
from phasor.extending.phases import coverage
from phasor.numpy import score
from phasor.papers import angle_errors
from phasor.scaling import NTK, Linear, Llama3, Yarn

FILE = Path(__file__).parents[2] / "docs/handles.html"
NUMBERS = "document.getElementById('handles').numbers()"

pytestmark = pytest.mark.skipif(
    BROWSER is None and not os.environ.get("CI"), reason="no Chromium in the search path"
)


@pytest.fixture(scope="module")
def browser():
    """The system's Chromium; where there must be one and is none, this fails."""
    with open_browser() as opened:
        yield opened


@pytest.fixture
def visit(browser):
    """Open the file at an address, on some screen; it asks neither a network nor a server."""
    pages = []

    def visited(address="", **screen):
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **screen})
        pages.append(page)
        page.complaints = complaints(page, "file:")
        page.goto(f"{FILE.as_uri()}{address}")
        return page

    yield visited
    for page in pages:
        assert page.complaints == []
        page.close()


def draw_state(draw):
    """A state that hands could set, as its address has it."""
    state = {
        "distance": int(2 ** draw.uniform(0, draw.choice((6, 20, 52)))),
        "position": int(2 ** draw.uniform(0, draw.choice((6, 20, 52)))),
        "base": draw.choice((10_000, 500_000, draw.uniform(2, 1e3), 10 ** draw.uniform(2, 12))),
        "width": draw.choice((8, 16, 32, 64, 96, 128, 256)),
        "content": draw.choice("0123"),
        "trained": 2 ** draw.randint(9, 20),
        "context": 2 ** draw.randint(9, 20),
        "law": draw.choice(("none", "linear", "ntk", "yarn", "llama3")),
        "factor": draw.choice((1, 2, 8, draw.uniform(1, 128))),
        "fast": draw.uniform(2, 256),
        "slow": draw.uniform(0.1, 2),
        "low": draw.uniform(0.1, 4),
        "high": draw.choice((4, draw.uniform(4, 256))),
    }
    return state | {"pair": draw.randrange(state["width"] // 2)}


def rope_of(state):
    """The same embedding, and the one before the law, in phasor."""
    factor, trained = state["factor"], state["trained"]
    law = {
        "none": lambda: None,
        "linear": lambda: Linear(factor=factor),
        "ntk": lambda: NTK(factor=factor),
        "yarn": lambda: Yarn(
            factor=factor,
            original_max_positions=trained,
            beta_fast=state["fast"],
            beta_slow=state["slow"],
        ),
        "llama3": lambda: Llama3(
            factor=factor,
            original_max_positions=trained,
            low_freq_factor=state["low"],
            high_freq_factor=state["high"],
        ),
    }[state["law"]]()
    plain = Rope(head_dim=state["width"], pairing="interleaved", base=state["base"])
    return plain, Rope(
        head_dim=state["width"], pairing="interleaved", base=state["base"], scaling=law
    )


def test_two_hundred_states_are_what_phasor_computes(visit):
    """Frequencies, angles, parts and sum of the score, turns, new angles, errors of float32."""
    page = visit("#distance=8")
    draw = random.Random(20_26)
    for _ in range(200):
        state = draw_state(draw)
        page.evaluate("address => { location.hash = address; }", urlencode(state))
        page.wait_for_function(f"{NUMBERS}.position === {state['position']}")
        seen = page.evaluate(f"(({{ scaled, ...seen }}) => seen)({NUMBERS})")
        assert {name: seen[name] for name in state} == state
        plain, rope = rope_of(state)
        query, key = np.array(seen["query"]), np.array(seen["key"])

        np.testing.assert_allclose(seen["inv_freq"], rope.inv_freq, rtol=1e-12)
        for name, position in (
            ("query_turns", state["position"] + state["distance"]),
            ("key_turns", state["position"]),
        ):
            angle = 2 * np.pi * np.array(seen[name])
            np.testing.assert_allclose(
                (np.cos(angle), np.sin(angle)), cos_sin(position, rope), atol=1e-6, rtol=0
            )
        expected = score(query.ravel(), key.ravel(), -state["distance"], rope, gain=1.0)
        assert seen["score"] == pytest.approx(expected, abs=1e-6)
        cos, sin = cos_sin(state["distance"], rope)
        (a, b), (c, d) = query.T, key.T
        parts = (a * c + b * d) * cos + (a * d - b * c) * sin
        np.testing.assert_allclose(seen["parts"], parts, atol=1e-6, rtol=0)
        np.testing.assert_allclose(seen["trained_turns"], turns(plain, state["trained"]), 1e-6)
        np.testing.assert_allclose(seen["context_turns"], turns(rope, state["context"]), 1e-6)
        covered = coverage(plain, state["trained"], rope, state["context"])
        assert seen["is_new"] == covered.has_new_phases.tolist()
        last = np.arange(max(state["context"] - 64, 0), state["context"])
        worst = angle_errors(rope, last, "float32 angle").max()
        assert max(seen["errors"]) == pytest.approx(worst, abs=1e-6)


def test_both_tokens_turn_alike(visit):
    """A million tokens further on the arrows stand elsewhere, and the score is the same."""
    page = visit("#distance=8")
    before = page.evaluate(NUMBERS)
    page.get_by_label("Position of the key").last.fill("1000000")
    page.keyboard.press("Enter")
    after = page.evaluate(NUMBERS)
    assert after["score"] == before["score"]
    assert after["query_turns"] != before["query_turns"]
    page.wait_for_function("location.hash.includes('position=1000000')")


def test_an_address_is_kept_and_read(visit):
    """What keys change is in the address, and a new page with it shows the same."""
    page = visit("#law=yarn&trained=8192&pair=40")
    page.get_by_label("Distance from the key to the query").first.focus()
    for key in ("ArrowRight", "ArrowRight", "Shift+ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    page.wait_for_function("location.hash.includes('distance=19')")
    address = page.evaluate("location.hash")
    assert page.evaluate(NUMBERS)["distance"] == 8 + 2 + 10 - 1
    assert visit(address).inner_text("#say") == page.inner_text("#say")


def test_nonsense_in_an_address_is_the_start(visit):
    """Unknown words and numbers out of range are no error."""
    page = visit("#law=magic&base=x&width=3&pair=9999&distance=-4&factor=1e99&other=1")
    seen = page.evaluate(NUMBERS)
    assert [seen[name] for name in ("law", "base", "width")] == ["none", 10_000, 128]
    assert [seen[name] for name in ("pair", "distance", "factor")] == [63, 0, 1e6]


def test_a_finger_turns_the_query(visit):
    """Once round the dial is once round the pair, and the page did not scroll."""
    page = visit("#distance=100", has_touch=True, viewport={"width": 390, "height": 844})
    box = page.locator("#dial").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def place(turn, radius=0.33):
        angle = 2 * np.pi * turn
        return (
            middle[0] + radius * box["width"] * np.cos(angle),
            middle[1] - radius * box["width"] * np.sin(angle),
        )

    start = 100 / (2 * np.pi)
    page.mouse.move(*place(start))
    page.mouse.down()
    for step in range(1, 21):
        page.mouse.move(*place(start + step / 20))
    page.mouse.up()
    assert page.evaluate(NUMBERS)["distance"] == 106  # once round is 6.28 tokens


def test_a_first_visit_moves_until_it_is_stopped(visit):
    """The query walks on by itself; not for those who asked their system for less motion."""
    page = visit()
    page.wait_for_function(f"{NUMBERS}.distance > 8.2")
    page.get_by_role("button", name="Stop").click()
    assert isinstance(page.evaluate(NUMBERS)["distance"], int)
    still = visit(reduced_motion="reduce")
    assert still.get_by_role("button", name="Play").is_visible()
    assert still.evaluate(NUMBERS)["distance"] == 8


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1280, 1440])
def test_nothing_goes_beyond_the_screen(visit, width, scheme):
    """Nor is a picture empty, or a word smaller than 12 px."""
    page = visit(
        "#distance=8&law=yarn", viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(
        "[...document.querySelectorAll('svg')].every(svg => "
        "svg.querySelectorAll('path[d], rect').length > 3 && svg.clientHeight > 100)"
    )
    assert page.evaluate(
        "[...document.querySelectorAll('.handles svg text')].every(text => "
        "text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize) >= 12)"
    )
