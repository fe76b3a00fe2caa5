"""What MkDocs does to every page besides: digits of one number stay on one line."""

import re

# code stays as it is; elsewhere a space between digits groups them by thousands, or is beside ±
_CODE_OR_SPACE = re.compile(
    r"(<pre.*?</pre>|<code.*?</code>|<[^>]*>)|(?<=\d) (?=\d{3}\b|±)|(?<=±) (?=\d)", re.S
)


def on_page_content(html: str, **_: object) -> str:
    """The page with narrow spaces that do not break inside of numbers."""
    return _CODE_OR_SPACE.sub(lambda found: found[1] or "\u202f", html)
