"""`rlcore eval`: score a checkpoint or a model on held-out prompts."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.cli import make_parser

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.data.batch import Batch
    from rlcore.trainer.roles import Roles

_EXAMPLES = """\
examples:
  rlcore eval outputs/RUN                                  the newest checkpoint, with the settings of its run
  rlcore eval outputs/RUN eval.samples_per_prompt=8 eval.temperature=1
  rlcore eval DIR data.eval=test.jsonl reward=gsm8k        any model in Hugging Face layout
  rlcore eval DIR preset=quickstart --samples samples.jsonl
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    description = "Score a checkpoint or a model on the prompts of data.eval. Settings are key=value, as for train."
    parser = make_parser("eval", description, _EXAMPLES)
    parser.add_argument("model", type=Path, help="a run, one of its checkpoints, or a model directory")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write every sample with its reward, as JSONL")
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
    options = parser.parse_intermixed_args(list(argv))

    from rlcore.cli.train import is_writable
    from rlcore.errors import ConfigError

    if options.samples and not is_writable(options.samples.absolute().parent):
        raise ConfigError(f"--samples={options.samples} cannot be written\nType  --samples FILE")
    with located(options.model) as (model, base):
        metrics, seconds = _run(model, base, options.overrides, options.samples)
    if options.json:
        print(json.dumps(metrics | {"seconds": seconds}))
        return 0
    for name, value in metrics.items():
        print(f"{name.removeprefix('eval/'):<16} {value:g}")
    print(f"{'seconds':<16} {seconds:.1f}")
    return 0


@contextmanager
def located(path: Path) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Yield the model directory, and the settings of the run if it is a checkpoint, which is exported if needed."""
    from rlcore.trainer.export import export, find_checkpoint, is_model

    if (path / "config.json").is_file():
        yield path, None
        return
    checkpoint = find_checkpoint(path)
    if is_model(checkpoint.path / "actor"):
        yield checkpoint.path / "actor", checkpoint.state["config"]
        return
    with tempfile.TemporaryDirectory(prefix="rlcore-eval-") as directory:
        model = Path(directory) / "model"
        export(checkpoint, model)
        yield model, checkpoint.state["config"]


def _run(
    model: Path, base: dict[str, Any] | None, overrides: Sequence[str], samples: Path | None
) -> tuple[dict[str, float], float]:
    """Start only the rollout and the rewards, and evaluate once."""
    from rlcore.controller.make import make_runtime
    from rlcore.hooks.manager import Hooks
    from rlcore.trainer.evaluate import evaluate
    from rlcore.trainer.launch import held_out, start_roles
    from rlcore.trainer.plan import make_plan

    config = _config(model, base, overrides)
    hooks = Hooks(config.plugins.hooks, config.plugins.on_hook_error)
    hooks.configure(config=config)
    plan = make_plan(config, Path(config.run.directory))
    runtime = make_runtime(config.runtime)
    start = time.perf_counter()
    try:
        names = [name for name in plan.workers if name in ("rollout", "reward", "reward_model")]
        roles = start_roles(plan, runtime, hooks, names)
        metrics, scored = evaluate(roles, held_out(plan.prompts, config), config.eval)
        if samples is not None:
            _write(samples, roles, scored)
    finally:
        runtime.shutdown()
    return metrics, time.perf_counter() - start


def _config(model: Path, base: dict[str, Any] | None, overrides: Sequence[str]) -> Config:
    """Compose the config, with the prompts of data.eval in place of data.train."""
    from rlcore.config.compose import compose
    from rlcore.config.schema import Choice
    from rlcore.errors import ConfigError
    from rlcore.quickstart import locate_assets

    composed = compose([*overrides, f"model.path={model}"], complete=False, base=base, origin="checkpoint")
    config = locate_assets(composed.config, print)
    if not config.data.eval:
        raise ConfigError("no held-out prompts are given.\nType  data.eval=FILE")
    data = replace(config.data, train=config.data.eval, eval="")
    plain = Choice(name="grpo")  # the training algorithm does not matter: only rollout and rewards are started
    absent = set((base or {}).get("placement", {})) - {"rollout", "reward", "reward_model", "default"}
    placement = {role: pool for role, pool in config.placement.items() if role not in absent}
    return replace(config, data=data, run=replace(config.run, resume="never"), algorithm=plain, placement=placement)


def _write(path: Path, roles: Roles, scored: Batch) -> None:
    from rlcore.trainer.run import record

    shares: list[Any] = roles.reward.examples(scored)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in (row for share in shares for row in share):
            file.write(json.dumps(asdict(record(0, row)), ensure_ascii=False, default=str) + "\n")
