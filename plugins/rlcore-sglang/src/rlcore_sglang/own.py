"""Engine started by this rollout: SGLang in its own process (engine.py), reached through a socket.

A thread reads the answers and passes them to the waiting calls. When the process dies, all waiting and later calls fail
with the last error in its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rlcore.errors import LOST_PEER, ConfigError, DeadlineExceeded, InfrastructureError, ModelError, UserError
from rlcore.kits.engine.checks import Limits
from rlcore.kits.engine.memory import bytes_per_token, cache_bytes, start_advice
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore_sglang.config import SGLangConfig, check_precision
from rlcore_sglang.requests import Answer
from rlcore_sglang.weights import LOADER

_END_TIMEOUT_S = 10.0
_LOOK_S = 1.0
_LOG_BYTES = 20000
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class EngineProcess:
    """Client of the engine's process."""

    def __init__(
        self, config: SGLangConfig, *, model: ModelConfig, context: RolloutContext, limits: Limits, devices: list[str]
    ) -> None:
        check_precision(config, model, context.device)
        self.num_ranks = config.tensor_parallel
        self._timeout_s = config.timeout_s
        self._name = f"the SGLang engine of rollout rank {context.rank}"
        self._log: Any = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._lock = threading.Lock()
        self._started: Future[Any] = Future()
        self._waiting: dict[int, Future[Any]] = {0: self._started}
        self._num_messages = 0
        self._death: str | None = None
        self._fault = ""
        """Reason why this client gave up on the engine; empty otherwise."""
        self._process, self._connection = self._start(config, context, devices)
        self._reader = threading.Thread(target=self._read, name="sglang answers", daemon=True)
        self._reader.start()
        try:
            self._send((engine_options(config, model, context, limits), context.device != "cpu"))
            self.pids: list[int] = self._first_answer(config, model)["pids"]
        except BaseException:
            self.close()
            raise

    async def answer(self, prompt_ids: list[int], params: Mapping[str, Any]) -> Answer:
        """Generate one response. Cancellation aborts it."""
        number, future = self._ask("generate", {"input_ids": prompt_ids, "sampling_params": dict(params)})
        try:
            return Answer(*await asyncio.wrap_future(future))
        except asyncio.CancelledError:
            with contextlib.suppress(InfrastructureError):
                self._send((number, "cancel", {}))
            raise

    def num_tokens(self) -> int:
        return int(self._result("num_tokens"))

    def control(self, action: str, **fields: Any) -> None:
        """Run one of SGLang's control actions."""
        self._result(action, **fields)

    def _result(self, action: str, **fields: Any) -> Any:
        _, future = self._ask(action, fields)
        try:
            return future.result(self._timeout_s)
        except FutureTimeout as error:
            raise DeadlineExceeded(
                f"{self._name} did not finish {action} within {self._timeout_s:g} s\nWait longer:  rollout.timeout_s=3600"
            ) from error

    def close(self) -> None:
        """End the process and all processes it started."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._kill()
                self._process.wait(_END_TIMEOUT_S)
        self._reader.join(_END_TIMEOUT_S)
        self._connection.close()
        self._socket.close()
        self._log.close()

    def _start(
        self, config: SGLangConfig, context: RolloutContext, devices: list[str]
    ) -> tuple[subprocess.Popen[bytes], Connection]:
        self._socket, theirs = socket.socketpair()
        for end in (self._socket, theirs):  # a partly sent message must not block forever
            for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                end.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", *_seconds(config.timeout_s)))
        command = [config.python or sys.executable, "-m", "rlcore_sglang.engine", str(theirs.fileno())]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=engine_environment(config, context, devices),
            )
        except OSError as error:
            self._socket.close()
            self._log.close()
            raise UserError(
                f"rollout.python={config.python} cannot be started: {error.strerror}\n"
                "Type  rollout.python=ENVIRONMENT/bin/python"
            ) from error
        finally:
            theirs.close()
        return process, Connection(os.dup(self._socket.fileno()))

    def _first_answer(self, config: SGLangConfig, model: ModelConfig) -> Any:
        """Wait until the engine is ready."""
        try:
            return self._started.result(config.start_timeout_s)
        except FutureTimeout as error:
            raise DeadlineExceeded(
                f"{self._name} did not start within {config.start_timeout_s:g} s; the end of its log:\n{self._log_end()}\n"
                "Wait longer:  rollout.start_timeout_s=3600 runtime.start_timeout_s=4000"
            ) from error
        except InfrastructureError as error:
            text, log = str(error), self._log_end()
            if "is not installed" in text or "rollout=sglang requires" in text:
                raise UserError(text) from None
            if "No module named 'rlcore_sglang'" in log:
                python = config.python or sys.executable
                raise UserError(
                    f"rollout.python={python} is in a virtual environment without rlcore-sglang\n"
                    f'Type  {python} -m pip install "rlcore-sglang[engine]"'
                ) from None
            cause = last_error(log, text)
            raise ModelError(
                f"SGLang cannot serve model.path={model.path}: {cause}\n{start_advice(cause, config)}"
            ) from error

    def _ask(self, action: str, fields: dict[str, Any]) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        with self._lock:
            self._num_messages += 1
            number = self._num_messages
            if self._death is None:
                self._waiting[number] = future
        self._send((number, action, fields))
        return number, future

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            with self._lock:
                if self._death is None:
                    self._connection.send(message)
                    return
        except BlockingIOError:  # the message was sent only in part, so no other can follow
            self._fault = f"it accepted no message within {self._timeout_s:g} s (rollout.timeout_s)"
            self._kill()
            self._reader.join(_END_TIMEOUT_S)
        except OSError:
            self._reader.join(_END_TIMEOUT_S)
        raise InfrastructureError(self._death or f"{self._name} does not accept messages\nStart the run again.")

    def _read(self) -> None:
        """Pass answers to the waiting calls until the process ends."""
        while True:
            try:
                number, good, value = self._next()
            except BlockingIOError:
                self._fault = f"it stopped in the middle of a message for {self._timeout_s:g} s (rollout.timeout_s)"
                break
            except (EOFError, OSError):
                break
            future = self._waiting.pop(number, None)
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if good:
                future.set_result(value)
            else:
                future.set_exception(InfrastructureError(f"{value}" if number == 0 else f"{self._name}: {value}"))
        self._bury()

    def _next(self) -> Any:
        """Return the next message, without a deadline: every call that waits for an answer has its own.

        Raises:
            EOFError: the process has ended, even if one of its children still holds the socket open.
        """
        while not self._connection.poll(_LOOK_S):
            if self._process.poll() is not None and not self._connection.poll():
                raise EOFError
        return self._connection.recv()

    def _kill(self) -> None:
        """Kill the process group: the engine and all processes it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _bury(self) -> None:
        """Kill the remaining processes of a dead engine and let all waiting calls fail with the cause."""
        if self._fault:
            self._kill()
        try:
            status = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        self._kill()
        cause = self._fault or last_error(self._log_end(), _status(status))
        with self._lock:
            self._death = (
                f"{self._name} died (pid {self._process.pid}, {_status(status)}): {cause}\nStart the run again."
            )
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(InfrastructureError(self._death))

    def _log_end(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace").strip()


def engine_options(config: SGLangConfig, model: ModelConfig, context: RolloutContext, limits: Limits) -> dict[str, Any]:
    """Return the arguments of SGLang's engine."""
    is_cpu = context.device == "cpu"
    if config.kv_cache_gb and not is_cpu:
        raise ConfigError(
            f"rollout.kv_cache_gb={config.kv_cache_gb:g}: SGLang supports a fixed cache size only on a CPU\n"
            "Type  rollout.kv_cache_gb=0   and for a GPU  rollout.gpu_memory_utilization=0.5"
        )
    options: dict[str, Any] = {
        "model_path": model.path,
        "dtype": model.precision,
        "device": "cpu" if is_cpu else "cuda",
        "tp_size": config.tensor_parallel,
        "context_length": limits.context_length,
        "max_running_requests": config.max_batch_size,
        "disable_radix_cache": not config.prefix_caching,
        "enable_deterministic_inference": config.deterministic,
        "disable_cuda_graph": config.enforce_eager or is_cpu,
        "skip_tokenizer_init": not any((Path(model.path) / name).is_file() for name in _TOKENIZER_FILES),
        "custom_weight_loader": [LOADER],
        "weight_version": "0",
        "grammar_backend": "none",
        "random_seed": 0,
        "log_level": "error",
    }
    if is_cpu:
        options["max_total_tokens"] = _cache_tokens(config, model, limits)
        options |= {"attention_backend": "torch_native", "sleep_on_idle": True}
    else:
        options["mem_fraction_static"] = config.gpu_memory_utilization
        options |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return options | dict(config.engine_options)


def _cache_tokens(config: SGLangConfig, model: ModelConfig, limits: Limits) -> int:
    """Return the size of an engine's KV cache on a CPU, in tokens."""
    import psutil  # a dependency of SGLang, which planning a run does not need

    token_bytes = bytes_per_token(model)
    size = cache_bytes(
        config,
        free=psutil.virtual_memory().available,
        context_length=limits.context_length,
        spare_tokens=1,
        token_bytes=token_bytes,
    )
    return size // token_bytes


def last_error(log: str, otherwise: str) -> str:
    """Return the last line of a log that names an exception, or `otherwise` if none does.

    If that line only says that a scheduler lost its peer, the exception before it comes first."""
    named = [line.strip() for line in log.splitlines() if line.partition(":")[0].endswith(("Error", "Exception"))]
    causes = [line for line in named if LOST_PEER not in line][-1:]
    if named and LOST_PEER in named[-1]:
        causes.append(named[-1])
    return ", then ".join(causes) or otherwise


def engine_environment(config: SGLangConfig, context: RolloutContext, devices: list[str]) -> dict[str, str]:
    """Return the environment variables of the engine's process."""
    variables = {"TOKENIZERS_PARALLELISM": "false", **os.environ}
    variables.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)  # this variable would change the definition of log-probs
    if config.python:
        variables.pop("PYTHONPATH", None)  # this variable belongs to this process's virtual environment
    if devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    if context.device == "cpu":
        variables.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        variables.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * config.tensor_parallel))
    return variables


def _seconds(timeout_s: float) -> tuple[int, int]:
    """Return seconds and microseconds, as socket options expect them."""
    return int(timeout_s), int(timeout_s % 1 * 1e6)


def _status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
