"""`coserve train CONFIG.yaml`: a job that learns on dedicated and borrowed engines. Reads like the algorithm."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_driver.api.train_config import TrainConfig, dump_config, read_train_config
from rl_driver.policy.staleness import Staleness
from vllm_coserve.api.errors import ConfigurationError

logger = logging.getLogger("coserve.train")

_REACH_BOUND_S = 1.5


class Job:
    """One run of a job, from its newest checkpoint to its last step."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._staleness = Staleness(config.staleness)
        self._out = Path(config.out)

    def run(self) -> None:
        """Learn until all steps are done.

        Raises:
            ConfigurationError: the proxy or Ray cannot be started.
        """
        from rl_driver.roles.cluster import running_actors
        from rl_driver.roles.display import Display
        from rl_driver.roles.figures import Figures
        from rl_driver.roles.proxy_process import running_proxy
        from rl_driver.roles.sampler import Sampler
        from rl_driver.store.sqlite import SqliteStore

        self._out.mkdir(parents=True, exist_ok=True)
        self._display = Display(self._config.steps)
        with (
            running_proxy(self._config, self._out) as proxy,
            running_actors(self._config, proxy) as actors,
            contextlib.closing(SqliteStore(proxy.store)) as store,
            self._display.shown(),
        ):
            figures = Figures(self._out, self._config.metrics_port, proxy, store)
            first, names = self._begin(actors)
            publisher = actors.publisher(proxy, f"{names[-1]}-step-", self._staleness)
            publisher.publish()
            publisher.wait()
            sampler = Sampler(self._config, self._staleness, actors, names, first)
            for step in range(first, self._config.steps):
                proxy.call("POST", "/coserve/v1/step")
                figures.begin_step(step)
                self._display.begin_step(step, self._config.algorithm.groups)
                sampler.sample_up_to(step + self._staleness.bound)
                for minibatch in self._minibatches(sampler, step, figures):
                    actors.train(minibatch)
                    figures.add_update(actors.update())
                version = actors.end_step()
                if self._staleness.publishes(version):
                    publisher.publish()
                    if self._staleness.bound == 0:
                        publisher.wait()
                due = version % self._config.checkpoint.every_steps == 0 or version == self._config.steps
                if due and (wrong := actors.checkpoint(version, {"run": names[-1]})):
                    logger.error("%s", wrong)
                self._display.end_step(figures.end_step())
            publisher.wait()

    def _begin(self, actors: Any) -> tuple[int, list[str]]:
        """(first step, names of the runs of this job whose weights and turns count for it, the present one last).

        Weights that a killed run made after its last checkpoint are lost: no sample of theirs may be used. Turns of the
        first step may be, for the weights that made them are those of the checkpoint. The names differ from job to job,
        so that no engine takes its weights of another job for those of this one.
        """
        saved = actors.restore()
        runs = self._out / "runs"
        job, _, count = (runs.read_text() if runs.exists() else f"{secrets.token_hex(4)}-r-1").rpartition("-r")
        run = f"{job}-r{int(count) + 1}"
        partial = runs.with_suffix(".partial")
        partial.write_text(run)
        os.replace(partial, runs)
        if saved is None:
            return 0, [run]
        self._display.say(f"going on from the checkpoint of step {saved['step']}")
        return int(saved["step"]), [saved["run"], run]

    def _minibatches(self, sampler: Any, step: int, figures: Any) -> Iterator[list[Any]]:
        """Samples of a step's groups, as soon as there are enough for an optimiser step."""
        from rl_driver.training.groups import StaleError

        algorithm = self._config.algorithm
        size = algorithm.groups // algorithm.minibatches
        samples: list[Any] = []
        useful = in_batch = 0
        for group in sampler.groups_of(step):
            try:
                staleness = group.check(step, self._staleness, sampler.prefixes(step))
            except StaleError as exc:  # an engine that could not take newer weights says so only with its tokens
                logger.warning("played again: %s", exc)
                sampler.play_again(step)
                continue
            new = group.samples(algorithm)
            figures.add_group(group, staleness, bool(new))
            self._display.group_done()
            if not new:
                sampler.replace(step)
                continue
            useful, in_batch = useful + 1, in_batch + 1
            samples += new
            if in_batch == size:
                yield samples
                samples, in_batch = [], 0
            if useful == algorithm.groups:
                break
        if samples:
            yield samples


def make_parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    parser = argparse.ArgumentParser(prog="coserve train", description=(__doc__ or "").partition(":")[2].strip())
    parser.add_argument("config", type=Path, help="YAML file; the README shows one")
    parser.add_argument("--print-config", action="store_true", help="print it with all defaults, and end")
    return parser


def check_workers(config: TrainConfig) -> None:
    """Raises ConfigurationError where an engine does not answer as one of its kind."""
    import aiohttp

    workers = config.workers
    headers = {"Authorization": f"Bearer {workers.api_key}"} if workers.api_key else {}

    async def wrong(session: aiohttp.ClientSession, key: str, url: str, path: str) -> str:
        try:
            async with session.get(url + path, headers=headers) as answer:
                if answer.status == 200:
                    return ""
                hints = {401: "give its key as workers.api_key or $COSERVE_WORKER_API_KEY"}
                hints[404] = "it is no borrowed rollout engine: name it under workers.dedicated"
                return f"{key} {url}: HTTP {answer.status}: {hints.get(answer.status, 'look into its log')}"
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            return f"{key} {url}: no answer ({type(exc).__name__}): start the engine first, or mend the address"

    async def all_wrong() -> list[str]:
        bound = aiohttp.ClientTimeout(total=_REACH_BOUND_S)
        async with aiohttp.ClientSession(timeout=bound) as session:
            jobs = [wrong(session, "workers.dedicated", u, "/v1/models") for u in workers.dedicated]
            jobs += [wrong(session, "workers.borrowed", u, "/coserve/v1/status") for u in workers.borrowed]
            return [text for text in await asyncio.gather(*jobs) if text]

    if problems := asyncio.run(all_wrong()):
        raise ConfigurationError("\n".join(problems))


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; exit code 0 done, 2 bad input, 130 interrupted."""
    args = make_parser().parse_args(argv)
    try:
        config = read_train_config(args.config)
        if config.workers.api_key is None and (key := os.environ.get("COSERVE_WORKER_API_KEY")):
            config = config.model_copy(update={"workers": config.workers.model_copy(update={"api_key": key})})
        if args.print_config:
            print(dump_config(config), end="")
            return 0
        check_workers(config)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it started ends with it
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        Job(config).run()
    except ConfigurationError as exc:
        print(f"coserve train: error: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
