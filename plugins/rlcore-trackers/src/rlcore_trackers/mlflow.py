"""`mlflow`: metrics, a table of samples per step, and quantiles of rewards and lengths."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcore.errors import UserError, import_optional
from rlcore.protocols.tracker import RunInfo, SampleRecord, sample_table
from rlcore_trackers.identity import kept_id

_QUANTILES = (10, 50, 90)
_MOST_PARAMETER = 6000
"""Maximum length of a parameter's value in MLflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLflowConfig:
    """Destination of the run."""

    uri: str = ""
    """Address of the server, or a directory; empty: that of the environment variable MLFLOW_TRACKING_URI."""
    experiment: str = "rlcore"
    """Name of the experiment, which is created if it is missing."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the run."""


class MLflowTracker:
    """Logs metrics under their names, settings as parameters, and samples as tables in the artifacts."""

    Config = MLflowConfig

    def __init__(self, config: MLflowConfig, run: RunInfo) -> None:
        self._mlflow = import_optional("mlflow", "tracker 'mlflow'", "rlcore-trackers[mlflow]")
        self._config, self._info = config, run
        self._client: Any = None
        self._id = ""

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        """Open the run; a resumed one continues its entry.

        Raises:
            UserError: the server does not answer, or refuses the run.
        """
        file = self._info.directory / "mlflow_id"
        try:
            client = self._mlflow.MlflowClient(self._config.uri or None)
            self._id = kept_id(file, resume_step) or self._create(client)
            client.update_run(self._id, status="RUNNING")
            entities = self._mlflow.entities
            texts = [entities.Param(name, str(value)[:_MOST_PARAMETER]) for name, value in config.items()]
            if not client.get_run(self._id).data.params:  # parameters cannot be changed later
                for i in range(0, len(texts), 100):
                    client.log_batch(self._id, params=texts[i : i + 100])
        except self._mlflow.MlflowException as error:
            raise UserError(
                f"tracker 'mlflow': {str(error).splitlines()[0]}\n"
                "Type  trackers='[console,jsonl,{name: mlflow, uri: \"http://HOST:5000\"}]'"
            ) from error
        file.write_text(self._id)
        self._client = client

    def _create(self, client: Any) -> str:
        found = client.get_experiment_by_name(self._config.experiment)
        number = found.experiment_id if found else client.create_experiment(self._config.experiment)
        run = client.create_run(number, run_name=self._info.name, tags=dict(self._config.tags))
        return str(run.info.run_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._mlflow.entities.Metric(name, float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        columns, rows = sample_table(samples)
        table = {"columns": columns, "data": rows}
        self._client.log_dict(self._id, table, f"samples/step_{step:06d}.json")

    def log_distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        for name, found in values.items():
            if len(found):
                self.log(step, {f"{name}/p{q}": float(np.percentile(found, q)) for q in _QUANTILES})

    def finish(self, summary: Mapping[str, object]) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            for name, value in summary.items():
                client.set_tag(self._id, f"rlcore.{name}", str(value)[:_MOST_PARAMETER])
            client.set_terminated(self._id, "FAILED" if summary.get("error") else "FINISHED")
