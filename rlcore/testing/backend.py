"""Contract of a training backend at world size 1; the plugin's own tests compare ranks with `local`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.errors import UserError
from rlcore.protocols.backend import Backend, BackendContext, ModelConfig, OptimizerConfig
from rlcore.testing.expect import allowed, equal, no_misspelled_member, raises
from rlcore.testing.model import UsesModel, plain_model
from rlcore.types import Mean, Metrics, TokenOutputs

_LIKE_SGD = OptimizerConfig(lr=0.05, eps=1.0, clip_grad_norm=0.0)
"""With this large eps AdamW's first step is proportional to the gradient, so equal gradients give equal weights."""


class BackendContract(UsesModel):
    """Override `make`."""

    def make(self, model: ModelConfig, optimizer: OptimizerConfig, context: BackendContext) -> Backend:
        """Return a new backend."""
        raise NotImplementedError(f"{type(self).__name__} must override make(self, model, optimizer, context)")

    def new(
        self, path: str, optimizer: OptimizerConfig = _LIKE_SGD, *, max_tokens: int = 4096, **context: Any
    ) -> Backend:
        model = ModelConfig(path=path, max_tokens_per_device=max_tokens)
        return self.make(model, optimizer, BackendContext(**({"device": self.device} | context)))

    def test_no_optional_member_is_misspelled(self, model_path: str) -> None:
        no_misspelled_member("backend", self.new(model_path))

    def test_outputs_match_the_plain_model_at_the_temperature(self, model_path: str) -> None:
        out = self.new(model_path).forward(self.batch(), temperature=0.7)
        log_probs, entropy = plain_outputs(model_path, self.batch(), 0.7)
        self.near(out.log_probs, log_probs, "log_probs[i] is of token i given those before it, zero outside loss_mask")
        self.near(out.entropy, entropy, "entropy[i], in nats, is of the distribution of token i")

    def test_outputs_do_not_depend_on_order_or_micro_batches(self, model_path: str) -> None:
        order, cut = [3, 0, 5, 1, 4, 2], self.new(model_path, max_tokens=9)
        wanted = self.log_probs(self.new(model_path))
        self.near(self.log_probs(cut)["x"], wanted["x"], "micro-batches must not change the outputs")
        moved = cut.forward(self.batch().take(order), temperature=1.0).log_probs
        self.near(moved, wanted.take(order)["x"], "outputs must be in the order of the batch")

    def test_a_share_without_rows_works(self, model_path: str) -> None:
        backend, empty = self.new(model_path), self.batch().take([])
        found = on_cpu(backend.forward(empty, temperature=1.0).log_probs)
        equal(len(found), 0, "some ranks get no rows, and must return no tokens")
        backend.forward_backward(empty, likelihood, temperature=1.0)
        assert "lr" in backend.step(), "a rank with an empty share must still take part in the step"

    def test_a_value_head_returns_values(self, model_path: str) -> None:
        mask = self.batch()["loss_mask"].cpu()
        values = on_cpu(self.new(model_path, head="value").forward(self.batch(), temperature=1.0).values)
        equal(values.shape, mask.shape, "values are one per token of the batch")
        assert not bool(values[~mask].any()), f"values are zero outside loss_mask, got {values[~mask]}"
        assert float(values[mask].std()) > 0, f"values must depend on the state, got {values[mask]}"

    def test_the_loss_sees_every_row_once_with_its_own_outputs(self, model_path: str) -> None:
        seen: list[int] = []
        backend = self.new(model_path, max_tokens=9)
        wanted = self.log_probs(backend)

        def loss(out: TokenOutputs, micro: Batch) -> tuple[Tensor, Metrics]:
            rows = micro["sample_id"].tolist()
            seen.extend(rows)
            assert out.log_probs is not None and out.log_probs.requires_grad, "the loss's outputs must carry a gradient"
            self.near(out.log_probs, wanted.take(rows)["x"], "outputs and micro-batch must contain the same rows")
            return likelihood(out, micro)[0], {"rows": Mean(float(len(micro)))}

        metrics = backend.forward_backward(self.batch(), loss, temperature=1.0)
        equal(sorted(seen), list(range(6)), "every row is in exactly one micro-batch")
        equal(metrics["rows"].total, 6.0, "metrics of all micro-batches are merged")

    def test_rows_of_a_unit_are_in_one_micro_batch(self, model_path: str) -> None:
        seen: list[list[int]] = []

        def loss(out: TokenOutputs, micro: Batch) -> tuple[Tensor, Metrics]:
            seen.append(micro["sample_id"].tolist())
            return likelihood(out, micro)

        units = self.batch().with_rows(unit_id=torch.tensor([3, 3, 7, 1, 1, 1], device=self.device))
        self.new(model_path, max_tokens=9).forward_backward(units, loss, temperature=1.0)
        for unit in ([0, 1], [2], [3, 4, 5]):
            held = [rows for rows in seen if set(rows) & set(unit)]
            together = len(held) == 1 and [row for row in held[0] if row in unit] == unit
            assert together, f"rows with one unit_id must be in one micro-batch, in order; {unit} are in {held}"

    def test_the_gradient_does_not_depend_on_micro_batches(self, model_path: str) -> None:
        whole, small, halves = self.new(model_path), self.new(model_path, max_tokens=9), self.new(model_path)
        start = flat(whole)
        self.train(whole)
        self.train(small)
        for rows in ([0, 1, 2], [3, 4, 5]):
            halves.forward_backward(self.batch().take(rows), likelihood, temperature=1.0)
        halves.step()
        moved = float((flat(whole) - start).abs().max())
        assert moved > 1e-3, f"one step at lr=0.05 moved no weight by more than {moved}"
        for name, other in (("micro-batches", small), ("calls of forward_backward", halves)):
            gap = float((flat(other) - flat(whole)).abs().max())
            assert gap <= 1e-3 * moved + 1e-6, (
                f"gradients are summed, not averaged, over {name}; off by {gap} of {moved}"
            )

    def test_a_step_reports_norm_and_rate_and_clears_the_gradient(self, model_path: str) -> None:
        still = self.new(model_path, OptimizerConfig(lr=0.0))
        first, second = self.train(still)["grad_norm"].value, self.train(still)["grad_norm"].value
        assert first > 0 and abs(second / first - 1) < 1e-3, f"step() clears the gradient; norms {first} and {second}"
        warm = self.new(model_path, OptimizerConfig(lr=0.1, warmup_steps=2, schedule="linear"), total_steps=4)
        rates = [round(self.train(warm)["lr"].value, 6) for _ in range(4)]
        # warm-up 1/2 and 2/2 of 0.1; then linear from 0.1 to 0.01 over the two remaining steps
        equal(rates, [0.05, 0.1, 0.1, 0.055], "lr follows the schedule over context.total_steps=4")

    def test_the_gradient_is_clipped_to_its_norm(self, model_path: str) -> None:
        start, moved, norm = flat(self.new(model_path)), [], 0.0
        for clip in (0.0, 0.01):
            backend = self.new(model_path, replace(_LIKE_SGD, eps=1e3, lr=1e3, clip_grad_norm=clip))
            norm = self.train(backend)["grad_norm"].value
            moved.append(float((flat(backend) - start).norm()))
        found = moved[1] / moved[0] * norm
        assert 0.0095 < found < 0.0105, (
            f"clip_grad_norm=0.01 must scale a gradient of norm {norm:.3g}; left {found:.3g}"
        )

    def test_a_gradient_that_is_not_finite_changes_nothing(self, model_path: str) -> None:
        good, bad = self.new(model_path), self.new(model_path)
        bad.forward_backward(
            self.batch(), lambda out, rows: (likelihood(out, rows)[0] * torch.nan, {}), temperature=1.0
        )
        equal(bad.step().get("skipped", Mean(0.0)).value, 1.0, "the loop counts `skipped` = Mean(1)")
        assert torch.equal(flat(bad), flat(good)), "a gradient that is not finite must not change the weights"
        for one in (good, bad):
            self.train(one)
        assert torch.equal(flat(bad), flat(good)), "a skipped step must not affect the next one"

    def test_weights_have_hugging_face_names_and_exact_values(self, model_path: str) -> None:
        found = {name: tensor.detach().cpu() for name, tensor in self.new(model_path).weights()}
        wanted = dict(plain_model(model_path).named_parameters())
        equal(
            sorted(found.keys() - {"lm_head.weight"}), sorted(wanted.keys() - {"lm_head.weight"}), "names of the model"
        )
        other = [name for name in wanted if name in found and not torch.equal(found[name].float(), wanted[name])]
        equal(other, [], "untrained weights must equal those of the files exactly; these differ")

    def test_weights_of_another_model_are_copied_exactly(self, model_path: str) -> None:
        source, target = self.new(model_path), self.new(model_path, trained=False)
        before = self.log_probs(target)["x"]
        for _ in range(3):
            self.train(source)
        target.load_weights(lent(source.weights()))
        assert torch.equal(flat(target), flat(source)), "mix=1 must copy the values; the sender reuses the tensors"
        found, wanted = self.log_probs(target)["x"], self.log_probs(source)["x"]
        assert float((wanted - before).abs().max()) > 10 * self.tolerance, "three steps at lr=0.05 changed no log-prob"
        self.near(found, wanted, "forward must use the loaded weights")
        target.load_weights((name, tensor.bfloat16()) for name, tensor in source.weights())
        assert torch.equal(flat(target), flat(source).bfloat16().float()), "the other model may have another dtype"

    def test_weights_of_another_model_are_mixed_in(self, model_path: str) -> None:
        source = self.new(model_path)
        self.train(source)
        for trained in (True, False):
            target = self.new(model_path, trained=trained)
            wanted = 0.75 * flat(target) + 0.25 * flat(source)
            target.load_weights(lent(source.weights()), 0.25)
            gap = float((flat(target) - wanted).abs().max())
            assert gap <= 1e-6, f"mix=0.25 must keep 3/4 of each parameter and add 1/4 of the new one; off by {gap:.3g}"

    def test_loading_weights_keeps_the_optimizer(self, model_path: str) -> None:
        optimizer = OptimizerConfig(lr=0.01, warmup_steps=3)
        backend, stayed = self.new(model_path, optimizer), self.new(model_path, optimizer)
        for one in (backend, stayed):
            self.train(one)
        backend.load_weights(lent(stayed.weights()))
        for one in (backend, stayed):
            self.train(one)
        assert torch.equal(flat(backend), flat(stayed)), "loading weights must keep the moments and the number of steps"

    def test_loading_weights_keeps_the_value_head(self, model_path: str) -> None:
        critic = self.new(model_path, head="value")
        before = on_cpu(critic.forward(self.batch(), temperature=1.0).values)
        with allowed("a critic takes the weights of a model without a value head, and keeps its own head"):
            critic.load_weights(lent(self.new(model_path, seed=1).weights()))
        found = critic.forward(self.batch(), temperature=1.0).values
        self.near(found, before, "loading weights must keep the value head")

    def test_weights_that_do_not_fit_are_refused_by_name(self, model_path: str) -> None:
        backend = self.new(model_path)
        old = [(name, tensor.detach().clone()) for name, tensor in backend.weights()]
        new = [(name, tensor + 1.0) for name, tensor in old]
        (first, _), (last, _) = new[0], new[-1]
        faults = {
            "missing": (last, new[:-1]),
            "unknown": ("no.such.weight", [*new, ("no.such.weight", torch.ones(2))]),
            "repeated": (first, [*new, new[0]]),
            "of another shape": (last, [*new[:-1], (last, torch.ones(2, 3, 5))]),
        }
        for fault, (name, stream) in faults.items():
            with raises(f"load_weights must raise a UserError when a parameter is {fault}", UserError) as caught:
                backend.load_weights(iter(stream))
            assert name in str(caught[0]), f"the error must name the parameter {name} that is {fault}: {caught[0]}"
            with raises("forward must raise after a failed update: the model may be a mixture"):
                self.log_probs(backend)
            with raises("weights() must raise after a failed update: the model may be a mixture"):
                flat(backend)
            with raises("mix=0.5 must raise after a failed update: it would keep half of a mixture"):
                backend.load_weights(iter(new), 0.5)
        backend.load_weights(iter(old))
        with allowed("a complete update must restore a model after a failed one"):
            found = flat(backend)
        assert torch.equal(found, flat(self.new(model_path))), "a complete update must replace every parameter"

    def test_weights_are_loaded_while_the_model_is_offloaded(self, model_path: str) -> None:
        source = self.new(model_path)
        self.train(source)
        for trained, mix in ((True, 1.0), (True, 0.25), (False, 1.0), (False, 0.25)):
            target, stayed = self.new(model_path, trained=trained), self.new(model_path, trained=trained)
            stayed.load_weights(source.weights(), mix)
            target.offload()
            with allowed("load_weights is called while the model is offloaded"):
                target.load_weights(lent(source.weights()), mix)
            target.reload()
            assert torch.equal(flat(target), flat(stayed)), "reload() must keep weights that were loaded before it"
            if trained:
                for one in (target, stayed):
                    self.train(one)
                assert torch.equal(flat(target), flat(stayed)), "training continues from the loaded weights"

    def test_a_loaded_checkpoint_resumes_exactly(self, model_path: str, tmp_path: Path) -> None:
        optimizer = OptimizerConfig(lr=0.01, warmup_steps=3)
        backend, resumed = self.new(model_path, optimizer), self.new(model_path, optimizer, seed=1)
        self.train(backend)
        backend.save(tmp_path)
        pickles = [path.name for path in tmp_path.rglob("*") if path.suffix in {".pt", ".pth", ".bin", ".pkl"}]
        equal(pickles, [], "a pickle can run code when it is read; write safetensors and JSON")
        resumed.load(tmp_path)
        for one in (backend, resumed):
            self.train(one)
        same = torch.equal(flat(resumed), flat(backend))
        assert same, "a resume must be bitwise exact: a checkpoint contains weights, moments and the number of steps"

    def test_a_frozen_model_that_received_weights_is_saved(self, model_path: str, tmp_path: Path) -> None:
        source = self.new(model_path)
        frozen, resumed = (self.new(model_path, trained=False) for _ in range(2))
        self.train(source)
        frozen.load_weights(source.weights(), 0.25)
        with allowed("a checkpoint must contain a frozen model that received other weights"):
            frozen.save(tmp_path)
            resumed.load(tmp_path)
        assert torch.equal(flat(resumed), flat(frozen)), "a resumed run must have exactly the saved weights"

    def test_a_broken_checkpoint_changes_nothing(self, model_path: str, tmp_path: Path) -> None:
        backend, other = self.new(model_path), self.new(model_path)
        self.train(backend)
        backend.save(tmp_path)
        before, files = flat(other), sorted(tmp_path.rglob("*.safetensors"))
        assert files, f"save() must write safetensors; it wrote {[path.name for path in tmp_path.rglob('*')]}"
        for path in files:
            beside = path.rename(path.with_suffix(".away"))
            with raises(f"load() must raise when {path.name} is missing"):
                other.load(tmp_path)
            assert torch.equal(flat(other), before), f"load() without {path.name} changed weights before it failed"
            beside.rename(path)

    def test_an_exported_critic_gives_the_same_values(self, model_path: str, tmp_path: Path) -> None:
        critic, saved, exported = self.new(model_path, head="value"), tmp_path / "saved", tmp_path / "exported"
        critic.forward_backward(self.batch(), square_error, temperature=1.0)
        critic.step()
        for directory in (saved, exported):
            directory.mkdir()
        critic.save(saved)
        type(critic).export(saved, exported)
        with allowed("an exported critic is a whole model with its head in value_head.safetensors"):
            other = self.new(str(exported), head="value", seed=1)
        found, wanted = (on_cpu(one.forward(self.batch(), temperature=1.0).values) for one in (other, critic))
        self.near(found, wanted, "values of an exported critic, which may become a reward model")

    def test_offload_and_reload_restore_everything(self, model_path: str) -> None:
        backend, stayed = self.new(model_path), self.new(model_path)
        self.train(backend)
        before = flat(backend)
        backend.offload()
        backend.offload()
        with allowed("weights() must work while the model is offloaded: with device sharing, they are sent then"):
            assert torch.equal(flat(backend), before), "offload() must not change the weights"
        backend.reload()
        backend.reload()
        self.train(backend)
        for _ in range(2):
            self.train(stayed)
        assert torch.equal(flat(backend), flat(stayed)), "reload() must restore the model and the optimizer"

    def test_a_frozen_model_gives_the_same_outputs(self, model_path: str) -> None:
        frozen, trained = (self.log_probs(self.new(model_path, trained=one))["x"] for one in (False, True))
        self.near(frozen, trained, "the reference (trained=False) must give the outputs of the initial policy")

    def batch(self) -> Batch:
        """Return six rows of 2 to 9 tokens on the device; row 4 has no loss token, row 5 has one at its first token."""
        lengths = [5, 9, 3, 7, 4, 2]
        first = [2, 4, 1, 3, 4, 0]
        input_ids = torch.tensor([3 + (7 * i + i * i) % 37 for i in range(sum(lengths))])
        mask = torch.tensor([i >= start for length, start in zip(lengths, first) for i in range(length)])
        rows = {"sample_id": torch.arange(6)}
        return Batch.of(lengths=lengths, tokens={"input_ids": input_ids, "loss_mask": mask}, rows=rows).to(self.device)

    def log_probs(self, backend: Backend) -> Batch:
        """Return the log-probs of the batch as column `x`."""
        found = on_cpu(backend.forward(self.batch(), temperature=1.0).log_probs)
        return Batch.of(lengths=self.batch().lengths, tokens={"x": found})

    def train(self, backend: Backend) -> Metrics:
        """Train one step on the batch."""
        backend.forward_backward(self.batch(), likelihood, temperature=1.0)
        return backend.step()

    def near(self, found: Tensor | None, wanted: Tensor, rule: str) -> None:
        """Fail with `rule` unless both are equal within the tolerance."""
        equal(on_cpu(found).shape, wanted.shape, f"{rule}; shapes")
        gap = float((on_cpu(found) - wanted).abs().max())
        assert gap <= self.tolerance, f"{rule}; differs by up to {gap:.3g}, allowed {self.tolerance}"


def likelihood(out: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return minus the sum of the log-probs, weighted by row so that rows cannot be confused."""
    assert out.log_probs is not None, "a backend with head='token' gives log_probs"
    weight = (1.0 + batch["sample_id"]).repeat_interleave(batch.lengths.to(batch.device))
    return -(out.log_probs * weight * batch["loss_mask"]).sum() / 20, {}


def square_error(out: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return the squared error of values with target 1."""
    assert out.values is not None, "a backend with head='value' gives values"
    return (out.values - 1.0).square().sum(), {}


def on_cpu(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "head='token' asks for log_probs and entropy, head='value' for values"
    return tensor.detach().float().cpu()


def lent(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield copies, each of which is overwritten with zeros when the next one is requested."""
    for name, tensor in weights:
        held = tensor.detach().clone()
        yield name, held
        held.fill_(torch.nan)


def flat(backend: Backend) -> Tensor:
    """Return a copy of all weights in one vector, in order of their names."""
    named = {name: on_cpu(tensor).reshape(-1) for name, tensor in backend.weights()}
    return torch.cat([named[name] for name in sorted(named)])


@torch.no_grad()
def plain_outputs(path: str, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropy of the plain model, zero outside the mask and for the first token of a row."""
    log_probs, entropy = torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens)
    for start, length in zip(batch.offsets().tolist(), batch.lengths.tolist()):
        ids, mask = (batch[name][start : start + length].cpu() for name in ("input_ids", "loss_mask"))
        scores = (plain_model(path)(ids[None]).logits[0, :-1].float() / temperature).log_softmax(-1)
        after = slice(start + 1, start + length)
        log_probs[after] = scores.gather(1, ids[1:, None]).squeeze(1) * mask[1:]
        entropy[after] = -(scores.exp() * scores).sum(-1) * mask[1:]
    return log_probs, entropy
