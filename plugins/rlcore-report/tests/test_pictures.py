"""Pictures of every page for docs/seeing-a-run.md.

RLCORE_UPDATE_PICTURES=outputs/RUN pytest tests/test_pictures.py   takes them again, of that run
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from browser import PAGES, go, launch, opened, write
from rlcore_report.page import page as make_page
from rlcore_report.run import read_run

playwright = pytest.importorskip("playwright.sync_api", reason="needs a browser: pip install playwright")
DOCS = Path(__file__).parents[3] / "docs"
UPDATE = os.environ.get("RLCORE_UPDATE_PICTURES")


def test_every_page_is_pictured_and_described(recorded, tmp_path):
    target = DOCS / "pictures" if UPDATE else tmp_path
    address = write(make_page([read_run(Path(UPDATE) if UPDATE else recorded)]), tmp_path / "page.html")
    target.mkdir(exist_ok=True)
    with playwright.sync_playwright() as driver, opened(launch(driver), address) as page:
        for name in PAGES:
            go(page, name)
            if name in ("metrics", "overview", "evaluation", "time", "distributions"):
                page.wait_for_selector("canvas")
            if name == "samples":
                page.select_option("#kind", "training")
                page.select_option("#tint", "log_prob")
            if name == "evaluation":
                page.locator("table.grid").evaluate("it => scrollTo(0, it.getBoundingClientRect().top - 420)")
            page.evaluate("() => new Promise(requestAnimationFrame)")
            page.screenshot(path=target / f"report-{name}.png")

    assert all((target / f"report-{name}.png").stat().st_size > 20_000 for name in PAGES), "a page is blank"
    text = (DOCS / "seeing-a-run.md").read_text()
    assert [name for name in PAGES if f"(pictures/report-{name}.png)" not in text] == []
    assert [name for name in PAGES if not (DOCS / "pictures" / f"report-{name}.png").exists()] == []
