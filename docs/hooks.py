"""What MkDocs does besides: groups that are open, whole numbers on one line, formulas."""

import re

from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

# code stays as it is; elsewhere a space between digits groups them by thousands, or is beside ±
_CODE_OR_SPACE = re.compile(
    r"(<(pre|code|style|script)\b.*?</\2>|<[^>]*>)|(?<=\d) (?=\d{3}\b|±)|(?<=±) (?=\d)",
    re.S,
)
# the first two groups of the navigation, where neither has the page itself: what Material marks so
# is open on a desk, as by its navigation.expand, and folded in a phone's drawer
_CLOSED = re.compile(
    r'(<input class="md-nav__toggle md-toggle) *("[^>]* id="__nav_[12]" *>)'
)
_BEHIND = ("api/", "architecture/", "decisions/", "recipes/")
# docs/katex is KaTeX 0.19.1 as its package has it; a page without formulas does not load it
_KATEX = """<link rel="stylesheet" href="{0}/katex.min.css">
<script defer src="{0}/katex.min.js"></script>
<script defer src="{0}/auto-render.min.js" onload="renderMathInElement(document.body, {{
  delimiters: [{{left: '\\\\(', right: '\\\\)', display: false}},
               {{left: '\\\\[', right: '\\\\]', display: true}}]}})"></script>
</head>"""


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """A page's text; the search puts those that explain first."""
    if page.url.startswith(_BEHIND):
        page.meta["search"] = {"boost": 0.3}
    return markdown


def on_page_content(html: str, **_: object) -> str:
    """The page with narrow spaces that do not break inside of numbers."""
    return _CODE_OR_SPACE.sub(lambda match: match[1] or "\u202f", html)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """The page with its first two groups open, and with what draws its formulas."""
    output = _CLOSED.sub(r"\1 md-toggle--indeterminate\2", output)
    if 'class="arithmatex"' not in output:
        return output
    return output.replace(
        "</head>", _KATEX.format(get_relative_url("katex", page.url)), 1
    )
