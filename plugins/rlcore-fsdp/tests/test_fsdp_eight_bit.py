"""AdamW with 8-bit moments: close to AdamW; exact resume on the same number of ranks, close on another number."""

import pytest
import torch
from fsdp_cases import PRELOAD, make_fsdp
from rlcore_fsdp import FSDPBackend, FSDPConfig, eight_bit

from rlcore.errors import ConfigError
from rlcore.protocols.backend import ModelConfig
from rlcore.registry import versions
from rlcore.testing import run_ranks
from rlcore.testing.training import make_batch, save_model, shares, train

CODED = {"optimizer": "adamw_8bit"}
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "num_hidden_layers": 1}
"""Sizes at which half a matrix has 8,192 values (quantized), and half an embedding fewer than 4,096 (not quantized)."""
STEPS = 3


def moment_bytes(backend):
    """Return the codes of this rank's moments."""
    total = 0
    for _, _, value in backend._optimizer._state():
        local = eight_bit.local_part(value)
        parts = (local.codes, local.scale) if eight_bit.is_coded(local) else (local,)
        total += sum(part.nbytes for part in parts)
    return total


def save_and_go_on(rank, world, directory, path):
    batch, context = make_batch(), {"rank": rank, "world_size": world}
    share, report = shares(world)[rank], {}
    for name, config in (("plain", {}), ("coded", CODED)):
        backend = make_fsdp(path, config=config, context=context)
        report[name] = train(backend, batch, STEPS, share=share)
        report[f"{name}_bytes"] = moment_bytes(backend)
    if rank == 0:
        (directory / "checkpoint").mkdir()
    torch.distributed.barrier()
    backend.save(directory / "checkpoint")
    report["after"] = train(backend, batch, STEPS, share=share)
    resumed = make_fsdp(path, config=CODED, context=context)
    resumed.load(directory / "checkpoint")
    report["resumed"] = train(resumed, batch, STEPS, share=share)
    pairs = zip(backend.weights(), resumed.weights(), strict=True)
    report["same"] = all(torch.equal(one, other) for (_, one), (_, other) in pairs)
    return report


def total_losses(reports, name):
    return torch.tensor([[row[0] for row in report[name]] for report in reports]).sum(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # torchao's
def test_training_is_close_to_adamw_and_resumes_from_a_checkpoint(tmp_path):
    pytest.importorskip("torchao")
    path = save_model("qwen2", tmp_path / "model", **SIZES)

    reports = run_ranks(2, save_and_go_on, tmp_path, path, preload=PRELOAD, timeout_s=300)
    alone = make_fsdp(path, config=CODED)
    alone.load(tmp_path / "checkpoint")
    moved = train(alone, make_batch(), STEPS)
    other = make_fsdp(path)
    other.load(tmp_path / "checkpoint")
    without_codes = train(other, make_batch(), STEPS)

    plain, coded, after = (total_losses(reports, name) for name in ("plain", "coded", "after"))
    assert not torch.equal(coded, plain)
    torch.testing.assert_close(coded, plain, atol=0.01, rtol=0)
    assert all(report["coded_bytes"] < 0.35 * report["plain_bytes"] for report in reports)
    assert all(report["resumed"] == report["after"] and report["same"] for report in reports)
    for found in (moved, without_codes):
        torch.testing.assert_close(torch.tensor([row[0] for row in found]), after, atol=0.01, rtol=0)
    assert {key for _, key, _ in other._optimizer._state()} == {"step", "exp_avg", "exp_avg_sq"}


@pytest.fixture
def parameter():
    pytest.importorskip("torchao")
    return torch.nn.Parameter(torch.zeros(64, 128))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("key", "lowest"), [("exp_avg", -3.0), ("exp_avg_sq", 0.0)])
def test_codes_are_restored_bit_for_bit(key, lowest, parameter):
    moment = eight_bit.new_moment(parameter, signed=key == "exp_avg")
    moment.copy_(torch.empty(64, 128).uniform_(lowest, 1.0, generator=torch.Generator().manual_seed(0)))

    plain = eight_bit.unpacked(parameter, key, moment)
    back = eight_bit.packed(parameter, plain)[key]

    assert plain.keys() == {key, f"{key}_scale"}
    assert torch.equal(back.codes, moment.codes)
    assert torch.equal(back.scale, moment.scale)
    assert moment.codes.unique().numel() > 100


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("of", ["other ranks", "another optimizer"])
def test_values_with_other_blocks_are_quantized_again(of, parameter):
    values = torch.rand(64, 128, generator=torch.Generator().manual_seed(0))
    scales = {"exp_avg_sq_scale": torch.arange(1.0, 65.0)[:, None].expand(64, 128)}
    state = {"exp_avg_sq": values} | (scales if of == "other ranks" else {})

    moment = eight_bit.packed(parameter, state)["exp_avg_sq"]

    assert float((moment.dequantize() - values).abs().max()) < 0.02


def planned(path):
    return FSDPBackend.data_parallel(FSDPConfig(**CODED), model=ModelConfig(path=path), world_size=1, device="cpu")


@pytest.mark.parametrize("when", ["planned", "made"])
def test_error_without_torchao_names_the_package_to_install(when, tmp_path, monkeypatch):
    path, real = save_model("qwen2", tmp_path), versions.installed_version
    monkeypatch.setattr(versions, "installed_version", lambda name: "" if name == "torchao" else real(name))

    with pytest.raises(ConfigError) as refused:
        planned(path) if when == "planned" else make_fsdp(path, config=CODED)

    first, second = str(refused.value).splitlines()
    assert first.startswith("backend.optimizer=adamw_8bit needs torchao")
    assert second == "Type  pip install 'rlcore-fsdp[eight-bit]'"
