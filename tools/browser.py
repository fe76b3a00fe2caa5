"""The system's Chromium, for what has to be looked at: the report, the handles, the site."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, Request, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def open_browser() -> Generator[Browser]:
    """A browser without a window; an error where none is in the search path."""
    if BROWSER is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is in the search path")
    with sync_playwright() as driver:
        # containers run as root, where Chromium has no sandbox
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


def complaints(page: Page, address: str) -> list[str]:
    """What will go wrong on ``page``: words of its console, errors, requests beyond ``address``."""
    messages: list[str] = []

    def request(request: Request) -> None:
        if not request.url.startswith(address):
            messages.append(request.url)

    page.on("console", lambda said: messages.append(said.text))
    page.on("pageerror", lambda raised: messages.append(str(raised)))
    page.on("request", request)
    return messages
