"""Main program of an engine's process: `python -m rlcore_sglang.engine FILE_DESCRIPTOR`.

SGLang's engine takes over its process: it kills all child processes, replaces signal handlers, kills the process when a
scheduler fails, and there can be only one. It therefore runs in its own process, and own.py communicates with it through
a socket. Messages are tuples of plain data:

    in    (number, "generate", {"input_ids": …, "sampling_params": …}), (number, action, fields), (number, "num_tokens", {}),
          (number, "cancel", {})
    out   (number, True, value) or (number, False, text)

The process ends when the other end of the socket closes: by an orderly shutdown if that is quick, otherwise by killing it
together with all processes it started.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_OPTIONS_TIMEOUT_S = 60.0
_LOOK_S = 1.0
_PID = "RLCORE_SGLANG_ENGINE"
"""Environment variable with the pid of this process, for SGLang's child processes."""
_PR_SET_PDEATHSIG = 1
_END_S = 3.0
"""Time for an orderly shutdown when the host is gone."""
_REQUESTS = {
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
"""Control actions and the SGLang classes of their fields; actions without fields are not listed."""


def main() -> None:
    """Start the engine, report that it is ready, and serve."""
    os.environ[_PID] = str(os.getpid())
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with_host, args=(connection.fileno(),), name="host", daemon=True).start()
    if not connection.poll(_OPTIONS_TIMEOUT_S):
        raise TimeoutError(f"the host sent no options within {_OPTIONS_TIMEOUT_S:g} s")
    options, needs_kernels = connection.recv()
    from rlcore.errors import RlcoreError
    from rlcore_sglang.install import check_installed

    try:
        check_installed(needs_kernels)
    except RlcoreError as error:
        connection.send((0, False, str(error)))
        return
    import sglang

    try:
        engine = sglang.Engine(**options)
    except (RuntimeError, ValueError, TypeError, AssertionError, OSError, ImportError) as error:
        connection.send((0, False, f"{type(error).__name__}: {error}"))
        raise
    try:
        engine.loop.run_until_complete(_Service(engine, connection).run())
    finally:
        engine.shutdown()


def _end_with_host(descriptor: int) -> None:
    """Kill this process group when the host is gone.

    Runs in a thread from the start, because the socket is read only while serving, and SGLang's schedulers watch their
    parent only after all imports. own.py starts this process in its own process group."""
    host = os.getppid()
    socket_events = select.poll()
    socket_events.register(descriptor, select.POLLRDHUP)
    while not socket_events.poll(_LOOK_S * 1000) and os.getppid() == host:
        pass
    time.sleep(_END_S)
    os.killpg(0, signal.SIGKILL)


def _end_with_engine() -> None:
    """Make a child process of SGLang end with the engine.

    Called in each of SGLang's processes before it imports SGLang, which does the same only after its imports. If host and
    engine are killed together before that, as Ray does, nothing else would end these processes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not _is_running(os.environ.get(_PID, "self")):
        os._exit(1)


def _is_running(pid: str) -> bool:
    """Return False for a process that has ended, even if nobody has collected it yet, as in a container without init."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


class _Service:
    """Message loop that runs until the socket closes. Each message is a task; the host decides when to stop."""

    def __init__(self, engine: Any, connection: Connection) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer_manager
        self._connection = connection
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._num_tokens = self._num_finished = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._tokenizer.auto_create_handle_loop()
        loop.add_reader(self._connection.fileno(), self._receive)
        # uvloop, which SGLang uses, makes a watched socket non-blocking, but a partial message must be read to its end.
        os.set_blocking(self._connection.fileno(), True)
        self._connection.send((0, True, {"pids": list(self._engine.get_all_child_pids())}))
        await self._ended.wait()
        loop.remove_reader(self._connection.fileno())

    def _receive(self) -> None:
        """Take all available messages, so that requests that arrive together are prefilled together."""
        try:
            while self._connection.poll():
                self._take(*self._connection.recv())
        except (EOFError, OSError) as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Stop serving. A closed socket is the normal end; a partial message is logged."""
        if isinstance(error, BlockingIOError):
            print("TimeoutError: the host stopped in the middle of a message", file=sys.stderr, flush=True)
        self._ended.set()

    def _take(self, number: int, action: str, fields: dict[str, Any]) -> None:
        if action == "cancel":
            if number in self._tasks:
                self._tokenizer.abort_request(rid=_name(number))
            return
        task = asyncio.get_running_loop().create_task(self._answer(number, action, fields))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answer(self, number: int, action: str, fields: dict[str, Any]) -> None:
        try:
            reply: tuple[int, bool, Any] = (number, True, await self._value(number, action, fields))
        except Exception as error:  # any error of SGLang is reported to the caller
            reply = (number, False, f"{type(error).__name__}: {error}")
        if not self._ended.is_set():
            try:
                self._connection.send(reply)
            except OSError as error:
                self._end(error)

    async def _value(self, number: int, action: str, fields: dict[str, Any]) -> Any:
        if action == "generate":
            return await self._generate(number, **fields)
        return self._count_tokens() if action == "num_tokens" else await self._control(action, fields)

    def _count_tokens(self) -> int:
        """Return the number of tokens sampled so far. SGLang passes those of unfinished responses on every 50 tokens."""
        unfinished = sum(len(state.output_ids) for state in self._tokenizer.rid_to_state.values())
        self._num_tokens = max(self._num_tokens, self._num_finished + unfinished)
        return self._num_tokens

    async def _generate(self, number: int, **fields: Any) -> tuple[Any, ...]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        from rlcore_sglang.requests import Answer

        request = GenerateReqInput(rid=_name(number), return_logprob=True, **fields)
        outputs = [output async for output in self._tokenizer.generate_request(request, None)]
        answer = Answer.read(outputs[-1])
        self._num_finished += len(answer.token_ids)
        return answer.token_ids, answer.log_probs, answer.finish_reason, answer.versions

    async def _control(self, action: str, fields: dict[str, Any]) -> None:
        from sglang.srt.managers import io_struct

        method = getattr(self._tokenizer, action)
        result = await (method(getattr(io_struct, _REQUESTS[action])(**fields)) if action in _REQUESTS else method())
        success, message = _outcome(result)
        if not success:
            raise RuntimeError(message)


def _outcome(result: Any) -> tuple[bool, str]:
    """Return (success, message). SGLang returns None, an object with `success`, or a tuple that starts with it."""
    if result is None:
        return True, ""
    if isinstance(result, tuple):
        return bool(result[0]), str(result[1])
    return bool(result.success), str(result.message)


def _name(number: int) -> str:
    """Return a request name of fixed length, because SGLang aborts every request whose name has the given prefix."""
    return f"{number:015d}"


if __name__ == "__mp_main__":  # the name under which spawned processes import this module
    _end_with_engine()
if __name__ == "__main__":
    main()
