"""Faults of engines under the rollout proxy, one after the other, under load: what gets lost, and what serving sees.

    python -m tests.bench.driver_faults [--faults 20]

In turn: a part of the borrowed engine is killed, its core is stopped for some seconds, its owner takes everything back
(deactivate), the network between it and the proxy is cut (the proxy runs in a namespace of its own, so this needs
root); then the dedicated engine and the proxy are killed once each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_driver.store.sqlite import SqliteStore
from tests.bench import machine, results
from tests.scenario.harness import KEY, start_pair
from tests.scenario.namespace import Link, namespace
from tests.scenario.proxy_harness import Framework, Relay, Users, dedicated_engine, running_proxy, wait_usable
from vllm_coserve.demo.models import ROLLOUT_SPEC, SERVING_SPEC, ensure_model
from vllm_coserve.demo.servers import DEVICE_CORE, free_port

Measure = Callable[[argparse.Namespace], dict[str, Any]]

_PAUSE_S = 4.0
_BACK_BOUND_S = 180.0


class Faults:
    """What is done to the borrowed engine."""

    def __init__(self, pair: Any, way: Link, rng: random.Random) -> None:
        self._pair, self._way, self._rng = pair, way, rng
        self.kinds = (self.kill, self.stop, self.take_back, self.partition)

    def kill(self) -> str:
        """SIGKILL of one of its processes."""
        part = self._rng.choice(machine.PARTS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pair.pid(True, part), signal.SIGKILL)
        time.sleep(_PAUSE_S)
        return f"killed: {part}"

    def stop(self) -> str:
        """SIGSTOP of its core for some seconds."""
        pid = self._pair.pid(True, "EngineCore")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_PAUSE_S)
        with contextlib.suppress(ProcessLookupError):  # it may have been taken for hung, and killed
            os.kill(pid, signal.SIGCONT)
        return "stopped"

    def take_back(self) -> str:
        """Its owner takes everything back for a while."""
        self._pair.coserve("POST", "deactivate")
        time.sleep(_PAUSE_S)
        self._pair.coserve("POST", "activate")
        return "taken back by its owner"

    def partition(self) -> str:
        """Nothing arrives any more, and nobody is told."""
        self._way.cut = True
        time.sleep(_PAUSE_S)
        self._way.cut = False
        return "partitioned"


def measure(o: argparse.Namespace) -> dict[str, Any]:
    """Run all faults."""
    machine.OUT.mkdir(parents=True, exist_ok=True)
    models = tuple(ensure_model(s, Path("out") / "models") for s in (SERVING_SPEC, ROLLOUT_SPEC))
    store, port = machine.OUT / "driver_faults.sqlite", free_port()
    for old in machine.OUT.glob("driver_faults.sqlite*"):
        old.unlink()
    log = machine.OUT / "driver_faults_proxy.log"
    flags = ["--coserve-pool-gib=0.0625", "--coserve-ttft-slo-ms=1500", "--coserve-tpot-slo-ms=200", f"--api-key={KEY}"]
    done: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(start_pair(models, machine.OUT / "driver_faults_pair.log", flags))  # type: ignore[arg-type]
        machine.place(pair.pair.process.pid, DEVICE_CORE)
        url, engine = stack.enter_context(dedicated_engine(models[1], machine.OUT / "driver_faults_dedicated.log"))
        far = stack.enter_context(namespace(2))
        near, borrowed = far.links
        # Engines listen on the loopback device, which the namespace does not see.
        relays = [Relay(int(a.rpartition(":")[2]), w.here) for a, w in ((url, near), (pair.pair.rollout_url, borrowed))]
        for relay in relays:
            stack.callback(relay.close)
        proxy_flags = [f"--dedicated={relays[0].url}", f"--borrowed={relays[1].url}", f"--store={store}"]
        proxy_flags.append("--lost-after-s=2")
        place: dict[str, Any] = {"port": port, "host": near.there, "enter": far.enter}
        proxy_url, proxy = stack.enter_context(running_proxy(log, *proxy_flags, **place))
        wait_usable(proxy_url, 2, 60)
        users, framework = Users(pair), Framework(proxy_url, 20)
        stack.callback(users.stop)
        stack.callback(framework.stop)
        faults = Faults(pair, borrowed, random.Random(o.seed))
        for number in range(o.faults):
            turns, what = len(framework.turns), faults.kinds[number % len(faults.kinds)]()
            back_s = wait_usable(proxy_url, 2, _BACK_BOUND_S)
            done.append({"fault": what, "back_s": back_s, "turns_meanwhile": len(framework.turns) - turns})
            print(done[-1], flush=True)
            time.sleep(1)
        proxy.kill()
        proxy.wait()
        stack.enter_context(running_proxy(log, *proxy_flags, **place))
        done.append({"fault": "proxy killed and started again", "back_s": None, "turns_meanwhile": None})
        wait_usable(proxy_url, 2, 60)
        time.sleep(2)
        os.killpg(engine.pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
        turns = len(framework.turns)
        time.sleep(_PAUSE_S)
        done.append({"fault": "dedicated killed", "back_s": None, "turns_meanwhile": len(framework.turns) - turns})
        framework.stop()
        users.stop()
    lost = 0
    with contextlib.closing(SqliteStore(store)) as kept:
        for (name, index), tokens in framework.turns.items():
            stored = kept.get(name).turns
            lost += index >= len(stored) or list(stored[index].output_token_ids) != tokens
    return {
        "faults": done,
        "turns": len(framework.turns),
        "turns_wrong": framework.wrong,
        "turns_lost": lost,
        "serving_requests": users.count,
        "serving_failed": users.failed,
        "slowest_turn_s": max(framework.seconds),
    }


def markdown(result: dict[str, Any]) -> str:
    """The table of a result."""
    rows = [
        [
            f["fault"],
            "–" if f["back_s"] is None else f"{f['back_s']:.1f}",
            "–" if f["turns_meanwhile"] is None else str(f["turns_meanwhile"]),
        ]
        for f in result["faults"]
    ]
    text = (
        f"{result['turns']} turns, {len(result['turns_wrong'])} wrong, {result['turns_lost']} lost; the slowest took "
    )
    text += f"{result['slowest_turn_s']:.1f} s. {result['serving_requests']} serving requests, "
    text += f"{len(result['serving_failed'])} failed.\n\n"
    return text + results.table(["fault", "both engines back after s", "turns meanwhile"], rows)


def run(name: str, description: str | None, measure: Measure, markdown: Callable[[dict[str, Any]], str]) -> None:
    """The command line of a benchmark of faults: run it, and write NAME.json and NAME.md."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--faults", type=int, default=20)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, help="folder of the results (default: tests/bench/results)")
    o = p.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = measure(o)
    results.write(name, result, markdown(result), o.out)


if __name__ == "__main__":
    run("driver_faults", __doc__, measure, markdown)
