"""Look at every page of the built site in Chromium, as a reader on a desk and one with a phone.

    python -m tools.site_check [SITE] [PAGE ...]

Each page is opened at two widths, light and dark. What is wrong is printed, a line each: code that
is cut, anything that goes sideways, small labels, weak contrast, words on the console, requests to
elsewhere, a title that is not the navigation's or is another page's too, too many words. Then
words and questions are typed into the search, and answers reached from the first page. Ends with 1
if anything was wrong.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple

from playwright.sync_api import Browser, Page
from tools.browser import BROWSER, complaints, open_browser

WIDTHS = (390, 1280)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SMALLEST_LABEL = 9.0  # pixels on a phone

#: Words that a page may have, its code and tables included; the reference is not counted.
PAGE_WORDS = 1_800
#: Pages that may have more: the lesson, the equations and the sources line by line, and what
#: phasor is made of, and the table of names. Recipes for cached keys and images have fewer.
LONGER = {
    "lesson/": 3_500,
    "seeds/": 2_600,
    "architecture/": 2_200,
    "names/": 3_000,
    "cached-keys/": 1_400,
    "dynamic-resolution/": 1_200,
}
#: Pages to look a name or a recipe up in, each with a budget of its own in `LONGER`.
TO_LOOK_UP = ("names/", "cached-keys/", "dynamic-resolution/")
#: Words of all pages for users but these and the reference, and of their tables.
ALL_WORDS, TABLE_WORDS = 33_200, 6_300
#: Pages for those who change phasor, and the words of all of them.
FOR_MAINTAINERS = ("architecture/", "decisions/", "recipes/")
MAINTAINERS_WORDS = 8_000
#: Words that a reader types into the search, by the page that has to be among the first three
#: found: words of other programs, the commands, and the glossary.
WORDS: dict[str, tuple[str, ...]] = {
    "attention/": ("gqa",),
    "cached-keys/": ("kv cache",),
    "command-line/": ("show", "diff", "report", "presets", "demo"),
    "conventions/": (
        *("rope_theta", "head_dim", "rotary_dim", "partial_rotary_factor", "rotate_half"),
        *("is_neox_style", "base", "inv_freq", "position_ids", "freqs_cis", "rope_scaling"),
        *("rope_type", "original_max_position_embeddings", "mscale", "softmax_factor"),
        *("query_factor", "pairing", "interleaved", "gain", "nope", "axes"),
    ),
    "converting/": ("convert", "permute", "quantized"),
    "dynamic-resolution/": ("dynamic resolution", "scalerope"),
    "exporting/": ("onnx fp16", "tensorrt"),
    "extending/": ("extend", "extrapolation", "128k"),
    "identify/": ("identify",),
    "laws/": ("turns", "p-rope", "longrope", "dynamic ntk"),
    "names/": ("riflex", "drope", "v2pe"),
    "precision/": ("bf16",),
    "translate/": ("translate",),
    "verify/": ("verify",),
}
#: The same for questions in words of their own.
SEARCHES: dict[str, str] = {
    **{word: page for page, words in WORDS.items() for word in words},
    "vit": "images-video-audio/",
    "garbage output": "questions/#garbage-output",
    "long context fails": "questions/#long-context-fails",
    "draw me a pair": "questions/#draw-me-a-pair",
    "why do base 10000 and 500000 differ at 30k": "questions/#why-do-base",
    "which pairing has this code": "questions/#which-pairing",
    "rotate for my ViT": "questions/#how-do-i-rotate-for-my-vit",
}
#: Groups of the navigation that are open on a desk.
OPEN_GROUPS = ["Start", "Write models"]
#: What a reader wants, the links that lead to it from the first page, and words of the answer.
WAYS: dict[str, tuple[str, ...]] = {
    "draw me a pair": ("Play with a rotation", "A query at position"),
    "why do base 10000 and 500000 differ at 30k": (
        "Questions and answers",
        "A larger base slows all pairs but the first",
    ),
    "which pairing has this code": ("phasor identify", "half"),
    "rotate for my ViT": ("Images, video, audio", "vision transformer"),
}

#: What no page and no message says, as a regular expression, and what is plain English for it.
AVOIDED: dict[str, str] = {
    r"\bverbs?\b": "function",
    r"\b(they|models|functions|ropes|rotations|two) part\b|\bparted\b": "differ",
    r"\bsay (`?-|`\w+=|\w+=)": "pass, give, use",
    r"\bmade module": "an instance of a module",
    r"\blike (key|query)\b": "a matching key",
    r"\bin the words of\b|\bby (its|their) own words\b": "with its own keys",
    r"\b(come|comes|came|coming) round\b": "complete a turn",
    r"\bhas to be given\b|\bis to be given\b": "needs",
    r"\b(what|whatever) is said\b|\bis the one said\b": "the message, the one with",
    r"\bwho (reads|saves|took|asks)\b|\bwhoever\b": "a noun: the reader, the program",
    r"\btells attention where\b|\bwhere tokens stand\b": "positions of tokens",
    r"\bof one's own\b": "your own",
    r"\baccused\b": "reported",
    r", for (it|they|none|there|nothing|both) ": "because",
    r"\b(tokens?|patch(es)?|numbers|file|package|version) stands?\b(?! out)": "is at, is in",
    r"\bwants? a gradient\b": "requires",
    r"\bno Rope says\b|\bcannot be said\b|\bsaid by a Rope\b": "no Rope can express",
    r"\bby a (law|word|base|name|switch) of (its|their) own\b": "by its own",
    r"\bunlike those of\b": "different from",
    r"\bwhatever its file says\b|\bwithout a word\b": "always, silently",
    r"\bsays otherwise\b": "contradicts",
    r"\bgiven by their names\b": "keyword arguments",
    r"\bin place of\b": "instead of",
    r"\botherwise than\b": "unlike, differently from",
}

# what runs in each page
SCRIPT = Path(__file__).with_suffix(".js")


class Seen(NamedTuple):
    """One page."""

    path: str
    faults: list[str]
    words: int
    table_words: int
    title: str


def not_plain(text: str) -> list[str]:
    """Words of a text that are `AVOIDED`, each with a few before it and what to write."""
    return [
        f"{text[max(0, match.start() - 30) : match.end()]!r}: {better}"
        for pattern, better in AVOIDED.items()
        for match in re.finditer(pattern, text, re.I)
    ]


@contextmanager
def serve(site: Path) -> Generator[str]:
    """The address of a server of the folder ``site``, on this machine alone."""

    class Quiet(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("Cache-Control", "max-age=600")  # styles and scripts come once
            super().end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def pages_of(site: Path) -> list[str]:
    """Every page, as its address ends."""
    pages = sorted(page.parent.relative_to(site).as_posix() for page in site.rglob("index.html"))
    return ["" if page == "." else f"{page}/" for page in pages]


def look_at(page: Page, messages: list[str], root: str, path: str) -> Seen:
    """What is wrong with one page, and how many words it has; ``messages`` are `complaints`."""
    messages.clear()
    faults: dict[str, None] = {}
    words, table_words, title = 0, 0, ""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 844 if width < 500 else 900})
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            if not words:
                page.goto(root + path, wait_until="load")
                text, words, table_words = page.evaluate("siteCheck.words()")
                faults |= dict.fromkeys(not_plain(text))
                title, menu_title = page.evaluate("siteCheck.titles()")
                if menu_title and title != menu_title:
                    faults[f"is {title!r}, and {menu_title!r} in the navigation"] = None
            for fault in page.evaluate("given => siteCheck.look(...given)", [width > 500, scheme]):
                faults[f"{width}: {fault}"] = None
        if width < 500:
            for name, size in page.evaluate("siteCheck.labels()").items():
                if size < SMALLEST_LABEL:
                    faults[f"{width}: labels of {name} are {size:.1f} px"] = None
    if words > LONGER.get(path, PAGE_WORDS) and not path.startswith("api/"):
        faults[f"{words} words, {LONGER.get(path, PAGE_WORDS)} are allowed"] = None
    return Seen(path, [*faults, *messages], words, table_words, title)


def look_at_all(root: str, paths: list[str]) -> list[Seen]:
    """Every page, in two browsers, each of which opens them in one window."""

    def part(mine: list[str]) -> list[Seen]:
        with open_browser() as browser:
            page = browser.new_page(reduced_motion="reduce")
            page.add_init_script(path=SCRIPT)
            messages = complaints(page, root)
            return [look_at(page, messages, root, path) for path in mine]

    with ThreadPoolExecutor(2) as workers:
        first, second = workers.map(part, (paths[::2], paths[1::2]))
    return sorted(first + second)


def search_site(page: Page, root: str, question: str) -> list[str]:
    """Addresses on the first three pages that the search of an open page finds."""
    field = page.locator(".md-search__input")
    for typed, answered in (("", False), (question, True)):
        field.fill(typed)
        field.press("End")  # it listens to keys
        page.wait_for_function(
            "answered => answered == /matching/.test("
            "document.querySelector('.md-search-result__meta').textContent)",
            arg=answered,
        )
    addresses: list[str] = page.evaluate(
        "[...document.querySelectorAll('.md-search-result__item')].slice(0, 3)"
        ".flatMap(one => [...one.querySelectorAll('a')].map(link => link.href))"
    )
    return [re.sub(r"\?h=[^#]*", "", address.removeprefix(root)) for address in addresses]


def ask(browser: Browser, root: str) -> list[str]:
    """What the search does not find, and what no way leads to."""
    faults: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.add_init_script(path=SCRIPT)
    page.goto(root)  # once: the search reads all pages when it is opened
    page.locator(".md-search__input").focus()
    for question, answer in SEARCHES.items():
        addresses = search_site(page, root, question)
        if not any(address.startswith(answer) for address in addresses):
            faults.append(f"search for {question!r}: {answer} is not in {addresses}")
    page.goto(root)
    groups = page.evaluate("siteCheck.openGroups()")
    if groups != OPEN_GROUPS:
        faults.append(f"the navigation opens {groups}, not {OPEN_GROUPS}")
    for page_path, links in WAYS.items():
        page.goto(root)
        for link in links[:-1]:
            choices = page.locator(".md-nav, article").get_by_role("link", name=link, exact=True)
            if choices.count() == 0:
                faults.append(f"{page_path!r}: no link {link!r} on {page.url}")
                break
            page.goto(str(choices.first.evaluate("link => link.href")))
        else:
            if links[-1] not in page.inner_text("article"):
                faults.append(f"{page_path!r}: no {links[-1]!r} on {page.url}")
    page.close()
    return faults


def main(arguments: list[str]) -> int:
    """Print what is wrong; 1 if anything is."""
    if BROWSER is None and not os.environ.get("CI"):
        print("site_check: no Chromium in the search path, nothing was looked at")
        return 0
    begun = time.monotonic()
    site = Path(arguments[0] if arguments else "site")
    with serve(site) as root:
        seen = look_at_all(root, arguments[1:] or pages_of(site))
        for page in seen:
            for fault in page.faults:
                print(f"{page.path or 'index'}: {fault}")
        with open_browser() as browser:
            unanswered = [] if arguments[1:] else ask(browser, root)
    titles = Counter(page.title for page in seen)
    unanswered += [
        f"{number} pages are called {title!r}" for title, number in titles.items() if number > 1
    ]
    print(*unanswered, sep="\n", end="\n" if unanswered else "")
    maintainers = sum(page.words for page in seen if page.path.startswith(FOR_MAINTAINERS))
    excluded = ("api/", *FOR_MAINTAINERS, *TO_LOOK_UP)
    counted = [page for page in seen if not page.path.startswith(excluded)]
    words = sum(page.words for page in counted)
    table_words = sum(page.table_words for page in counted)
    longest = sorted(counted, key=lambda page: -page.words)[:12]
    print("longest:", *(f"{page.path or 'index'} {page.words}" for page in longest))
    print(
        f"{len(seen)} pages in {time.monotonic() - begun:.0f} s; without the reference {words} "
        f"words ({ALL_WORDS} are allowed), {table_words} of them in tables ({TABLE_WORDS}); "
        f"for maintainers {maintainers} ({MAINTAINERS_WORDS})"
    )
    is_over = words > ALL_WORDS or table_words > TABLE_WORDS or maintainers > MAINTAINERS_WORDS
    too_many = is_over and not arguments[1:]
    return int(too_many or bool(unanswered) or any(page.faults for page in seen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
