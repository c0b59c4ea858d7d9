"""Fixtures of the reward tests, and environment variables that are set before anything is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlcore.testing.waiting import HANG_S


def pytest_configure(config):
    from rlcore_tests.gpus import hide_gpus

    hide_gpus(config)


class Answers:
    """Configured responses of the test server, and the requests that it received."""

    def __init__(self):
        self.asked, self.paths, self.headers, self.failures = [], [], [], []
        self.wait_s, self.at_once, self.most_at_once = 0.0, 0, 0
        self.lock = threading.Lock()
        self.answer = lambda body: {"scores": [float(len(one["completion"])) for one in body["samples"]]}


@pytest.fixture
def server():
    """Start an HTTP server that is configured with `server.answers`."""
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            with answers.lock:
                answers.at_once += 1
                answers.most_at_once = max(answers.most_at_once, answers.at_once)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answers.asked.append(body)
            answers.paths.append(self.path)
            answers.headers.append(dict(self.headers))
            time.sleep(answers.wait_s)
            status = answers.failures.pop(0) if answers.failures else 200
            content = json.dumps(answers.answer(body)).encode() if status == 200 else b"busy"
            with answers.lock:
                answers.at_once -= 1
            try:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                pass  # the client has closed the connection

        def log_message(self, *arguments):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.daemon_threads = True
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    found.answers, found.url = answers, f"http://127.0.0.1:{found.server_port}/score"
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def score():
    """Return a function that scores samples in a separate process, as in a run."""
    from rlcore.protocols.reward import RewardSpec
    from rlcore.rewards.executor import RewardExecutor

    def run(target, samples, *, timeout_s=HANG_S, options=None, **more):
        options = {**more, **(options or {})}
        fields = {"prompt": "p", "num_tokens": 3, "finish_reason": "stop"}
        rows = [{**fields, "prompt_id": i, "sample_id": i, **sample} for i, sample in enumerate(samples)]
        with RewardExecutor([RewardSpec("mine", target, options)], timeout_s=timeout_s) as executor:
            return executor.score(rows)

    return run
