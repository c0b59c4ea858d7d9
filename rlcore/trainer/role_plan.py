"""The roles of a run: those of its algorithm, those that the config asks for, and where their weights come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlcore.config.schema import Config
from rlcore.errors import ConfigError, ModelError, did_you_mean
from rlcore.models.load import check_directory, load_tokenizer
from rlcore.models.size import ModelSize
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.optional import DoesWithout, Evaluates
from rlcore.registry import Resolved, resolve
from rlcore.workers.base import Worker


def plan_roles(config: Config, algorithm: Any) -> tuple[dict[str, RoleSpec], dict[str, Resolved]]:
    """Return role -> specification with its defaults, and role -> worker class; trained roles first.

    Raises:
        UserError: two roles have one name, the actor or a loss is missing, a worker class is not a `Worker`, or weights
            come from the wrong role.
    """
    specs: dict[str, RoleSpec] = {}
    for spec in algorithm.roles():
        if spec.name in specs:
            _refuse_duplicate(specs[spec.name], spec)
        specs[spec.name] = spec
    for spec in _standard_roles(config, algorithm):
        specs.setdefault(spec.name, spec)
    if config.environment.name:  # every rollout plays episodes
        specs = {n: replace(it, worker="episodes") if it.worker == "rollout" else it for n, it in specs.items()}
    if "actor" not in specs:
        raise ConfigError("the algorithm has no role 'actor'; its roles() must include one")
    workers = {name: _worker(spec) for name, spec in specs.items()}
    specs = {name: _with_defaults(spec, workers[name].object, algorithm) for name, spec in specs.items()}
    _check_sources(specs, workers)
    _check_reads(config, algorithm, specs)
    specs = dict(sorted(specs.items(), key=lambda item: not item[1].loss))
    return specs, {name: workers[name] for name in specs}


def without(algorithm: Any) -> Sequence[str]:
    """Return the names of standard roles that an algorithm does not need."""
    return tuple(algorithm.without) if isinstance(algorithm, DoesWithout) else ()


def _standard_roles(config: Config, algorithm: Any) -> list[RoleSpec]:
    """Return the roles of every run, except those that neither algorithm, evaluation nor configured rewards need."""
    unneeded = set(without(algorithm))
    if config.data.eval and not isinstance(algorithm, Evaluates):
        unneeded = set()
    elif config.reward.items and "rollout" not in unneeded:
        unneeded -= {"reward"}
    roles = [RoleSpec(name="rollout", worker="rollout"), RoleSpec(name="reward", worker="reward")]
    if config.reward.model and "reward" not in unneeded:
        own = (Path(config.reward.model).expanduser() / "value_head.safetensors").is_file()
        worker = "reward_model" if own else "sequence_classifier"
        roles.append(RoleSpec(name="reward_model", worker=worker, model="reward.model"))
    return [role for role in roles if role.name not in unneeded]


def _worker(spec: RoleSpec) -> Resolved:
    """Return the worker class of a role, which must answer the planner."""
    found = resolve("worker", spec.worker)
    if not issubclass(found.object, Worker):
        raise ConfigError(
            f"role '{spec.name}': worker '{spec.worker}' is not a subclass of rlcore.workers.base.Worker\n"
            f"Write  class {found.object.__name__}(Worker)"
        )
    return found


def _refuse_duplicate(first: RoleSpec, second: RoleSpec) -> None:
    sources = [spec.weights_from for spec in (first, second) if spec.weights_from]
    if len(set(sources)) == 2:
        raise ConfigError(
            f"role '{first.name}' would receive the weights of both '{sources[0]}' and '{sources[1]}'\n"
            f'Give each its own:  RoleSpec(name="{sources[1]}_{first.name}", worker="{second.worker}",'
            f' weights_from="{sources[1]}")'
        )
    raise ConfigError(f"the algorithm has two roles named '{first.name}'\nGive each RoleSpec another name.")


def _with_defaults(spec: RoleSpec, worker: Any, algorithm: Any) -> RoleSpec:
    loss = worker.default_loss if spec.loss is None else spec.loss
    source = worker.default_weights_from if spec.weights_from is None else spec.weights_from
    if loss and not callable(getattr(algorithm, loss, None)):
        methods = [name for name in dir(algorithm) if not name.startswith("_")]
        raise ConfigError(
            f"role '{spec.name}' is trained with '{loss}', but {type(algorithm).__name__} has no method of this name."
            f"{did_you_mean(loss, methods)}\nWrite  def {loss}(self, out, batch)   or set RoleSpec.loss"
        )
    return replace(spec, loss=loss, weights_from=source)


def _check_sources(specs: Mapping[str, RoleSpec], workers: Mapping[str, Resolved]) -> None:
    for name, spec in specs.items():
        source = spec.weights_from
        if not source:
            continue
        having = [it for it in specs if hasattr(workers[it].object, "weights") and it != name]
        if source not in having:
            reason = f"has no role '{source}'" if source not in specs else f"has no weights of '{source}' to send"
            raise ConfigError(
                f"role '{name}' has weights_from='{source}', but this run {reason}."
                f"{did_you_mean(source, having)}\nRoles with weights: {', '.join(having)}"
            )
        if not hasattr(workers[name].object, "load_weights"):
            raise ConfigError(
                f"role '{name}' has weights_from='{source}', but a worker of kind '{spec.worker}' cannot load weights\n"
                'Use a kind with a model, such as worker="reference"'
            )
        if getattr(workers[name].object, "head", "token") == "value":
            raise ConfigError(
                f"role '{name}' has weights_from='{source}', but value heads are not sent\n"
                'Use a kind without a value head, such as worker="reference"'
            )


def _check_reads(config: Config, algorithm: Any, specs: Mapping[str, RoleSpec]) -> None:
    """Check that `reads` names the columns of every trained role, and of no other."""
    trained, reads = {name for name, spec in specs.items() if spec.loss}, set(algorithm.reads())
    if missing := sorted(trained - reads):
        raise ConfigError(
            f"algorithm '{config.algorithm.name}' trains '{missing[0]}', but its reads() has no columns for it\n"
            f'Return  {{"{missing[0]}": [columns of its loss]}}  from reads(), or set loss="" in its RoleSpec'
        )
    if surplus := sorted(reads - trained):
        raise ConfigError(
            f"reads() of algorithm '{config.algorithm.name}' names '{surplus[0]}', which is not a trained role."
            f"{did_you_mean(surplus[0], sorted(trained))}\nTrained roles: {', '.join(sorted(trained))}"
        )


def plan_models(config: Config, algorithm_config: Any, specs: Mapping[str, RoleSpec]) -> dict[str, str]:
    """Return role -> directory of its model, which must exist; one that reads tokens uses the same tokenizer as the actor's.

    A role without its own model starts from that of the role whose weights it receives.
    """
    models = {}
    for name in specs:
        setting, own = _own_model(config, algorithm_config, specs, name)
        models[name] = own or config.model.path
        reads_tokens = not _worker(specs[name]).object.reads_text
        if own and check_directory(own, setting) != check_directory(config.model.path) and reads_tokens:
            vocabulary, wanted = (load_tokenizer(path).get_vocab() for path in (own, config.model.path))
            if vocabulary != wanted:
                raise ConfigError(
                    f"{setting}={own} has a different tokenizer than model.path={config.model.path}\n"
                    "Both read the same token ids: choose models of one family."
                )
        _check_vocabulary(setting if own else "model.path", models[name])
    return models


def _own_model(config: Config, algorithm_config: Any, specs: Mapping[str, RoleSpec], name: str) -> tuple[str, str]:
    """Return the setting and the directory of the model of a role, or of its source; an empty one if neither has any."""
    for _ in specs:  # two models may send their weights to each other
        own = _setting(config, algorithm_config, specs[name])
        if own or specs[name].weights_from not in specs:
            return specs[name].model, own
        name = str(specs[name].weights_from)
    return "", ""


def _setting(config: Config, algorithm_config: Any, spec: RoleSpec) -> str:
    if not spec.model:
        return ""
    section, _, rest = spec.model.partition(".")
    try:
        return str(attrgetter(rest)(algorithm_config) if section == "algorithm" else attrgetter(spec.model)(config))
    except AttributeError as error:
        raise ConfigError(
            f"the model of role '{spec.name}' is in the setting '{spec.model}', which does not exist\n"
            f'Add it to the Config of the algorithm, and name it as  model="algorithm.{spec.name}"'
        ) from error


def _check_vocabulary(setting: str, path: str) -> None:
    """Check that every token id of the tokenizer has a row in the embedding."""
    highest, size = max(load_tokenizer(path).get_vocab().values()), ModelSize.read(check_directory(path)).vocab_size
    if highest >= size:
        raise ModelError(
            f"{setting}={path}: its tokenizer has token ids up to {highest}, but the model has {size} tokens\n"
            "Use the model's own tokenizer, or enlarge the model:  model.resize_token_embeddings(len(tokenizer))"
        )
