"""Build the contract suite for a plugin; used in the child process of `rlcore check`.

Each kind imports what it needs in its own function, so rewards are checked without torch.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore.protocols import Call, Dispatch
from rlcore.registry import Resolved, resolve
from rlcore.surface import private_imports
from rlcore.types import Mean, Mesh

Spec = Mapping[str, Any]
"""Message of check.py: kind, name, options, examples, data, model, device, tolerance, skip, suite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tests to run, and what they do not check."""

    tests: type
    title: str
    unchecked: list[str] = field(default_factory=list)


_chosen: list[Suite] = []


def chosen() -> type:
    """Return the suite of this process, for pytest to collect."""
    return _chosen[-1].tests


def choose(spec: Spec) -> Suite:
    """Resolve the plugin and build its suite.

    Raises:
        UserError: no such plugin, an unknown setting, or not enough input to check it.
    """
    resolved = resolve(spec["kind"], spec["name"])
    origin = f"{resolved.package} {resolved.version}, " if resolved.package else ""
    members, unchecked, base = _SUITES[spec["kind"]](spec, resolved)
    for name in spec["suite"]:
        if name.startswith(("_", "test_")) or not hasattr(base, name) or callable(getattr(base, name)):
            raise ConfigError(
                f"--suite {name}: {base.__name__} has no such attribute\nSee  python -m pydoc {base.__module__}"
            )
    if (resolved.package or "") != "rlcore":
        members["test_only_declared_names_are_imported"] = _imports_declared_names(resolved)
    tests = type("TestPlugin", (base,), {**members, **spec["suite"]})
    suite = Suite(tests=tests, title=f"{spec['kind']} {spec['name']} ({origin}{resolved.target})", unchecked=unchecked)
    _chosen.append(suite)
    return suite


def _imports_declared_names(resolved: Resolved) -> Callable[[object], None]:
    """Return a test of the imports in the module that defines the plugin."""

    def test(self: object) -> None:
        module = sys.modules.get(getattr(resolved.object, "__module__", resolved.target.rpartition(":")[0]))
        path = getattr(module, "__file__", None)
        private = private_imports(Path(path).read_text(encoding="utf-8")) if path else []
        assert not private, f"private names of rlcore may change in any release: {', '.join(private)}"

    return test


_Parts = tuple[dict[str, Any], list[str], type]
"""Members of the subclass, remarks on what is not checked, and the suite."""


def _settings(spec: Spec, resolved: Resolved) -> Any:
    """Build and check the plugin's own settings."""
    from rlcore.config.build import build_plugin
    from rlcore.config.schema import Choice

    return build_plugin("--option", Choice(name=spec["name"], options=spec["options"]), resolved.object)


def _reward(spec: Spec, resolved: Resolved) -> _Parts:
    from rlcore.protocols.reward import RewardSpec
    from rlcore.rewards.runner import build_reward
    from rlcore.rewards.signature import check_columns, required_columns
    from rlcore.testing import RewardContract

    reward = build_reward(RewardSpec(resolved.name, resolved.target, spec["options"]))
    examples = spec["examples"] or _own_examples(
        resolved,
        "(sample, score) pairs",
        '({"completion": "4", "answer": "4"}, 1.0)',
        lambda row, score: (dict(row), score),
    )
    members: dict[str, Any] = {"target": resolved.target, "options": spec["options"]}
    if examples:
        columns = set.intersection(*(set(row) for row, _ in examples))
        check_columns(resolved.name, reward, columns, "every example")
        return {**members, "examples": examples}, [], RewardContract
    if needed := sorted(required_columns(reward)):
        line = ", ".join(f'"{name}": …' for name in ("completion", *needed, "score"))
        raise ConfigError(
            f"reward '{spec['name']}' reads {', '.join(needed)}, so it cannot be checked without examples\n"
            f"Type  --examples FILE   with lines such as {{{line}}}, or define EXAMPLES in its module."
        )
    made_up: Sequence[Any] = [({"completion": text}, None) for text in ("42", "The answer is 42.", "no")]
    members |= {"examples": made_up, "test_the_examples_get_their_scores": None}
    missing = "scores: there are no examples. Type  --examples FILE, or define EXAMPLES in its module"
    return members, [missing], RewardContract


def _own_examples(
    resolved: Resolved, what: str, example: str, read: Callable[..., tuple[Any, ...]]
) -> list[tuple[Any, ...]]:
    """Return EXAMPLES of the plugin's module, each converted: a list, or a mapping from attribute to such lists."""
    found = getattr(sys.modules.get(getattr(resolved.object, "__module__", "")), "EXAMPLES", ())
    if isinstance(found, Mapping):
        found = found.get(resolved.target.rpartition(":")[2], ())
    try:
        return [read(*it) for it in found]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"EXAMPLES of {resolved.kind} '{resolved.name}' are not {what}: {found!r:.80}\nWrite  EXAMPLES = [{example}]"
        ) from error


def _environment(spec: Spec, resolved: Resolved) -> _Parts:
    from rlcore.testing import EnvironmentContract

    config = _settings(spec, resolved)
    members: dict[str, Any] = {"make": lambda self: resolved.object(config)}
    examples = spec["examples"] or _own_examples(
        resolved,
        "(row, completions, reward)",
        '({"prompt": "6 · 7", "answer": "42"}, ["42"], 1.0)',
        lambda row, texts, reward: (dict(row), list(texts), reward),
    )
    if examples:
        return {**members, "examples": [tuple(it) for it in examples]}, [], EnvironmentContract
    made_up = [({"prompt": text}, ["42", "no"], None) for text in ("?", "6 · 7")]
    members |= {"examples": made_up, "test_the_examples_get_their_rewards": None}
    missing = "rewards: there are no examples. Type  --examples FILE, or define EXAMPLES in its module"
    return members, [missing], EnvironmentContract


def _algorithm(spec: Spec, resolved: Resolved) -> _Parts:
    from rlcore.testing import AlgorithmContract

    config = _settings(spec, resolved)
    return {"make": lambda self: resolved.object(config)}, [], AlgorithmContract


def _rollout(spec: Spec, resolved: Resolved) -> _Parts:
    from rlcore.testing import ModelRolloutContract

    config = _settings(spec, resolved)
    members = _of_model(spec)
    members["make"] = lambda self, model, context: resolved.object(config, model=model, context=context)
    return members, [], ModelRolloutContract


def _backend(spec: Spec, resolved: Resolved) -> _Parts:
    from rlcore.testing import BackendContract

    config = _settings(spec, resolved)
    members = _of_model(spec)
    members["make"] = lambda self, model, optimizer, context: resolved.object(
        config, model=model, optimizer=optimizer, context=context
    )
    return members, ["several ranks: the suite runs with world size 1"], BackendContract


def _of_model(spec: Spec) -> dict[str, Any]:
    """Return device, tolerance and model for suites that use a model."""
    import pytest

    members: dict[str, Any] = {"device": spec["device"]}
    if spec["tolerance"] is not None:
        members["tolerance"] = spec["tolerance"]
    if spec["model"]:
        from rlcore.models.load import check_directory

        path = str(check_directory(spec["model"]))
        members["model_path"] = pytest.fixture(lambda self: path)
    return members


def _dispatch(spec: Spec, resolved: Resolved) -> _Parts:
    from rlcore.testing import DispatchContract, RowDispatchContract

    make: Callable[..., Any] = lambda self=None: resolved.object()  # noqa: E731
    try:
        splits_rows, metrics = _kind_of_mode(make())
    except Exception as error:
        raise ConfigError(
            f"dispatch '{spec['name']}' does not accept a batch ({type(error).__name__}: {error}), and its other arguments"
            " are unknown\nWrite its test with a method `call`:  python -m pydoc rlcore.testing.dispatch"
        ) from error
    if splits_rows:
        return {"make": make, "metrics": metrics}, [], RowDispatchContract
    return {"make": make}, ["rows: this mode does not split batches"], DispatchContract


def _kind_of_mode(mode: Dispatch) -> tuple[bool, bool]:
    """Find by trial whether a mode splits batches by rows, and whether it collects metrics."""
    from rlcore import Batch

    meshes = [Mesh(rank=rank, world_size=2, dp_rank=rank, dp_size=2) for rank in range(2)]
    calls = mode.split(Call((Batch.of(lengths=[1, 1], rows={"row": [0, 1]}),), {}), meshes)
    shares = [call.args[0] for call in calls if call is not None and call.args]
    if not any(isinstance(share, Batch) and len(share) < 2 for share in shares):
        return False, False
    try:
        return True, isinstance(mode.collect([{"rows": Mean(1.0)}, {"rows": Mean(1.0)}], meshes), dict)
    except (AttributeError, TypeError, ValueError, AssertionError):
        return True, False


def _tracker(spec: Spec, resolved: Resolved) -> _Parts:
    from rlcore.testing import TrackerContract

    config = _settings(spec, resolved)
    missing = "reading logged metrics back, with each step once after a resume: write a test that defines `logged`"
    return {"make": lambda self, run: resolved.object(config, run)}, [missing], TrackerContract


def _dataset(spec: Spec, resolved: Resolved) -> _Parts:
    from rlcore.config.schema import DataConfig
    from rlcore.testing import DatasetContract

    config = DataConfig(train=spec["data"])
    make = functools.partial(resolved.object, spec["data"], config)
    return {"make": lambda self: make()}, [], DatasetContract


def _hooks(spec: Spec, resolved: Resolved) -> _Parts:
    if spec["options"]:
        raise ConfigError("hooks have no settings\nLeave out  --option")
    testing = importlib.import_module("rlcore_workbench.testing")
    return {"plugin": spec["name"]}, [], testing.HooksContract


_SUITES: dict[str, Callable[[Spec, Resolved], _Parts]] = {
    "algorithm": _algorithm,
    "backend": _backend,
    "dataset": _dataset,
    "dispatch": _dispatch,
    "environment": _environment,
    "hooks": _hooks,
    "reward": _reward,
    "rollout": _rollout,
    "tracker": _tracker,
}
