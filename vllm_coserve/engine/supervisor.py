"""Starts the rollout engine ("sidecar") beside `vllm serve`, starts it again when it dies, and ends it with the server.

The serving side never depends on it: whatever happens to the sidecar, requests of serving's users go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_coserve.api.context import CONTEXT_ENV, Context
from vllm_coserve.control.block import ControlBlock
from vllm_coserve.control.events import EventKind, Writer
from vllm_coserve.control.words import Bell, Word
from vllm_coserve.engine.core_runtime import KIND_API, SIDE_ROLLOUT, SIDE_SERVING
from vllm_coserve.memory.ledger import has_weight_pages

logger = logging.getLogger("vllm.coserve")

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 1.0, 30.0
_HEALTHY_AFTER_S = 5.0  # a sidecar that was up for so long starts with the first back-off again
_STOP_GRACE_S = 5.0
_END_TRIES, _END_RETRY_S = 4, 4.0
EXIT_CONFIGURATION = 2
GPU_SHARE_AT_START = 0.01  # of the device that must be free for an engine to start; see `cli.suit_gpu`
_GROUP_GRACE_S = 3.0
_POLL_S = 0.02
_CLEAR_TIMEOUT_S = 10.0
_HUNG_AFTER_S = 10.0  # a process of the sidecar that shows no life for so long has the sidecar killed
_HUNG_STEP_AFTER_S = 30.0  # the same while it computes: a step may take its time
_ASLEEP_AFTER_S = 1.0  # when we have not looked for so long, we were stopped ourselves, and perhaps everybody was
_START_BOUND_S = 1800.0  # loading a large model from a slow disk takes long, but not for ever
_POLITENESS = ((30.0, 10), (60.0, 5))  # of a restart: until so long after its begin, this niceness
_CAP_SYS_NICE = 23
_SWITCH_INTERVAL_S = 0.0005


class Supervisor:
    """Owner of the sidecar's process group. `start` and `stop` are called on the main thread of `vllm serve`."""

    def __init__(self, context: Context, block: ControlBlock, api_keys: list[str]) -> None:
        self._context, self._block, self._api_keys = context, block, api_keys
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coserve-supervisor", daemon=True)
        self._looked_ns = self._awake_since_ns = 0
        self.failure: str | None = None

    def start(self) -> None:
        """Begin to supervise.

        This thread shares the GIL with the server's main thread, which on a busy server is always running: what is done
        here must not wait 5 ms (Python's default) each time that it comes back from a system call.
        """
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._block.join(SIDE_SERVING, KIND_API, os.getpid())
        self._thread.start()

    def stop(self) -> None:
        """End the sidecar and all its processes; returns when none is left (bounded)."""
        self._stopping.set()
        self._block.ring(Bell.SUPERVISOR)
        self._thread.join(_STOP_GRACE_S + 10)

    # ---- supervisor thread

    def _run(self) -> None:
        backoff_s = _BACKOFF_FIRST_S
        try:
            while not self._stopping.is_set():
                up_s = self._run_once()
                if self._stopping.is_set():
                    break
                if up_s is None and self._block.get(Word.GENERATION) == 1:
                    self._refuse_start()
                    break
                if up_s is not None and up_s > _HEALTHY_AFTER_S:
                    backoff_s = _BACKOFF_FIRST_S
                logger.warning("coserve: the rollout engine ended, starting it again in %.0f s", backoff_s)
                self._stopping.wait(backoff_s)
                self._await_weight_pages()
                backoff_s = min(backoff_s * 2, _BACKOFF_MAX_S)
        finally:
            self._end_group()

    def _run_once(self) -> float | None:
        """One life of the sidecar; returns how long it was up, None when it never came up."""
        block = self._block
        generation = block.add(Word.GENERATION)
        self._forget_signs_of_life()
        self._process, spawned_s = self._spawn(), time.monotonic()
        nice, polite = 0, generation > 1 and _may_raise_priority()
        logger.info("coserve: rollout engine %d starts, process %d", generation, self._process.pid)
        ready_s = None
        while self._process.poll() is None and not self._stopping.is_set():
            seen = block.bell(Bell.SUPERVISOR)
            if ready_s is None and block.get(Word.ROLLOUT_READY):
                ready_s = time.monotonic()
            ready = ready_s is not None
            if block.get(Word.KILL_GENERATION) == generation or self._lost_a_process(ready):
                break
            if not ready and time.monotonic() - spawned_s > _START_BOUND_S:
                logger.warning("coserve: the rollout engine did not come up within %.0f s, killing it", _START_BOUND_S)
                break
            if ready and (who := self._hung()):
                logger.warning("coserve: the rollout engine's %s shows no life, killing it", who)
                break
            wanted = restart_niceness(time.monotonic() - spawned_s) if polite and not ready else 0
            if wanted != nice:
                _renice(self._process.pid, wanted)
                nice = wanted
            block.wait(Bell.SUPERVISOR, seen, _POLL_S)
        up_s = None if ready_s is None else time.monotonic() - ready_s
        if self._stopping.is_set():
            return up_s
        self._kill_group(wait=False)
        block.set(Word.GENERATION_DEAD, generation)
        block.events.put(Writer.SUPERVISOR, EventKind.RESTART, generation + 1)
        block.ring(Bell.ARBITER)
        self._kill_group()
        self._await_cleared(generation)
        return up_s

    def _forget_signs_of_life(self) -> None:
        for word in (Word.ROLLOUT_ALIVE_NS, Word.ROLLOUT_API_ALIVE_NS, Word.ROLLOUT_HEARTBEAT_NS):
            self._block.set(word, 0)  # their writers are gone

    def _hung(self) -> str:
        """The part of a live sidecar that does nothing any more (stopped, or stuck), "" when none."""
        get, now_ns = self._block.get, time.monotonic_ns()
        if self._looked_ns and now_ns - self._looked_ns > _ASLEEP_AFTER_S * 1e9:
            self._awake_since_ns = now_ns
        self._looked_ns = now_ns

        def silent(word: Word, bound_s: float) -> bool:
            return get(word) > 0 and now_ns - max(get(word), self._awake_since_ns) > bound_s * 1e9

        for word, who in ((Word.ROLLOUT_API_ALIVE_NS, "API server"), (Word.ROLLOUT_ALIVE_NS, "engine core")):
            if silent(word, _HUNG_AFTER_S):
                return who
        has_requests = get(Word.ROLLOUT_RUNNING) or get(Word.ROLLOUT_WAITING)
        return "worker" if has_requests and silent(Word.ROLLOUT_HEARTBEAT_NS, _HUNG_STEP_AFTER_S) else ""

    def _lost_a_process(self, ready: bool) -> bool:
        """The engine core or worker of the sidecar is gone; its API server may take seconds to notice."""
        if not ready:
            return False
        pids = (self._block.member_pid(SIDE_ROLLOUT, kind) for kind in (2, 3))
        return any(pid and not _is_running(pid) for pid in pids)

    def _await_cleared(self, generation: int) -> None:
        """A successor starts only once the arbiter has the pages: it would map what its predecessor left in the table.

        The wait ends with the server, or when there is no serving engine core that could take them.
        """
        block, since_s, told = self._block, time.monotonic(), False
        while block.get(Word.GENERATION_CLEARED) < generation:
            seen = block.bell(Bell.SUPERVISOR)
            if self._stopping.is_set() or not block.get(Word.SERVING_READY):
                return
            if not told and time.monotonic() - since_s > _CLEAR_TIMEOUT_S:
                told = True
                logger.error(
                    "coserve: pages of rollout engine %d are still mapped, it is not started again", generation
                )
                self._kill_group()
            block.wait(Bell.SUPERVISOR, seen, _POLL_S)

    def _await_weight_pages(self) -> None:
        """A successor loads its weights first, so it starts only once serving has left their memory.

        Serving has it only where the rollout engine died while deactivated. The wait ends as in `_await_cleared`.
        """
        block, since_s, told = self._block, time.monotonic(), False
        while not has_weight_pages(block.owners, block.pool_pages):
            seen = block.bell(Bell.SUPERVISOR)
            if self._stopping.is_set() or not block.get(Word.SERVING_READY):
                return
            if not told and time.monotonic() - since_s > _CLEAR_TIMEOUT_S:
                told = True
                logger.warning("coserve: the rollout engine starts again when serving has left its weights' memory")
            block.wait(Bell.SUPERVISOR, seen, _POLL_S)

    def _refuse_start(self) -> None:
        """The first sidecar never came up: a configuration error; serving has taken no traffic yet."""
        self.failure = (
            f"the rollout engine of {self._context.config.rollout} did not start; its error is in the log above. "
            "Check --coserve-rollout and --coserve-rollout-args"
        )
        logger.error("coserve: %s", self.failure)
        self._block.set(Word.START_REFUSED, 1)
        main = threading.main_thread()
        for _ in range(_END_TRIES):
            # A first signal can go unseen while vLLM waits for its engine core in C code.
            signal.pthread_kill(main.ident or 0, signal.SIGTERM)
            if self._stopping.wait(_END_RETRY_S):
                return
        self._end_group()
        print(f"vllm serve: error: {self.failure}", file=sys.stderr, flush=True)
        os._exit(EXIT_CONFIGURATION)  # the engine's processes die with this one

    def _spawn(self) -> subprocess.Popen[bytes]:
        config = self._context.config
        env = dict(os.environ)
        env[CONTEXT_ENV] = self._context.model_copy(update={"side": "rollout"}).model_dump_json()
        env["VLLM_PLUGINS"] = ",".join(
            sorted(_plugin_names() | set(filter(None, env.get("VLLM_PLUGINS", "").split(","))))
        )
        if self._api_keys:
            env["VLLM_API_KEY"] = self._api_keys[0]  # not on the command line, which everybody can read
        argv = [sys.executable, "-m", "vllm_coserve.engine.sidecar", "serve", config.rollout]
        argv += ["--port", str(config.rollout_port), "--host", "127.0.0.1", "--kv-cache-memory-bytes", str(64 << 20)]
        argv += ["--no-async-scheduling", "--enable-scale-out"]
        if self._context.device == "cuda":
            argv += ["--gpu-memory-utilization", str(GPU_SHARE_AT_START)]
        argv += config.rollout_argv
        # No session of its own: with autogroups, priorities count among the tasks of a session only.
        return subprocess.Popen(argv, env=env, process_group=0, stdin=subprocess.DEVNULL)

    def _kill_group(self, wait: bool = True) -> None:
        """SIGKILL all processes of the sidecar, and reap it.

        Python's resource trackers are left at first: they end by themselves once the others are gone, after they have
        removed the shared memory that those left behind. Without `wait` it is enough that no process computes any more:
        giving its memory back takes each of them some tenths of a second, and only the pool's pages matter to serving,
        whose return the file lock shows.
        """
        process = self._process
        if process is None:
            return
        # Those that are known go first: looking through /proc takes long where the main thread keeps the GIL busy.
        known = [self._block.member_pid(SIDE_ROLLOUT, kind) for kind in (2, 3)]
        for pid in filter(None, (*known, process.pid)):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == process.pid:  # else the number is another process's by now
                    os.kill(pid, signal.SIGKILL)
        _hasten(process.pid)
        deadline = time.monotonic() + _GROUP_GRACE_S
        while members := _group_members(process.pid):
            late = time.monotonic() > deadline
            others = [pid for pid in members if late or not _is_resource_tracker(pid)]
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            time.sleep(_POLL_S / 4)
            if not wait:
                return  # whatever ran when the signal came was interrupted by it, and returns to no program
        process.wait()

    def _end_group(self) -> None:
        """SIGTERM to the sidecar, a grace period in which it ends its own processes, then SIGKILL to what is left."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_GRACE_S)
        self._kill_group()


def _group_members(pgid: int, dying: bool = False) -> list[int]:
    """Processes of a group that have not ended; `dying`: also those whose main thread has (zombies)."""
    members = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and int(fields[2]) == pgid and fields[0] not in ("X" if dying else "ZX"):
                members.append(int(entry.name))
    return members


def restart_niceness(age_s: float) -> int:
    """How polite a rollout engine is that starts again while users are served, `age_s` after its begin.

    It loads its model in what others leave over, but not for ever: where all cores are busy that would be nothing.
    """
    return next((nice for until_s, nice in _POLITENESS if age_s < until_s), 0)


def _may_raise_priority() -> bool:
    """Whether a lowered priority could be raised again: CAP_SYS_NICE, or an RLIMIT_NICE that admits 0."""
    if resource.getrlimit(resource.RLIMIT_NICE)[0] in (resource.RLIM_INFINITY, *range(20, 41)):
        return True
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1)
    return False


def _threads(pgid: int) -> Iterator[int]:
    """All threads of a process group, also those of a process whose main thread has ended."""
    for pid in _group_members(pgid, dying=True):
        with contextlib.suppress(OSError):
            yield from map(int, os.listdir(f"/proc/{pid}/task"))


def _renice(pgid: int, nice: int) -> bool:
    """Set the niceness of all threads of a process group; False where the system does not let us."""
    for thread in _threads(pgid):
        try:
            os.setpriority(os.PRIO_PROCESS, thread, nice)
        except ProcessLookupError:
            continue
        except OSError:
            return False
    return True


def _hasten(pgid: int) -> None:
    """Give all threads of a process group the usual priority, also those of a process that is dying.

    The last thread of a process gives its memory back. One that loads weights when nobody else wants the device
    (SCHED_IDLE) would take minutes for that on a busy core, and the pages stay mapped meanwhile.
    """
    for thread in _threads(pgid):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, 0)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (state, parent, group, ...); empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _plugin_names() -> set[str]:
    """General plugins that vLLM would load with VLLM_PLUGINS unset; the sidecar's routes need it set."""
    from importlib.metadata import entry_points

    if os.environ.get("VLLM_PLUGINS") is not None:
        return {"coserve"}
    return {p.name for p in entry_points(group="vllm.general_plugins")} | {"coserve"}


def _is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"
