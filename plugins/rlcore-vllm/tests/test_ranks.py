"""Two ranks, as one shared engine or one engine each, sample the same as `hf`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_hf, requests_of, run, tokens
from models import save_tiny
from test_equals_hf import PROMPTS, changed_weights

from rlcore.testing.waiting import HANG_S

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("scheduling")]


@pytest.mark.parametrize(("tensor_parallel", "places"), [(2, [(0, True), (0, False)]), (1, [(0, True), (1, True)])])
def test_two_ranks_sample_the_same_as_hf_before_and_after_new_weights(tensor_parallel, places, small_model, tmp_path):
    model = save_tiny("Qwen2", tmp_path, small_model)
    command = [sys.executable, str(Path(__file__).parent / "rank.py")]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([*command, str(rank), "2", str(tensor_parallel), model, str(tmp_path)], env=path)
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=HANG_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    reference = make_hf(model)
    wanted = [tokens(run(reference, requests_of(PROMPTS)))]
    reference.load_weights(iter(changed_weights(model, 1.3)), 1)
    wanted.append(tokens(run(reference, requests_of(PROMPTS))))
    for rank, place in zip(ranks, places):
        greedy = [{int(name): ids for name, ids in part.items()} for part in (rank["sampled"][0], rank["sampled"][2])]
        assert greedy == wanted
        assert (rank["mesh"]["dp_rank"], rank["mesh"]["returns"]) == place
    assert ranks[0]["sampled"][1] == ranks[1]["sampled"][1], "ranks of one engine must sample the same"
    for rank in ranks:
        assert rank["sampled"][4] == rank["sampled"][3], (
            "the same weights must change nothing in the middle of responses"
        )
        assert any(len(set(versions)) == 2 for versions in rank["versions"]), "no response was in flight"
    assert ranks[0]["versions"] == ranks[1]["versions"]
