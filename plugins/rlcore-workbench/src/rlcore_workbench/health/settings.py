"""Checks of a run's settings, one per topic, so that all problems are reported at once.

Called by isolated.py, in a separate process, for `rlcore doctor key=value ...`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlcore.errors import ModelError, UserError
from rlcore_workbench.health.machine import Fault, Remark

if TYPE_CHECKING:
    from rlcore.config.schema import Config


def check_settings(name: str, settings: Sequence[str], _: str) -> str:
    """Run one check of CHECKS; raise a Fault with the line to type for anything that the user can fix."""
    from rlcore.config.compose import compose
    from rlcore.quickstart import locate_assets

    try:
        config = locate_assets(compose(settings, complete=False).config)
    except UserError as error:
        if name != "settings":
            raise Remark("not checked, because the settings are wrong") from error
        raise _fault(error) from error
    try:
        return _plan(settings) if name == "plan" else CHECKS[name](config)
    except UserError as error:
        raise _fault(error) from error


def _fault(error: UserError) -> Fault:
    what, _, rest = str(error).partition("\n")
    return Fault(what, rest.removeprefix("Type ").strip()) if rest.startswith("Type ") else Fault(str(error))


def _given(value: str, setting: str) -> str:
    from rlcore.config.compose import REQUIRED

    if value == REQUIRED:
        raise Remark("not given", f"rlcore doctor {setting}=...")
    return value


def _model(config: Config) -> str:
    from rlcore.models.load import check_directory
    from rlcore.models.size import ModelSize

    size = ModelSize.read(check_directory(_given(config.model.path, "model.path")))
    return f"{config.model.path}: {size.num_parameters / 1e6:,.2f} M parameters"


def _tokenizer(config: Config) -> str:
    from rlcore.models.load import load_tokenizer

    tokenizer = load_tokenizer(_given(config.model.path, "model.path"))
    return f"{len(tokenizer):,} tokens, {'with' if tokenizer.chat_template else 'without'} a chat template"


def _data(config: Config) -> str:
    from rlcore.models.load import load_tokenizer
    from rlcore.registry import resolve
    from rlcore.trainer.prompts import load_prompts, named

    if isinstance(config.data.train, str):
        _given(config.data.train, "data.train")
    files = [*named(config.data.train).values(), *named(config.data.eval).values()]
    for file in files:
        resolve("dataset", config.data.dataset).object(file, config.data)
    try:
        load_tokenizer(_given(config.model.path, "model.path"))
    except (ModelError, Remark) as error:
        raise Remark(f"{', '.join(files)} can be read; the prompts are not checked without a tokenizer") from error
    return "; ".join(f"{it.name}: {len(it.batch):,} prompts" for it in (load_prompts(config, file) for file in files))


def _reward(config: Config) -> str:
    from rlcore.rewards.runner import build_reward
    from rlcore.trainer.reward_plan import reward_specs

    specs = reward_specs(config)
    for spec in specs:
        build_reward(spec)
    return ", ".join(f"{spec.name} ({spec.target})" for spec in specs)


def _plan(settings: Sequence[str]) -> str:
    """Run the checks of `rlcore train --dry-run`, including that the run fits this machine."""
    from rlcore.api.run import check_devices
    from rlcore.cli.train import plan_run

    plan, _ = plan_run(settings)
    check_devices(plan)
    return (
        f"{', '.join(plan.workers)} on {len(set(plan.placement.values()))} pool(s), runtime {plan.config.runtime.name}"
    )


CHECKS: dict[str, Callable[[Config], str]] = {
    "settings": lambda _: "composed",
    "model": _model,
    "tokenizer": _tokenizer,
    "data": _data,
    "reward": _reward,
}
