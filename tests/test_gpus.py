"""GPUs are hidden from ordinary tests, and each host uses its own GPU."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from rlcore_tests.gpus import hide_gpus

from rlcore.controller.host import Host, HostInfo
from rlcore.controller.runtime import LocalStore

ROOT = Path(__file__).parents[1]
CONFTESTS = sorted(ROOT.glob("tests/conftest.py")) + sorted(ROOT.glob("plugins/*/tests/conftest.py"))


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("", ""),
        ("not slow", ""),
        ("not gpu", ""),
        ("gpu", "0,1"),
        ("gpu and not slow", "0,1"),
        ("(gpu or slow)", "0,1"),
    ],
)
def test_gpus_are_seen_by_those_who_ask_for_tests_of_them(monkeypatch, marks, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    hide_gpus(SimpleNamespace(option=SimpleNamespace(markexpr=marks)))

    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize("path", CONFTESTS, ids=lambda path: path.parts[-3])
def test_conftest_hides_gpus(path):
    assert "hide_gpus(config)" in path.read_text()


def test_these_tests_see_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_host_selects_its_gpu_before_a_worker_is_made(monkeypatch):
    selected = []
    monkeypatch.setattr("torch.cuda.set_device", selected.append)

    for device in ("cpu", "cuda:0"):
        Host(HostInfo(pool="main", rank=0, world_size=1, device=device), LocalStore())

    assert selected == ["cuda:0"]
