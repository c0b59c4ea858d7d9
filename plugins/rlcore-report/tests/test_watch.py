"""`rlcore watch`: the page of a run that trains, for the owner of the token only."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from browser import PAGES, go, launch, opened
from conftest import STEPS, rlcore, rows, write_rows
from rlcore_report.watch import Watch
from rlcore_tests.runs import small_run

from rlcore.errors import ConfigError
from rlcore.testing.waiting import HANG_S, wait_until


@pytest.fixture
def watching():
    """Return a function that serves directories in a thread and returns the server."""
    servers = []

    def serve(*directories):
        server = Watch(directories, 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def get(address, host=""):
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_the_page_and_its_data_are_served(trained, watching):
    server = watching(trained)

    status, page = get(server.address)
    _, data = get(f"{server.address}data")

    assert status == 200
    assert b'data-live="data"' in page
    assert b"connect-src 'self'" in page
    assert json.loads(gzip.decompress(data))["runs"][0]["step"] == STEPS


def test_data_is_new_only_if_a_file_has_changed(copy, watching):
    server = watching(copy)

    first, same = server.data(), server.data()
    write_rows(copy / "metrics.jsonl", [*rows(copy / "metrics.jsonl"), {"step": STEPS + 1, "reward/mean": 1.0}])
    newer = json.loads(gzip.decompress(server.data()))

    assert first is same
    assert newer["runs"][0]["step"] == STEPS + 1


@pytest.mark.parametrize("path", ["", "wrong/", "wrong/data", "data"])
def test_without_the_token_nothing_is_served(trained, watching, path):
    server = watching(trained)

    status, text = get(f"http://127.0.0.1:{server.server_port}/{path}")

    assert (status, text[:9]) == (403, b"The token")


def test_another_host_name_is_refused(trained, watching):
    server = watching(trained)

    assert get(server.address, host="evil.example")[0] == 403
    assert get(server.address, host=f"localhost:{server.server_port}")[0] == 200


def test_it_listens_on_this_machine_only_and_each_watch_has_its_own_token(trained, watching):
    one, other = watching(trained), watching(trained)

    assert one.server_address[0] == "127.0.0.1"
    assert one.token != other.token
    assert len(one.token) >= 20


def test_other_paths_do_not_exist(trained, watching):
    server = watching(trained)

    assert get(f"{server.address}run.json")[0] == 404
    assert get(f"{server.address}../run.json")[0] == 404


def test_a_port_in_use_is_an_input_error(trained):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = rlcore("watch", str(trained), "--port", str(port))

    assert done.returncode == 2
    assert done.stderr == (
        f"error: --port {port} cannot be used: Address already in use\nType  --port 0  for any free port\n"
    )


def test_a_port_that_does_not_exist_is_an_input_error(trained):
    with pytest.raises(ConfigError, match="--port 70000 cannot be used"):
        Watch([trained], 70000)


def test_a_run_that_disappears_is_named(copy, watching):
    server = watching(copy)
    for name in ("run.json", "metrics.jsonl"):
        (copy / name).unlink()

    status, text = get(f"{server.address}data")

    assert status == 410
    assert f"'{copy}' is not a run" in text.decode()


def test_text_ends_with_the_run(trained):
    done = rlcore("watch", str(trained), "--text")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"step {STEPS} of {STEPS}: finished, reward ")


def test_ctrl_c_ends_the_watch(trained):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores ctrl-C
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlcore", "watch", str(trained), "--port", "0"], stdout=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANG_S) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait(timeout=HANG_S)


def test_the_page_follows_a_run_and_says_that_it_was_killed(tmp_path, watching):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs a browser: pip install playwright")
    settings = small_run(tmp_path, "trainer.prompts_per_step=2", "data.eval=", steps=100_000)
    training = subprocess.Popen(
        [sys.executable, "-m", "rlcore", "train", *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        metrics = tmp_path / "r" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 5000)
        server = watching(tmp_path / "r")
        with playwright.sync_playwright() as driver, opened(launch(driver), server.address, offline=False) as page:
            steps = page.inner_text(".value >> nth=0")
            assert page.inner_text("h1 + .badge") == "running"
            page.wait_for_function(
                "old => document.querySelector('.value').innerText !== old", arg=steps, timeout=HANG_S * 1000
            )
            os.kill(training.pid, signal.SIGKILL)
            training.wait(timeout=HANG_S)
            page.wait_for_selector("h1 + .badge.killed", timeout=HANG_S * 1000)
            assert "The run was killed" in page.inner_text("main")
            for name in PAGES:
                go(page, name)
    finally:
        training.kill()
        training.wait(timeout=HANG_S)
