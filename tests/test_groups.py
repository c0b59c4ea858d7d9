"""Groups and dispatch modes, with the same results on both runtimes."""

import time

import pytest
import torch

from rlcore.controller.group import spawn
from rlcore.controller.host import Reply
from rlcore.controller.make import make_runtime
from rlcore.controller.pool import PoolConfig, RuntimeConfig, check_capacity
from rlcore.controller.record import Record
from rlcore.data.batch import Batch
from rlcore.errors import CapacityError, ConfigError
from rlcore.testing.waiting import HANG_S
from rlcore.types import CallTime
from tests.workers import Echo, Twins

NAMES = ["local", "ray"]


def batch(rows=5):
    return Batch.of(
        lengths=[1 + i % 2 for i in range(rows)],
        tokens={
            "input_ids": range(sum(1 + i % 2 for i in range(rows))),
            "x": torch.arange(sum(1 + i % 2 for i in range(rows))) / 2,
        },
        rows={"prompt_id": list(range(rows)), "text": [f"t{i}" for i in range(rows)]},
    )


@pytest.fixture(scope="module", params=NAMES)
def runtime(request):
    runtime = make_runtime(RuntimeConfig(name=request.param, call_timeout_s=HANG_S))
    runtime.start({"main": PoolConfig(devices_per_node=2, device="cpu")}, {})
    yield runtime
    runtime.shutdown()


@pytest.fixture(scope="module")
def echo(runtime):
    return spawn(Echo, runtime, role="echo", pool="main")


@pytest.mark.parametrize("rows", [5, 4, 1, 0])
def test_uneven_and_empty_shares_return_in_order(echo, rows):
    result = echo.echo(batch(rows))

    assert result.local().merge(batch(rows)).columns == batch(rows).columns
    assert echo.double(batch(rows)).fetch("double").tolist() == (batch(rows)["input_ids"] * 2).tolist()


def test_a_result_can_be_passed_to_the_next_group_and_merged(echo):
    samples = echo.echo(batch())

    samples |= echo.double(samples)
    samples = samples.balance(2)
    samples |= echo.double(samples.select("input_ids")).rename(double="again").drop("seen_by")

    double, again = samples.fetch("double", "again")
    assert double.tolist() == again.tolist()
    assert sorted(samples.fetch("prompt_id").tolist()) == [0, 1, 2, 3, 4]


def test_the_rows_of_a_unit_go_to_one_rank(echo):
    units = batch().with_rows(unit_id=torch.tensor([7, 7, 7, 7, 2]))

    seen_by = echo.seen(units).fetch("seen_by")

    assert seen_by.tolist() == [0, 0, 0, 0, 1]


def test_the_batch_of_the_caller_is_not_changed(echo):
    mine = batch()

    echo.echo(mine)

    assert (len(mine), mine.columns) == (5, batch().columns)


def test_keyword_arguments_are_split(echo):
    assert len(echo.echo(batch=batch())) == 5


def test_mode_all_calls_every_rank(echo):
    assert echo.who("rank") == ["rank 0 of 2", "rank 1 of 2"]
    assert echo.who(greeting="no") == ["no 0 of 2", "no 1 of 2"]


def test_metrics_of_all_shares_are_merged(echo):
    assert echo.count(batch())["rows"].total == 5.0


def test_a_list_goes_to_every_rank(echo):
    assert echo.who([1, 2]) == ["[1, 2] 0 of 2", "[1, 2] 1 of 2"]


def test_a_custom_mode_may_call_some_ranks_only(echo):
    assert echo.first() == 0


def test_a_custom_mode_needs_only_split_and_collect(echo):
    assert echo.dealt(batch()) == [[0, 0, 0], [1, 1]]


def test_one_rank_of_each_share_is_collected(runtime):
    twins = spawn(Twins, runtime, role="twins", pool="main")

    assert twins.dp_size == 1
    assert twins.double(batch()).fetch("seen_by").tolist() == [0, 0, 0, 0, 0]


def test_a_misspelled_method_is_refused_before_anything_is_sent(echo):
    with pytest.raises(AttributeError, match=r"Did you mean 'echo'"):
        echo.ecko(batch())
    with pytest.raises(AttributeError, match="not marked with @dispatch"):
        echo.not_marked()
    with pytest.raises(TypeError, match="argument"):
        echo.echo(batch(), 3)


def test_a_worker_error_keeps_its_type_and_names_its_origin(echo):
    with pytest.raises(ValueError, match="boom") as raised:
        echo.fail()

    assert "echo.fail, rank" in raised.value.__notes__[0]
    assert "raise ValueError" in raised.value.__notes__[0]


def test_batches_of_different_lengths_are_not_split_together(echo):
    with pytest.raises(TypeError):
        echo.echo(batch(), batch(2))


def test_a_submitted_call_returns_a_future(echo):
    futures = [echo.double.submit(batch(n)) for n in (2, 3)]

    assert [len(future.result()) for future in futures] == [2, 3]
    assert len(futures[0].result()) == 2


def test_controller_bytes_do_not_grow_with_tokens(echo, runtime):
    def moved(tokens):
        wide = Batch.of(lengths=[tokens] * 4, tokens={"input_ids": torch.zeros(4 * tokens, dtype=torch.int64)})
        ref = echo.echo(wide)
        record = Record()
        echo.recording(record).double(ref)
        return record.num_bytes

    assert moved(16) == moved(4096)


def test_calls_that_overlap_are_timed_on_each_rank(echo, runtime):
    record, before = Record(), time.time()

    first, second = (echo.recording(record).double.submit(batch(n)) for n in (2, 3))
    second.result(), first.result()

    waits, ranks = ([call for call in record.calls if bool(call.pool) is there] for there in (False, True))
    assert [(call.name, call.pool, call.rank) for call in ranks] == [
        ("echo.double", "main", rank) for rank in (0, 1)
    ] * 2
    assert [call.name for call in waits] == ["echo.double"] * 2
    assert all(before <= call.begin and call.begin + call.seconds <= time.time() + 1e-3 for call in record.calls)
    assert ranks[2].begin < ranks[0].begin, "the first call ran first, and was waited for last"
    slowest = [max(call.seconds for call in pair) for pair in (ranks[:2], ranks[2:])]
    assert sum(slowest) == pytest.approx(record.busy_s["echo.double"])


@pytest.mark.parametrize(("clock", "begin"), [(-3600.0, 100.0), (0.5, 100.5), (3600.0, 103.0)])
def test_a_call_lies_between_submission_and_reply_whatever_the_clock_of_the_host(monkeypatch, clock, begin):
    monkeypatch.setattr("rlcore.controller.record.time.time", lambda: 105.0)
    record = Record()

    record.ran("actor.update", "main", {1: Reply(None, 2.0, begin=100.0 + clock)}, submitted=100.0, waiting=104.0)

    assert record.calls == [
        CallTime("actor.update", "", 0, 104.0, 1.0),
        CallTime("actor.update", "main", 1, begin, 2.0),
    ]


def test_every_dtype_survives_a_call_unchanged(echo):
    wide = Batch.of(
        lengths=[3, 2],
        tokens={name: torch.arange(5).to(dtype) for name, dtype in DTYPES.items()},
        rows={"flag": [True, False], "n": torch.tensor([1, 2], dtype=torch.int32)},
    )

    assert echo.echo(wide).local().merge(wide).columns == wide.columns


DTYPES = {
    "a": torch.bfloat16,
    "b": torch.float16,
    "c": torch.float32,
    "d": torch.int64,
    "e": torch.bool,
    "f": torch.uint8,
}


def test_an_unknown_runtime_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="Did you mean 'local'"):
        make_runtime(RuntimeConfig(name="locl"))


def test_pools_that_never_fit_are_refused_with_the_arithmetic():
    with pytest.raises(CapacityError, match=r"2 devices × 1 cores = 2 CPU on each of 1 nodes; the cluster has 1 CPU"):
        check_capacity({"main": PoolConfig(devices_per_node=2)}, [{"CPU": 1}])
    with pytest.raises(CapacityError, match="other pools also need some: a"):
        check_capacity({"a": PoolConfig(), "b": PoolConfig()}, [{"CPU": 1}])
    gpus = PoolConfig(devices_per_node=8, device="cuda")
    with pytest.raises(CapacityError, match=r"8 GPU on each of 1 nodes; the cluster has .* 4 GPU on node 0"):
        check_capacity({"main": gpus}, [{"CPU": 64, "GPU": 4}, {"CPU": 64, "GPU": 4}])
    check_capacity({"a": PoolConfig(), "b": PoolConfig()}, [{"CPU": 2}])
