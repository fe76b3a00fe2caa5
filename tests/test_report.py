"""The page of `phasor report`: what it says, that it is right, and that it is whole."""

import html.parser
import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import phasor
from phasor import Linear, LongRope, Proportional, Rope, Sectioned, Yarn, load, preset
from phasor.configs import rope_parameters
from phasor.errors import SpecError
from phasor.report import report
from phasor.report._snippet import construction, usage

BASE, CONTEXT, TO = 500_000.0, 8192, 65_536  # llama-3-8b, looked at up to eight times its context
STEPS = np.array([BASE ** (-k / 64) for k in range(64)])


class Page(html.parser.HTMLParser):
    """Tags with their attributes in order, the text of each, and the JSON of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.scripts, self.open = [], {}, {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "br", "img", "input"):
            self.open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if not self.open:
            return
        tag, attributes = self.open[-1]
        if tag == "script" and attributes.get("type") == "application/json":
            self.scripts[attributes["id"]] = json.loads(data)
        elif tag != "script":
            self.texts.setdefault(tag, []).append(data)

    def all(self, tag):
        """The attributes of each such tag."""
        return [attributes for name, attributes in self.tags if name == tag]

    def rows(self, chart):
        """The largest data set of a chart."""
        spec = self.scripts[f"rope-0-{chart}"]
        found = [*spec.get("datasets", {}).values()]
        found += [part["data"]["values"] for part in [spec, *spec.get("layer", [])]
                  if "values" in part.get("data", {})]  # fmt: skip
        return max(found, key=len)


@pytest.fixture(scope="module")
def text():
    """The page of Llama 3."""
    return report(preset("llama-3-8b"))


@pytest.fixture(scope="module")
def page(text):
    """The same, parsed."""
    return Page(text)


def toy(rope, **more):
    """A model of two layers."""
    given = {"name": "toy", "layer_kinds": ("rope",) * 2, "kinds": {"rope": rope}, "context": 64}
    return phasor.LayerRopes(**given | more)


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
    assert len(charts) == len(page.all("figure")) == len(page.all("figcaption")) == 7
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


def test_coverage_is_what_a_loop_finds(page):
    """Unchanged, a pair is first new where the context ends if it never turned; linear never is."""
    rows = page.rows("coverage")
    unchanged = [row for row in rows if row["law"] == "unchanged"]
    assert [row["pair"] for row in unchanged] == list(range(64))
    for row, step in zip(unchanged, STEPS, strict=True):
        assert row["inv_freq"] == pytest.approx(step, rel=1e-14)
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
    """Its expression counts distances below the context, in tokens, from one step to the end."""
    spec = page.scripts["rope-0-coverage"]
    (slider,) = [one for one in spec["params"] if one["name"] == "tokens"]
    assert slider["value"] == CONTEXT
    assert (slider["bind"]["min"], slider["bind"]["max"], slider["bind"]["step"]) == (
        1024,
        TO,
        1024,
    )
    assert "datum.first_new < tokens" in json.dumps(spec)
    assert f"tokens * datum.inv_freq / {2 * math.pi}" in json.dumps(spec)


def test_slowing_is_each_laws_divisor(page):
    """Linear by 8 everywhere, NTK-aware by a power, unchanged by 1."""
    for row in page.rows("slowing"):
        wanted = {"linear": 8.0, "ntk": 8 ** (row["pair"] / 63), "unchanged": 1.0}
        if row["law"] in wanted:
            assert row["divided_by"] == pytest.approx(wanted[row["law"]], rel=1e-13)


def test_cosines_are_sums_of_cosines(page):
    """C(r) / n, pair by pair, of the plain and of the interpolated rope."""
    rows = [row for row in page.rows("cosine") if row["law"] in ("unchanged", "linear")]
    assert len(rows) > 300
    for row in rows:
        slower = 8 if row["law"] == "linear" else 1
        mean = np.cos(row["distance"] * STEPS / slower).mean()
        assert row["cosine"] == pytest.approx(mean, abs=1e-11)


def test_decay_is_the_mean_length_of_partial_sums(page):
    """RoFormer's curve, by its definition."""
    for row in page.rows("decay")[::10]:
        sums = np.cumsum(np.exp(1j * row["distance"] * STEPS))
        assert row["decay"] == pytest.approx(np.abs(sums).mean(), abs=1e-9)


def test_a_head_keeps_what_a_softmax_gives_it(page):
    """The previous token's weight, with the alpha the page names, by a softmax over all tokens."""
    alpha = next(row["alpha"] for row in page.rows("needed")
                 if (row["weight"], row["context"]) == ("0.99", CONTEXT))  # fmt: skip
    for row in page.rows("kept"):
        if row["law"] != "linear" or row["context"] > 4096:
            continue
        back = np.arange(row["context"])
        logits = alpha * np.cos(np.outer(back - 1, STEPS / 8)).sum(1) / math.sqrt(128)
        weights = np.exp(logits - logits.max())
        assert row["weight"] == pytest.approx(weights[1] / weights.sum(), rel=1e-9)


def test_a_temperature_sharpens_the_head():
    """YaRN's factor on the logits multiplies the trained head's alpha."""
    page = Page(report(preset("llama-2-7b"), to=16384))
    alpha = next(row["alpha"] for row in page.rows("needed")
                 if (row["weight"], row["context"]) == ("0.99", 4096))  # fmt: skip
    kept = {row["law"]: row["weight"] for row in page.rows("kept") if row["context"] == 16}
    rope = replace(preset("llama-2-7b")[0], scaling=Yarn(factor=4.0, original_max_positions=4096))
    steps = phasor.frequencies.inv_freq(rope)
    logits = (
        alpha * (0.1 * math.log(4) + 1) ** 2 * np.cos(np.outer(np.arange(16) - 1, steps)).sum(1)
    )
    weights = np.exp((logits - logits.max()) / math.sqrt(128))
    assert kept["yarn"] == pytest.approx(weights[1] / weights.sum(), rel=1e-9)


def test_precision_grows_with_position_where_angles_are_rounded(page):
    """A float32 angle is off by up to half a unit in its last place; digit rows never are."""
    rows = page.rows("precision")
    assert {row["recipe"] for row in rows} == set(phasor.analysis.RECIPES)
    for row in rows:
        top = 2 * row["position"]  # the end of the octave
        if row["recipe"] == "float32 angle":
            # position and frequency are rounded, and their product: 2**-24 of the angle each
            assert row["error"] <= 3 * top * 2.0**-24 + 2.0**-23
        if row["recipe"] == "float32 rows":
            assert row["error"] <= 2.2e-7
    last = {row["recipe"]: row["error"] for row in rows if row["position"] == 32768}
    assert last["float32 angle"] > 1e-3


def test_the_words_are_those_of_show(text):
    """What `phasor show` says of the rope stands on the page."""
    assert "All 128 coordinates of a head turn, in 64 pairs (i, i + 64)." in text
    assert "Pairs 35-63 never complete a turn within 8192 positions." in text
    assert "(recommended)" in text


def test_a_rule_says_where_it_stands():
    """What is shown of a rule is its law at the context of the training."""
    words = Page(report(preset("phi-3.5-mini"), context=4096, to=8192)).texts["li"]
    assert "The rule LongRope picks the law from the length; here at 4096 tokens." in words


def test_each_kind_of_layer_has_its_part():
    """Two ropes, two sections; a kind without one is named."""
    page = Page(report(preset("gemma-3-4b"), context=1024, to=2048))
    assert [h for h in page.texts["h2"] if h.startswith("The ")] == [
        "The sliding layers",
        "The full layers",
    ]
    assert len(page.scripts) == 14
    assert "none" in Page(report(preset("smollm3-3b"), context=1024, to=2048)).texts["td"]


def test_each_kind_of_layer_has_its_block_beside_the_others():
    """What a section says of a config can be put into one, and leaves the other kind alone."""
    ropes = preset("gemma-3-4b")
    page = Page(report(ropes, context=1024, to=2048))
    said = {"model_type": "gemma3_text", "num_hidden_layers": 2, "head_dim": 256}
    said["layer_types"] = ["sliding_attention", "full_attention"]
    blocks = [json.loads(block) for block in page.texts["code"] if block.startswith("{")]
    assert len(blocks) == 2
    for changed, kept, keys in zip((0, 1), (1, 0), blocks, strict=True):
        again = load(said | keys)
        assert again[kept] == ropes.kinds[["sliding", "full"][kept]]
        assert again[changed] != ropes.kinds[["sliding", "full"][changed]]
    assert {"sliding_attention", "full_attention", "rope_local_base_freq"} <= {*page.texts["code"]}


def test_kinds_that_turn_alike_share_a_section_and_are_extended_together():
    """Each has its block in the config all the same."""
    rope = Rope(head_dim=64, pairing="half")
    kinds, labels = dict.fromkeys("ab", rope), {"a": "first", "b": "second"}
    page = Page(report(toy(rope, layer_kinds=("a", "b"), kinds=kinds, labels=labels)))
    (said,) = (json.loads(block) for block in page.texts["code"] if block.startswith("{"))
    blocks = said["rope_parameters"]
    assert list(blocks) == ["first", "second"]
    assert blocks["first"] == blocks["second"] != rope_parameters(rope, 64)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(head_dim=64, pairing="half"),
        Rope(head_dim=64, pairing="interleaved", base=5e5, rotary_dim=32, rotary_start=32),
        Rope(head_dim=16, pairing="half", axes=Sectioned((2, 3, 3)), direction=-1),
        Rope(head_dim=64, pairing="half", scaling=Yarn(factor=4.0, original_max_positions=16)),
        Rope(head_dim=4, pairing="half", inv_freq=(1.0, 0.25)),
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
    exec(usage(rope, 64), names)
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


def command(*arguments, program="from phasor.cli import run; run()"):
    """`phasor report` in a process of its own."""
    start = f"import sys; sys.argv = ['phasor', 'report', *sys.argv[1:]]\n{program}"
    return subprocess.run(
        [sys.executable, "-c", start, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )


def test_the_command_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    """One whole page, its size printed, no part of one."""
    path = tmp_path / "page.html"
    path.write_text("old")
    done = command("gpt-j-6b", "-o", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{path}: {path.stat().st_size / 1e6:.1f} MB\n"
    assert path.read_text("utf-8").endswith("</html>")
    assert os.listdir(tmp_path) == ["page.html"]  # noqa: PTH208


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path):
    """A disk that fails half-way: exit code 2, the old file, no rest."""
    path = tmp_path / "page.html"
    path.write_text("old")
    broken = (
        "from pathlib import Path\n"
        "def fail(self, target): raise OSError(28, 'No space left on device')\n"
        "Path.replace = fail\n"
        "from phasor.cli import run; run()"
    )
    done = command("gpt-j-6b", "-o", path, program=broken)
    assert done.returncode == 2
    assert "cannot be written: No space left on device" in done.stderr
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["page.html"]  # noqa: PTH208


def test_a_missing_folder_is_said(tmp_path):
    """One line, exit code 2."""
    done = command("gpt-j-6b", "-o", tmp_path / "none" / "page.html")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No such file or directory" in done.stderr


def test_the_missing_extra_is_named(tmp_path):
    """Without the plotting library the command says what to install."""
    hidden = (
        "import importlib.util as util\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'altair' else found(name)\n"
        "from phasor.cli import run; run()"
    )
    done = command("gpt-j-6b", "-o", tmp_path / "page.html", program=hidden)
    assert done.returncode == 2
    assert "pip install 'phasor[report]'" in done.stderr


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
