"""A teacher behind a server, which computes `prompt_logprobs` in the format of vLLM with a real model."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from rlcore_algorithms.served_teacher import ServedTeacherWorker, TeacherServerConfig, log_probs_of

from rlcore.cli.train import run as train
from rlcore.errors import ConfigError, InfrastructureError, RunError
from rlcore.models.load import copy_tokenizer, load_model
from rlcore.protocols import WorkerContext
from rlcore.quickstart import locate
from rlcore.testing.training import make_batch, save_model


class Teacher:
    """A model, the requests that it received, and the status codes of its next failures."""

    def __init__(self, path):
        self.model, self.asked, self.failures = load_model(path), [], []
        self.lock = threading.Lock()

    def answer(self, body):
        ids = torch.tensor(body["prompt"])
        with self.lock, torch.no_grad():
            table = self.model(ids[None]).logits[0].log_softmax(-1)
        found = [None]
        for place, token in enumerate(body["prompt"][1:]):
            log_prob = float(table[place, token])
            rank = int((table[place] > log_prob).sum()) + 1
            found.append({str(token): {"logprob": log_prob, "rank": rank, "decoded_token": "x"}})
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "prompt_logprobs": found}
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "t", "choices": [choice]}


@pytest.fixture
def serve():
    """Return a function that starts the server of a model and returns the teacher and its address."""
    servers = []

    def start(path):
        teacher = Teacher(path)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                teacher.asked.append((self.path, body))
                status = teacher.failures.pop(0) if teacher.failures else 200
                content = json.dumps(teacher.answer(body)).encode() if status == 200 else b"busy"
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return teacher, f"http://127.0.0.1:{servers[-1].server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def worker(url, **settings):
    return ServedTeacherWorker(
        WorkerContext(role="teacher"), server=TeacherServerConfig(url=url, model="t", **settings)
    )


def rows_of(batch):
    return [ids.tolist() for ids in batch["input_ids"].split(batch.lengths.tolist())]


def test_log_probs_are_those_of_the_served_model(serve, tmp_path):
    path, batch = save_model("qwen2", tmp_path), make_batch()
    teacher, url = serve(path)

    found = worker(url, max_concurrency=2).log_probs(batch)["ref_log_probs"]

    model, wanted = load_model(path), []
    for row in rows_of(batch):
        ids = torch.tensor(row)
        table = model(ids[None]).logits[0, :-1].detach().log_softmax(-1)
        wanted += [0.0, *table.gather(1, ids[1:, None])[:, 0].tolist()]
    assert torch.allclose(found, torch.where(batch["loss_mask"], torch.tensor(wanted), 0.0), atol=1e-5)
    assert {place for place, _ in teacher.asked} == {"/v1/completions"}
    assert sorted(body["prompt"] for _, body in teacher.asked) == sorted(rows_of(batch))
    assert all(body["prompt_logprobs"] == 0 and body["model"] == "t" for _, body in teacher.asked)


def test_a_busy_server_is_asked_again_and_a_refusal_ends_the_call(serve, tmp_path):
    teacher, url = serve(save_model("qwen2", tmp_path))
    batch = make_batch().take([0])
    teacher.failures = [503]

    assert worker(url).log_probs(batch)["ref_log_probs"].any()

    for failures, error, asked in (([400] * 9, RunError, 1), ([503] * 9, InfrastructureError, 2)):
        teacher.failures, teacher.asked = failures, []
        with pytest.raises(error, match=r"the teacher server at .* answered /completions with") as raised:
            worker(url, retries=1).log_probs(batch)
        assert len(teacher.asked) == asked
        assert isinstance(raised.value, InfrastructureError) == (error is InfrastructureError)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"text": "x"}]},
        {"choices": [{"prompt_logprobs": [None, {"8": {"logprob": -1.0}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": float("nan")}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}]}]},
        "no",
    ],
)
def test_an_answer_without_the_log_probs_of_the_tokens_is_an_error(answer):
    with pytest.raises(RunError, match="the teacher's server returned"):
        log_probs_of(answer, [5, 7])


def settings(directory, *more):
    base = ["preset=quickstart", "algorithm=distillation", "trainer.prompts_per_step=8", "trainer.steps=2"]
    base += ["sampling.samples_per_prompt=2", "data.eval=", "reward.items=[]", "runtime=local", "trackers=jsonl"]
    return [*base, "plugins.hooks=[]", "run.name=r", f"run.directory={directory}", *more]


def test_a_run_with_a_served_teacher_is_that_with_the_teacher_as_a_role(serve, tmp_path):
    path, model = tmp_path / "teacher", load_model(locate("quickstart:model"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(path)
    copy_tokenizer(Path(locate("quickstart:model")), path)
    _, url = serve(str(path))
    train(settings(tmp_path / "role", f"algorithm.teacher={path}"), dry_run=False)
    train(settings(tmp_path / "served", f"algorithm.server={{url: '{url}', model: t}}"), dry_run=False)

    one, two = (
        [json.loads(line) for line in (tmp_path / name / "r" / "metrics.jsonl").read_text().splitlines()]
        for name in ("role", "served")
    )
    assert one[-1]["distillation/kl"] > 0.001
    for name in ("distillation/kl", "actor/loss", "actor/grad_norm"):
        assert [line[name] for line in two[1:]] == pytest.approx([line[name] for line in one[1:]], rel=1e-3), name


def test_another_sampling_temperature_is_refused_before_the_start(tmp_path):
    more = ["algorithm.server={url: 'http://h/v1', model: t}", "sampling.temperature=0.7"]

    with pytest.raises(
        ConfigError, match=r"sampling.temperature=0.7, but a server returns(.|\n)*algorithm.teacher=DIR"
    ):
        train(settings(tmp_path, *more), dry_run=False)
