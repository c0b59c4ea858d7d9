"""The page in a real browser: it opens without an error, filters, compares, and can be used with the keyboard."""

from __future__ import annotations

import json

import pytest
from browser import PAGES, go, launch, opened, write
from conftest import STEPS, rows, write_rows
from rlcore_report.page import page as make_page
from rlcore_report.run import read_run

from rlcore.testing.waiting import HANG_S

playwright = pytest.importorskip("playwright.sync_api", reason="needs a browser: pip install playwright")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = launch(driver)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(trained, tmp_path_factory):
    return write(make_page([read_run(trained)]), tmp_path_factory.mktemp("page") / "report.html")


def texts(page, selector):
    return page.locator(selector).all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_opens_without_an_error(browser, address, scheme):
    with opened(browser, address, scheme=scheme) as page:
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        for name in PAGES:
            go(page, name)
            assert page.locator("main h2, main .card").count() > 0
        go(page, "metrics")
        page.wait_for_selector("canvas")
        assert page.locator("canvas").count() > 30


def test_the_overview_says_what_ran_and_what_is_wrong(browser, address):
    with opened(browser, address) as page:
        shown = page.inner_text("body")

    for wanted in ("finished", f"{STEPS} of {STEPS}", "grpo", "Held-out pass rate", "reward/mean"):
        assert wanted in shown


def test_metrics_are_filtered_by_name_and_smoothed(browser, address):
    with opened(browser, address) as page:
        go(page, "metrics")
        page.fill("#search", "reward mean")
        assert texts(page, "figcaption h3") == ["reward/mean"]
        page.fill("#search", "no such metric")
        assert "No metric" in page.inner_text("main")
        page.goto(f"{address}#metrics/actor/entropy")
        assert texts(page, "figcaption h3") == ["actor/entropy"]


def test_samples_are_filtered_and_sorted(browser, address, trained):
    samples = rows(trained / "samples.jsonl")
    late = [sample for sample in samples if sample["step"] >= 10]
    rewards = sorted((sample["reward"] for sample in samples), reverse=True)
    with opened(browser, address) as page:
        go(page, "samples")
        assert page.inner_text("[role=status] >> nth=-1") == f"{len(samples)} of {len(samples)} samples"
        page.select_option("#order", "best")
        assert page.inner_text(".reward >> nth=0") == f"reward {rewards[0]:.4g}"
        page.fill("#from", "10")
        assert page.inner_text("main [role=status]") == f"{len(late)} of {len(samples)} samples"
        page.fill("#words", samples[-1]["prompt"].upper())
        assert set(texts(page, "pre.prompt")) == {samples[-1]["prompt"]}


def test_a_group_is_shown_side_by_side_and_closed_with_escape(browser, copy, tmp_path):
    group = [
        {"step": 1, "prompt": "2+2=", "completion": str(i), "reward": float(i == 4), "prompt_id": 7}
        for i in range(3, 7)
    ]
    later = {"step": 2, "prompt": "2+2=", "completion": "four", "reward": 0.5, "prompt_id": 7}
    write_rows(copy / "samples.jsonl", [*group, later])
    with opened(browser, write(make_page([read_run(copy)]), tmp_path / "page.html")) as page:
        go(page, "samples")
        page.click("text=Group of 4 >> nth=0")
        assert texts(page, "dialog pre.response") == ["3", "4", "5", "6"]
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached", timeout=HANG_S * 1000)
        page.click("text=Over time >> nth=0")
        assert "four" in texts(page, "dialog pre.response")


def test_completions_are_text_whatever_they_hold(browser, copy, tmp_path):
    evil = '<script>alert(1)</script><img src=x onerror=alert(2)><a href="javascript:alert(3)">x</a>'
    odd = ["\u202e‮abc", "🧮" * 1_000_000, "\x00\x1b[31m", "</script></pre>"]
    sample = {"step": 1, "prompt": evil, "completion": evil, "reward": 1.0, "prompt_id": 1, "columns": {evil: evil}}
    messages = {"episode_messages": [{"role": evil, "content": evil}, {"role": "tool", "content": [evil]}, 3]}
    samples = [sample, sample | {"columns": messages}, *({**sample, "completion": text} for text in odd)]
    write_rows(copy / "samples.jsonl", samples)
    about = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(about | {"name": evil, "config": {evil: evil}}))
    with opened(browser, write(make_page([read_run(copy)]), tmp_path / "page.html")) as page:
        assert page.inner_text("h1") == evil
        for name in PAGES:
            go(page, name)
        go(page, "samples")
        assert evil in texts(page, "pre.response")
        assert page.locator("main img, main script, main a").count() == 0


def test_the_keyboard_is_enough(browser, address):
    with opened(browser, address) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        page.keyboard.press("3")
        page.wait_for_selector('nav a[href="#samples"][aria-current]')
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "words"
        page.keyboard.type("3sort")
        assert page.input_value("#words") == "3sort"


def test_everything_has_an_accessible_name(browser, address):
    nameless = """() => [...document.querySelectorAll("button, input, select, a, table, dialog, [role=img], nav")]
        .filter((it) => !(it.getAttribute("aria-label") || it.textContent.trim() || it.closest("label")?.textContent.trim()))
        .map((it) => it.outerHTML.slice(0, 200))"""
    with opened(browser, address) as page:
        for name in PAGES:
            go(page, name)
            assert page.evaluate(nameless) == [], name


def test_the_theme_can_be_changed(browser, address):
    with opened(browser, address) as page:
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("header button")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_runs_are_drawn_on_top_of_each_other(browser, trained, copy, tmp_path):
    about = json.loads((copy / "run.json").read_text())
    about["config"]["optimizer.lr"] = 0.5
    (copy / "run.json").write_text(json.dumps(about | {"name": "other"}))
    both = make_page([read_run(trained), read_run(copy)])
    with opened(browser, write(both, tmp_path / "page.html")) as page:
        assert "optimizer.lr" in page.inner_text("table[aria-label='Settings that differ']")
        go(page, "metrics")
        label = page.get_attribute("[role=img] >> nth=0", "aria-label")
        assert "r from" in label
        assert "other from" in label
        page.uncheck("input[type=checkbox] >> nth=0")
        assert "r from" not in page.get_attribute("[role=img] >> nth=0", "aria-label").replace("other from", "")


def test_an_empty_run_is_shown(browser, copy, tmp_path):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (copy / name).write_text("")
    with opened(browser, write(make_page([read_run(copy)]), tmp_path / "page.html")) as page:
        for name in PAGES:
            go(page, name)
        assert "no held-out prompts" in page.inner_text("main")


def test_a_recording_adds_held_out_prompts_tokens_and_a_timeline(browser, recorded, tmp_path):
    with opened(browser, write(make_page([read_run(recorded)]), tmp_path / "page.html")) as page:
        go(page, "evaluation")
        assert page.locator("table.grid tr").count() == 16
        page.click("table.grid button >> nth=0")
        assert len(texts(page, "dialog pre.response")) == 4
        page.keyboard.press("Escape")
        go(page, "time")
        assert [text.partition(",")[0] for text in texts(page, ".lane span")] == ["controller", "main rank 0"]
        assert "rollout.generate" in page.get_attribute(".track >> nth=1", "aria-label")
        assert {"rollout.generate", "weight sync"} <= set(texts(page, "ul.legend li"))
        assert page.locator(".track i").count() > 6
        page.select_option("select[aria-label='Step of the timeline']", "8")
        assert page.locator(".track i.striped").count() > 0, "the evaluation of step 8"
        assert "no call" in page.inner_text("table[aria-label=Waiting]")
        go(page, "samples")
        page.select_option("#kind", "training")
        page.select_option("#tint", "log_prob")
        spans = page.locator("pre[aria-label^='response, token by token'] >> nth=0").locator("span")
        assert spans.count() > 1
        assert "log-prob -" in spans.first.get_attribute("title")
        assert len({spans.nth(i).evaluate("it => it.style.backgroundColor") for i in range(spans.count())}) > 1
        assert set(page.locator("#tint option").all_inner_texts()) == {
            "nothing", "surprise (low log-prob)", "advantage", "log-prob gap (trainer minus engine)", "tokens not learned from"
        }  # fmt: skip
        page.select_option("#tint", "advantage")
        assert [text.partition(" (")[0] for text in texts(page, "ul.legend li")] == ["reinforced", "discouraged"]
        page.select_option("#order", "best")
        best = page.locator(
            "pre[aria-label='response, token by token, colored by advantage'] >> nth=0 >> span >> nth=0"
        )
        assert "advantage " in best.get_attribute("title")
        assert "--run1" in best.get_attribute("style")
