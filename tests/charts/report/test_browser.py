"""The report in a browser: charts that are drawn, move and can be read, light, dark and narrow."""

import os
from pathlib import Path

import pytest
from tools.browser import BROWSER, complaints, open_browser

from phasor import preset
from phasor.charts import report

WIDTHS, SCHEMES, CHARTS = (400, 1400), ("light", "dark"), 5

pytestmark = pytest.mark.skipif(
    BROWSER is None and not os.environ.get("CI"), reason="no Chromium in the search path"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A page of a real model, as a file."""
    path = tmp_path_factory.mktemp("report") / "page.html"
    path.write_text(report(preset("llama-3-8b")), "utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Where screenshots go: a folder that is kept, or a temporary one."""
    kept = os.environ.get("PHASOR_SCREENSHOTS") or ("artefacts" if os.environ.get("CI") else None)
    folder = Path(kept) if kept else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser():
    """The system's Chromium; where there must be one and is none, this fails."""
    with open_browser() as opened:
        yield opened


@pytest.fixture
def look(browser, address):
    """Open the page at a width in a scheme, with all charts drawn; what went wrong beside it."""
    pages = []

    def opened(width, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        page.complaints = complaints(page, "file:")
        page.goto(address)
        page.wait_for_function(f"document.querySelectorAll('.chart svg').length === {CHARTS}")
        return page

    yield opened
    for page in pages:
        page.close()


def luminance(colour):
    """WCAG's relative luminance of ``rgb(r, g, b)``."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """WCAG's contrast ratio of two colours."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_drawn_without_a_complaint(look, pictures, width, scheme):
    """Marks in every chart, nothing on the console, no request, no sideways scrolling."""
    page = look(width, scheme)
    page.screenshot(path=pictures / f"report-{width}-{scheme}.png", full_page=True)
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    marks = page.evaluate(
        "[...document.querySelectorAll('.chart svg')].map(svg => "
        "svg.querySelectorAll('.mark-line path, .mark-symbol.role-mark path').length)"
    )
    assert len(marks) == CHARTS
    assert min(marks) >= 1


@pytest.mark.parametrize("width", WIDTHS)
def test_charts_keep_within_their_place(look, width):
    """As wide as their figure, no text of a chart beyond its edges or over another's."""
    page = look(width)
    outside = page.evaluate(
        """[...document.querySelectorAll('.chart')].flatMap(chart => {
             const room = chart.closest('figure').getBoundingClientRect();
             return [...chart.querySelectorAll('svg text')]
               .filter(text => text.textContent && getComputedStyle(text).opacity > 0)
               .map(text => [text.textContent, text.getBoundingClientRect()])
               .filter(([said, box]) => box.left < room.left - 1 || box.right > room.right + 1)
               .map(([said]) => chart.dataset.spec + ': ' + said);
           })"""
    )
    assert outside == []
    overlapping = page.evaluate(
        """[...document.querySelectorAll('.chart')].flatMap(chart => {
             const boxes = [...chart.querySelectorAll('svg text')]
               .filter(text => text.textContent.trim() && text.getAttribute('opacity') !== '0')
               .map(text => [text.textContent, text.getBoundingClientRect()]);
             return boxes.flatMap(([said, a], i) => boxes.slice(i + 1)
               .filter(([other, b]) => a.left < b.right - 2 && b.left < a.right - 2
                                    && a.top < b.bottom - 3 && b.top < a.bottom - 3)
               .map(([other]) => chart.dataset.spec + ': ' + said + ' | ' + other));
           })"""
    )
    assert overlapping == []
    narrow = page.evaluate(
        "[...document.querySelectorAll('.chart')].map(chart => "
        "chart.querySelector('svg').getBoundingClientRect().width / chart.clientWidth)"
    )
    assert min(narrow) > 0.9


@pytest.mark.parametrize("scheme", SCHEMES)
def test_words_and_marks_stand_out_from_the_paper(look, scheme):
    """WCAG AA: 4.5 for text, in charts too, and 3 for lines and points."""
    page = look(1400, scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) > 0.5) == (scheme == "light")
    words = page.evaluate(
        """[...document.querySelectorAll('p, li, td, figcaption, caption, a')]
             .map(one => getComputedStyle(one).color)
           .concat([...document.querySelectorAll('.chart svg text')]
             .map(one => getComputedStyle(one).fill))"""
    )
    marks = page.evaluate(
        "[...document.querySelectorAll('.chart svg .mark-line path')]"
        ".map(one => getComputedStyle(one).stroke)"
        ".concat([...document.querySelectorAll('.chart svg .mark-symbol.role-mark path')]"
        ".map(one => getComputedStyle(one).fill))"
    )
    assert len(set(marks)) >= 6
    assert min(contrast(paper, colour) for colour in set(words)) >= 4.5
    assert min(contrast(paper, colour) for colour in set(marks)) >= 3


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [390, 1280])
def test_the_first_screen_has_a_picture(look, width, scheme):
    """Points of the coverage chart within the first 900 pixels."""
    page = look(width, scheme)
    tops = page.evaluate(
        "[...document.querySelectorAll('.chart svg .mark-symbol.role-mark path')]"
        ".map(point => point.getBoundingClientRect().bottom)"
    )
    assert sum(top < 900 for top in tops) >= 64


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_pairs_shows_that_more_follows(look, width):
    """A shadow stays at its lower edge, and a cover over it moves on with the last row."""
    page = look(width)
    table = page.locator(".tall")
    assert table.evaluate("one => one.scrollHeight > one.clientHeight")
    style = table.evaluate(
        "one => [getComputedStyle(one).backgroundAttachment, getComputedStyle(one).backgroundImage]"
    )
    assert style[0] == "local, scroll"
    assert style[1].count("linear-gradient(to top") == 2
    assert page.get_by_text("Scroll inside the table for all 64 pairs.").is_visible()


def heights(page):
    """Where the points of the coverage chart stand."""
    return page.evaluate(
        "[...document.querySelectorAll('[data-spec=rope-0-coverage] .mark-symbol.role-mark path')]"
        ".map(path => path.getAttribute('transform'))"
    )


def said(page):
    """All text of the coverage chart."""
    return page.locator("[data-spec=rope-0-coverage] svg").text_content()


def test_the_slider_moves_the_points(look, pictures):
    """It opens at the longest context, whose new angles are marked; at the trained one none is."""
    page = look(1400)
    before = heights(page)
    assert len(before) == 64
    assert "29 pairs show new angles" in said(page)
    slider = page.get_by_role("slider", name="Context, tokens")
    slider.fill("8192")
    assert "show new angles" not in said(page)
    assert all(a != b for a, b in zip(before, heights(page), strict=True))
    slider.press("End")
    page.locator("[data-spec=rope-0-coverage]").screenshot(path=pictures / "report-slider.png")
    assert (
        page.locator("[data-spec=rope-0-coverage] .vega-bind")
        .first.text_content()
        .endswith("65536")
    )
    assert page.complaints == []


def test_the_menu_picks_the_law(look):
    """Interpolation shows nothing new at the longest context."""
    page = look(1400)
    page.get_by_role("slider", name="Context, tokens").fill("65536")
    page.locator("[data-spec=rope-0-coverage]").get_by_role("combobox").select_option("linear")
    assert "show new angles" not in said(page)
    page.locator("[data-spec=rope-0-coverage]").get_by_role("combobox").select_option("ntk")
    assert "28 pairs show new angles" in said(page)


def test_a_chart_follows_the_window(look):
    """Narrowed to 400 pixels the page still fits."""
    page = look(1400)
    page.set_viewport_size({"width": 400, "height": 900})
    page.wait_for_function("document.querySelector('.chart svg').clientWidth < 400")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_the_page_prints_on_white(look, pictures):
    """Also from a dark screen: dark words, no controls, every row of the tables."""
    page = look(1400, "dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.screenshot(path=pictures / "report-print.png", full_page=True)
    assert luminance(page.evaluate("getComputedStyle(document.body).color")) < 0.1
    assert not page.locator(".vega-bindings").first.is_visible()
    assert page.evaluate(
        "[...document.querySelectorAll('.tall')].every(one => one.scrollHeight <= one.clientHeight)"
    )
