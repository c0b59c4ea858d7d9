"""Try an algorithm on a small batch: print its columns and check its losses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlcore import Batch, LossTerms, TokenOutputs
from rlcore.config.build import build_plugin
from rlcore.config.schema import Choice
from rlcore.data.recorded import open_batch, save_batch
from rlcore.data.units import whole_units
from rlcore.errors import ColumnError, ConfigError, RlcoreError
from rlcore.protocols.optional import TrainsUnits
from rlcore.registry import resolve
from rlcore.testing import AlgorithmContract
from rlcore.testing.algorithm import Loss, loss_of, outputs
from rlcore.workers.averaging import count, reduce_terms

_ALWAYS = ("input_ids", "loss_mask", "rollout_log_probs", "unit_id")


def try_algorithm(
    name: str, options: Mapping[str, Any], *, batch: Path | None, save: Path | None, as_json: bool
) -> int:
    """Build the algorithm, collect or load a batch, check its losses; return 0 if all are valid, else 1."""
    resolved = resolve("algorithm", name)
    algorithm = resolved.object(build_plugin("--option", Choice(name=name, options=options), resolved.object))
    report: dict[str, Any] = {
        "algorithm": name,
        "roles": [f"{role.name} ({role.worker})" for role in algorithm.roles()],
        "reads": {role: list(columns) for role, columns in algorithm.reads().items()},
        "writes": list(algorithm.writes()),
    }
    experience = open_batch(batch) if batch else collect(algorithm)
    if save:
        save_batch(experience, save)
    if isinstance(algorithm, TrainsUnits):
        experience, _ = whole_units(experience, algorithm.unit)
    report["batch"] = f"{len(experience)} samples, {experience.num_tokens} tokens: {', '.join(experience.columns)}"
    report["losses"] = {role: examine(algorithm, role, experience) for role in sorted(algorithm.reads())}
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _print(report)
    return 1 if any(one["wrong"] for one in report["losses"].values()) else 0


def collect(algorithm: Any) -> Batch:
    """Collect experience from four generated prompts with four samples each, one of them rewarded, without a model."""
    _, _, experience = AlgorithmContract().collected(algorithm)
    return experience.local()


def examine(algorithm: Any, role: str, experience: Batch) -> dict[str, Any]:
    """Compute the loss of a role on the batch; return its numbers and a list of faults."""
    if role not in {spec.name for spec in algorithm.roles()}:
        return {"wrong": [f"reads() names the role {role}, which roles() does not return"]}
    try:
        loss: Loss = loss_of(algorithm, role)
    except AttributeError as error:
        return {"wrong": [f"the role {role} has no loss: {error}"]}
    wanted = [*(name for name in _ALWAYS if name in experience), *algorithm.reads()[role]]
    if missing := [name for name in wanted if name not in experience]:
        return {"wrong": [f"reads() names {', '.join(missing)}, but the batch has no such column"]}
    if "loss_mask" not in wanted:
        raise ConfigError(f"the batch has no column 'loss_mask'\nIt has: {', '.join(experience.columns)}.")
    batch = experience.select(*wanted)
    try:
        out = outputs(batch)
        terms = loss(out, batch)
        counts = count(batch.per_row(batch["loss_mask"].long()), batch.unit_sizes())
        scalar = reduce_terms(terms, batch, counts)
    except ColumnError as error:
        return {"wrong": [f"{error}. Name the columns that the loss reads in reads()[{role!r}]"]}
    except RlcoreError:
        raise
    except Exception as error:  # user code may raise anything
        return {"wrong": [f"the loss raised {type(error).__name__}: {error}"]}
    facts: dict[str, Any] = {"terms": list(terms.terms.shape), "average": terms.average, "loss": float(scalar.detach())}
    return facts | _gradients(scalar, terms, out, batch)


def _gradients(scalar: torch.Tensor, terms: LossTerms, out: TokenOutputs, batch: Batch) -> dict[str, Any]:
    """Return the size of the gradient, and the faults of loss and gradient."""
    wrong = []
    per_token = terms.average not in ("row-mean", "unit-mean")
    seen = terms.terms[batch["loss_mask"]] if per_token else terms.terms
    if num_odd := int((~seen.detach().isfinite()).sum()):
        wrong.append(f"{num_odd} of {seen.numel()} terms are not finite")
    if not scalar.requires_grad:
        return {"wrong": [*wrong, "the loss has no gradient: are its terms detached?"]}
    scalar.backward()  # type: ignore[no-untyped-call]
    grads = [leaf.grad for leaf in (out.log_probs, out.values) if leaf is not None and leaf.grad is not None]
    gradient = torch.stack(grads).sum(0)
    outside = gradient[~batch["loss_mask"]]
    if not bool(gradient.isfinite().all()):
        wrong.append("the gradient is not finite: exp() of a log-ratio needs a bound")
    elif not bool(gradient.any()):
        wrong.append("the gradient is zero everywhere: this batch teaches nothing")
    if bool(outside[outside.isfinite()].any()):
        wrong.append(
            f"{int((outside.ne(0) & outside.isfinite()).sum())} prompt tokens have a gradient: sum only where loss_mask is true"
        )
    return {
        "gradient_norm": float(gradient.norm()),
        "gradient_outside_loss_mask": float(outside[outside.isfinite()].abs().sum()),
        "wrong": wrong,
    }


def _print(report: Mapping[str, Any]) -> None:
    print(f"algorithm {report['algorithm']}")
    print(f"  roles   {', '.join(report['roles'])}")
    for role, columns in report["reads"].items():
        print(f"  reads   {', '.join(columns) or 'no columns of its own'}, in the update of {role}")
    print(f"  writes  {', '.join(report['writes']) or 'nothing'}")
    print(f"  batch   {report['batch']}")
    for role, facts in report["losses"].items():
        for name in ("terms", "average", "loss", "gradient_norm", "gradient_outside_loss_mask"):
            if name in facts:
                value = f"{facts[name]:.6g}" if isinstance(facts[name], float) else facts[name]
                print(f"  {role:<7} {name.replace('_', ' '):<28} {value}")
        for wrong in facts["wrong"]:
            print(f"  {role:<7} WRONG: {wrong}")
        if not facts["wrong"]:
            print(f"  {role:<7} valid: terms have the right shape and are finite, no gradient outside loss_mask")
