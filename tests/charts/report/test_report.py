"""The page of `phasor report`: what it says of a model, and that it is whole."""

import html
import itertools
import json
import re
from dataclasses import replace

import pytest

import phasor
from phasor import Rope, load, preset, preset_names
from phasor.axes import Sectioned
from phasor.charts import report
from phasor.describe import construction, usage_example
from phasor.errors import SpecError
from phasor.files.dialects.blocks import rope_parameters
from phasor.layers import ConfigLocation
from phasor.scaling import Linear, LongRope, Proportional, Yarn

from .report_page import Page, llama_3, toy


@pytest.fixture(scope="module")
def text():
    """The page of Llama 3."""
    return llama_3()


@pytest.fixture(scope="module")
def page(text):
    """The same, parsed."""
    return Page(text)


@pytest.fixture(scope="module")
def two_kinds():
    """The page of Gemma 3, parsed."""
    return Page(report(preset("gemma-3-4b"), context=1024, to=2048))


def test_the_page_is_a_document(page):
    """Language, title, viewport, one first heading, no level left out, every tag closed."""
    assert page.all("html") == [{"lang": "en"}]
    assert page.texts["title"] == ["llama-3-8b: rotary position embedding"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all(
        "meta"
    )
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert page.open == []


def test_tables_charts_and_links_can_be_found_without_eyes(page):
    """Header cells have a scope, tables and figures captions, charts names, links targets."""
    assert {cell.get("scope") for cell in page.all("th")} == {"row", "col"}
    assert len(page.all("caption")) == len(page.all("table")) == 3
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    charts = [a for a in page.all("div") if a.get("class") == "chart"]
    assert len(charts) == len(page.all("figure")) == len(page.all("figcaption")) == 5
    assert {chart["aria-labelledby"] for chart in charts} <= set(ids)
    assert {chart["data-spec"] for chart in charts} == set(page.scripts)
    assert all(len(spec["description"]) > 20 for spec in page.scripts.values())
    assert {link["href"] for link in page.all("a")} <= {f"#{one}" for one in ids}


def test_the_page_asks_the_network_for_nothing(page, text):
    """No source, no style sheet, no import, and a policy that would forbid them."""
    assert not [a for _, a in page.tags if "src" in a or "srcset" in a]
    assert page.all("link") == page.all("iframe") == page.all("img") == []
    (policy,) = [a["content"] for a in page.all("meta") if "http-equiv" in a]
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert not any("url" in json.dumps(spec.get("data", {})) for spec in page.scripts.values())


def test_the_page_is_small(text):
    """Less than five megabytes, and hardly more than the charts' program."""
    assert 0.5e6 < len(text.encode()) < 1.5e6


@pytest.mark.parametrize(
    "name",
    ["</script><img src=x onerror=alert(1)>", "a\"b'c&amp;<b>", "{{ 7 * 7 }}{% raw %}", "]]>-->"],
)
def test_a_name_is_only_ever_text(name):
    """Whatever a config calls its model and its kinds of layers."""
    rope = Rope(head_dim=8, pairing="half")
    ropes = toy(rope, name=name, layer_kinds=(name,), kinds={name: rope}, notes=(name,))
    page = Page(report(ropes))
    assert page.texts["h1"] == [f"{name}: rotary position embedding"]
    assert name in page.texts["li"]
    assert page.all("img") == page.all("b") == []


def test_the_words_are_those_of_show(text):
    """What `phasor show` says of the rope stands on the page."""
    assert "All 128 coordinates of a head turn, in 64 pairs (i, i + 64)." in text
    assert "Pairs 35-63 never complete a turn within 8192 positions." in text
    assert "No law is recommended" in text


def test_the_context_is_not_called_that_of_the_training(text):
    """Llama 3.1 was trained on more than one; a config says the context alone."""
    assert "a context of 8,192 tokens, extended to up to 65,536." in text
    assert "trained on 8" not in text


def test_a_picture_comes_before_the_words_and_tables(two_kinds, page):
    """Nothing but titles and links stands before the first chart of a page."""
    for one in (page, two_kinds):
        tags = [tag for tag, _ in one.tags]
        before = {*tags[tags.index("body") : tags.index("figure")]}
        assert not before & {"table", "pre"}
        assert one.texts["h2"][-1] == "All layers"


def test_a_table_that_is_cut_says_that_it_scrolls(page):
    """And how many pairs it has; a table that is whole does not."""
    assert "Scroll inside the table for all 64 pairs." in page.texts["strong"]
    small = Page(report(toy(Rope(head_dim=8, pairing="half"))))
    assert not any("Scroll" in text for text in small.texts["strong"])


def test_what_a_release_documents_comes_before_the_laws():
    """With its source and its block open; what was measured of the laws is beneath the table."""
    page = Page(report(preset("qwen3-8b"), to=131072))
    text = " ".join(page.texts["p"])
    assert "The release of qwen3-8b documents YaRN with factor 4 from 32768 tokens" in text
    assert "documented (recommended)" in page.texts["th"]
    assert page.texts["summary"][:2] == ["documented", "linear"]
    assert any("2309.00071, Table 1" in line for line in page.texts["li"])
    blocks = [json.loads(block) for block in page.texts["code"] if block.startswith("{")]
    assert blocks[0]["rope_parameters"]["factor"] == 4.0


def test_a_rule_says_where_it_stands():
    """What is shown of a rule is its law at the context of the training."""
    words = Page(report(preset("phi-3.5-mini"), context=4096, to=8192)).texts["li"]
    assert "The rule LongRope picks the law by length; shown here for 4096 tokens." in words


def test_each_kind_of_layer_has_its_part(two_kinds):
    """Two ropes, two sections; a kind without one is named."""
    assert [h for h in two_kinds.texts["h2"] if h.startswith("The ")] == [
        "The sliding layers",
        "The full layers",
    ]
    assert len(two_kinds.scripts) == 10
    assert "none" in Page(report(preset("smollm3-3b"), context=1024, to=2048)).texts["td"]


def test_each_kind_of_layer_has_its_block_beside_the_others(two_kinds):
    """What a section says of a config can be put into one, and leaves the other kind alone."""
    ropes = preset("gemma-3-4b")
    said = {"model_type": "gemma3_text", "num_hidden_layers": 2, "head_dim": 256}
    said["layer_types"] = ["sliding_attention", "full_attention"]
    blocks = [json.loads(block) for block in two_kinds.texts["code"] if block.startswith("{")]
    # the sliding layers can take five laws; the full ones are linear, and laws are not combined
    assert len(blocks) == 6
    for changed, keys in zip((0, 0, 0, 0, 0, 1), blocks, strict=True):
        kept = 1 - changed
        again = load(said | keys)
        assert again[kept] == ropes.kinds[["sliding", "full"][kept]]
        assert again[changed] != ropes.kinds[["sliding", "full"][changed]]
    assert {"sliding_attention", "full_attention"} <= {*two_kinds.texts["code"]}


def test_kinds_that_turn_alike_share_a_section_and_are_extended_together():
    """Each has its block in the config all the same."""
    rope = Rope(head_dim=64, pairing="half")
    kinds, labels = dict.fromkeys("ab", rope), {"a": "first", "b": "second"}
    two = ConfigLocation(labels=labels)
    page = Page(report(toy(rope, layer_kinds=("a", "b"), kinds=kinds, in_config=two)))
    for block in [block for block in page.texts["code"] if block.startswith("{")]:
        blocks = json.loads(block)["rope_parameters"]
        assert list(blocks) == ["first", "second"]
        assert blocks["first"] == blocks["second"] != rope_parameters(rope, 64)
    assert "linear" in page.texts["summary"]


@pytest.mark.parametrize(
    "rope",
    [
        Rope(head_dim=64, pairing="half"),
        Rope(head_dim=64, pairing="interleaved", base=5e5, rotary_dim=32, rotary_start=32),
        Rope(head_dim=16, pairing="half", axes=Sectioned((2, 3, 3)), direction=-1),
        Rope(head_dim=64, pairing="half", scaling=Yarn(factor=4.0, original_max_positions=16)),
        Rope(head_dim=4, pairing="half", explicit_inv_freq=(1.0, 0.25)),
        Rope(
            head_dim=4,
            pairing="half",
            scaling=LongRope(
                short_factors=(1.0, 1.0),
                long_factors=(1.0, 3.0),
                original_max_positions=32,
                factor=2.0,
            ),
        ),
        Rope(head_dim=64, pairing="half", scaling=Proportional(fraction=0.05)),
        Rope(head_dim=2, pairing="half"),
    ],
    ids=["plain", "slice", "axes", "yarn", "explicit", "rule", "one pair turns", "one pair"],
)
def test_any_rope_has_a_page_whose_code_makes_it(rope):
    """The snippet runs, and what it builds is the rope; no kind of rope is without a page."""
    page = Page(report(toy(rope)))
    assert "rope-0-coverage" in page.scripts
    assert any("import torch" in part for part in page.texts["code"])
    assert eval(construction(rope), {"phasor": phasor}) == rope
    names: dict = {}
    exec(usage_example(rope, 64), names)
    assert names["rope"] == rope.at(64)
    assert names["q"].shape == (1, 16, 8, rope.head_dim)


def test_a_model_without_a_rope_or_a_length_is_refused():
    """With the way out."""
    with pytest.raises(SpecError, match="no layer of toy has a rotary embedding"):
        report(toy(None))
    rope = Rope(head_dim=8, pairing="half", scaling=Linear(factor=2.0))
    with pytest.raises(SpecError, match="context must be given"):
        report(toy(rope, context=None))


def test_progress_is_told_to_the_end():
    """Each rope is a step, and the page is the last."""
    seen = []
    report(toy(Rope(head_dim=8, pairing="half")), progress=lambda *step: seen.append(step))
    assert seen == [(1, 2), (2, 2)]


def test_a_config_file_is_reported_on_under_its_own_name():
    """The name that the file gives is the title."""
    config = {
        "_name_or_path": "someone/model",
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
    }
    title = Page(report(load(config))).texts["title"]
    assert title == ["someone/model: rotary position embedding"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_reported_with_defaults(name):
    """A context of ten million tokens among them, eight times which no plan reaches."""
    model = preset(name)
    context = None if model.context else 1024  # of images, which have no length
    assert model.name in html.unescape(report(model, context=context))


def test_a_name_with_control_characters_reaches_no_title():
    """They are shown as they are written in a string."""
    model = replace(preset("llama-3-8b"), name="a\x1b[2J\x07<b>")
    page = report(model)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", page.partition("</title>")[0])
    assert r"<title>a\x1b[2J\x07&lt;b&gt;" in page
