"""A headless browser for tests: Playwright with the Chromium of the system or its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PAGES = ("overview", "metrics", "samples", "distributions", "time", "evaluation")


def launch(playwright: Any) -> Any:
    """Start Chromium, or skip the test with the reason."""
    from playwright.sync_api import Error

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        return playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
    except Error as error:
        pytest.skip(f"no browser: {str(error).splitlines()[0]}; type  apt-get install chromium  or  playwright install")


@contextmanager
def opened(browser: Any, address: str, *, scheme: str = "light", offline: bool = True) -> Iterator[Any]:
    """Open a page; afterwards, fail if it wrote to the console, raised, asked a question or loaded anything else."""
    context = browser.new_context(color_scheme=scheme, offline=offline, viewport={"width": 1280, "height": 900})
    page, problems = context.new_page(), []
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda it: problems.append(f"request {it.url}") if not it.url.startswith(address[:24]) else None)
    page.goto(address)
    page.wait_for_selector("main h2, main .card")
    yield page
    context.close()
    assert problems == []


def go(page: Any, name: str) -> None:
    """Open one of the pages through the navigation."""
    page.click(f'nav a[href="#{name}"]')
    page.wait_for_selector(f'nav a[href="#{name}"][aria-current="page"]')


def write(html: str, path: Path) -> str:
    """Write a page and return its address."""
    path.write_text(html, encoding="utf-8")
    return f"file://{path}"
