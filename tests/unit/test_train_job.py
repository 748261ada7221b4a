"""`coserve train` but for its engines: configuration, groups, checkpoints, the sampler's order of work."""

import contextlib
import io
import subprocess
import sys
import time

import msgspec
import pytest
import yaml
from rich.console import Console

from rl_driver.api.train_config import dump_config, read_train_config
from rl_driver.api.trajectory import Trajectory, Turn, VersionSpan
from rl_driver.policy.staleness import Staleness
from rl_driver.roles.display import Display
from rl_driver.roles.figures import lost_of
from rl_driver.roles.sampler import Sampler
from rl_driver.store.sqlite import SqliteStore
from rl_driver.training.checkpoints import Checkpoints
from rl_driver.training.groups import Group, StaleError
from rl_driver.training.learner import Learner
from tests.unit.learner_world import config as learner_config
from tests.unit.learner_world import made_up, parameters, tiny_model
from vllm_coserve.api.errors import ConfigurationError

_MINIMAL = {"model": "org/policy", "task": {"name": "frozen_lake"}, "workers": {"dedicated": ["http://127.0.0.1:1"]}}


def _write(tmp_path, **changes):
    path = tmp_path / f"job-{len(list(tmp_path.iterdir()))}.yaml"
    path.write_text(yaml.safe_dump({**_MINIMAL, **changes}))
    return path


# ---- configuration


def test_defaults_are_dumped_and_read_again(tmp_path):
    config = read_train_config(_write(tmp_path, workers={"dedicated": ["http://localhost:1/"], "api_key": "secret"}))
    text = dump_config(config)
    assert "secret" not in text and "api_key: '***'" in text
    (tmp_path / "again.yaml").write_text(text)
    again = read_train_config(tmp_path / "again.yaml")
    assert again.model_copy(update={"workers": config.workers}) == config


def test_dapo_changes_defaults_and_nothing_that_was_said(tmp_path):
    dapo = read_train_config(_write(tmp_path, algorithm={"name": "dapo", "clip_high": 0.5})).algorithm
    assert (dapo.clip_high, dapo.aggregate, dapo.overlong) == (0.5, "token", "penalty")
    assert dapo.dynamic_sampling.enabled
    grpo = read_train_config(_write(tmp_path)).algorithm
    assert (grpo.clip_high, grpo.aggregate, grpo.dynamic_sampling.enabled) == (0.2, "sequence", False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stpes": 3}, "stpes: there is no such key: did you mean steps?"),
        ({"task": {"name": "frozen_lake", "sise": 3}}, "task.sise: there is no such key: did you mean size?"),
        ({"task": {"name": "chess"}}, "task"),
        ({"algorithm": {"group_sizes": 3}}, "did you mean group_size?"),
        ({"algorithm": {"groups": 6, "minibatches": 4}}, "multiple of minibatches"),
        ({"staleness": -1}, "staleness -1"),
        ({"steps": "many"}, "steps 'many'"),
        ({"workers": {}}, "name some under dedicated or borrowed"),
        ({"workers": {"dedicated": ["localhost:8000"]}}, "http://127.0.0.1:8000"),
        ({"workers": {"dedicated": ["http://a:1"], "borrowed": ["http://a:1"]}}, "named twice"),
        ({"workers": {"dedicated": ["http://a:1"], "policy": "best"}}, "policy"),
        ({"model": "/no/such/model"}, "no config.json"),
        ({"optimizer": {"learning_rate": 0}}, "optimizer.learning_rate 0"),
        ({"broadcast": {}}, "broadcast.uplink_mbytes_per_s: this key is needed"),
        ({"broadcast": {"uplink_mbytes_per_s": 0}}, "broadcast.uplink_mbytes_per_s 0"),
        ({"broadcast": {"uplink_mbytes": 9}}, "did you mean uplink_mbytes_per_s?"),
        ({"broadcast": {"uplink_mbytes_per_s": 9}, "store": "mooncake://m:1"}, "leave out store, or broadcast"),
    ],
)
def test_mistakes_are_named_with_their_key(tmp_path, changes, says):
    with pytest.raises(ConfigurationError) as caught:
        read_train_config(_write(tmp_path, **changes))
    assert says in str(caught.value)


_HERE = ["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3", "http://0.0.0.0:4", "http://127.8.9.1:5"]
_CHAINS = {"uplink_mbytes_per_s": 9}


@pytest.mark.parametrize("kind", ["dedicated", "borrowed"])
@pytest.mark.parametrize("far", ["http://10.0.0.5:8000", "https://gpu-7.example:8000", "http://[fd00::5]:8000"])
def test_engines_on_other_machines_need_weights_that_they_can_reach(tmp_path, kind, far):
    workers = {"dedicated": _HERE, "borrowed": ["http://127.0.0.1:9"]}
    workers[kind] = [*workers[kind], far]
    for host in ({}, _CHAINS, {**_CHAINS, "host": "Localhost"}, {**_CHAINS, "host": "0.0.0.0"}):
        changes = {"broadcast": host} if host else {}
        with pytest.raises(ConfigurationError, match=r"broadcast: .*host: ADDRESS.*store: mooncake://") as caught:
            read_train_config(_write(tmp_path, workers=workers, **changes))
        assert f"({far})" in str(caught.value), "only what cannot be reached is named"
    for way in ({"broadcast": {**_CHAINS, "host": "10.0.0.4"}}, {"store": "mooncake://10.0.0.4:50051"}):
        read_train_config(_write(tmp_path, workers=workers, **way))


@pytest.mark.parametrize("changes", [{}, {"broadcast": _CHAINS}, {"broadcast": {**_CHAINS, "host": "10.0.0.4"}}])
def test_engines_on_the_learners_machine_need_no_address_of_it(tmp_path, changes):
    config = read_train_config(_write(tmp_path, workers={"dedicated": _HERE}, **changes))
    assert config.relay_host == changes.get("broadcast", {}).get("host", "127.0.0.1")


@pytest.mark.parametrize("text", ["", "a: [", "- a", "\x00"])
def test_what_is_no_yaml_is_refused(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"x\.yaml"):
        read_train_config(tmp_path / "x.yaml")


def test_mistakes_end_the_command_at_once(tmp_path):
    command = [sys.executable, "-m", "rl_driver.main"]

    def run(*args):
        start = time.monotonic()
        done = subprocess.run([*command, *map(str, args)], capture_output=True, text=True, timeout=30, check=False)
        assert "Traceback" not in done.stderr
        return done, time.monotonic() - start

    for args, says in (
        ((tmp_path / "none.yaml",), "cannot be read"),
        ((_write(tmp_path, stpes=3),), "did you mean steps?"),
        ((_write(tmp_path, workers={"dedicated": ["http://192.0.2.1:1"]}),), "the learner's relay on 127.0.0.1"),
        ((_write(tmp_path),), "start the engine first"),
    ):
        done, _ = run(*args)
        assert done.returncode == 2 and says in done.stderr, done.stderr
    done, _ = run(_write(tmp_path), "--print-config")
    assert done.returncode == 0 and yaml.safe_load(done.stdout)["staleness"] == 1


# ---- groups


def _trajectory(i, reward, version="r0-step-4", tokens=3, cut=False):
    turn = Turn(0, (1, 2), tuple(range(tokens)), (0.0,) * tokens, (VersionSpan(version, 0, tokens),))
    return Trajectory(f"t{i}", "g", {"cut": cut}, "done", reward, (turn,))


def _algorithm(tmp_path, **algorithm):
    return read_train_config(_write(tmp_path, algorithm=algorithm)).algorithm


def test_a_groups_samples_have_the_advantages_of_the_algorithm(tmp_path):
    group = Group([_trajectory(i, float(i % 2)) for i in range(4)], 8)
    samples = group.samples(_algorithm(tmp_path))
    assert [s.advantage > 0 for s in samples] == [False, True, False, True] and group.tokens == 12
    same = Group([_trajectory(i, 1.0) for i in range(4)], 8)
    assert all(s.advantage == 0 for s in same.samples(_algorithm(tmp_path)))
    assert same.samples(_algorithm(tmp_path, name="dapo")) == []


def test_long_answers_are_masked_or_punished(tmp_path):
    group = Group([_trajectory(0, 1.0), _trajectory(1, 1.0, tokens=8, cut=True)], 8)
    assert len(group.samples(_algorithm(tmp_path, overlong="mask"))) == 1
    kept, punished = group.samples(_algorithm(tmp_path, overlong="penalty", overlong_buffer_tokens=4))
    assert kept.advantage > 0 > punished.advantage


@pytest.mark.parametrize(
    ("version", "bound", "prefixes", "staleness"),
    [
        ("r0-step-4", 1, ["r0-"], 1),
        ("r0-step-5", 0, ["r0-"], 0),
        ("r0-step-4", 0, ["r0-"], None),
        ("r0-step-6", 9, ["r0-"], None),
        ("default", 9, ["r0-"], None),
        ("r1-step-5", 1, ["r0-"], None),
        ("r1-step-5", 1, ["r0-", "r1-"], 0),
    ],
)
def test_no_sample_is_staler_than_the_bound_or_of_lost_weights(version, bound, prefixes, staleness):
    group = Group([_trajectory(0, 1.0, version)], 8)
    if staleness is None:
        with pytest.raises(StaleError):
            group.check(5, Staleness(bound), prefixes)
    else:
        assert group.check(5, Staleness(bound), prefixes) == staleness


# ---- checkpoints


def test_checkpoints_are_whole_and_few(tmp_path, monkeypatch):
    learner, kept = Learner(tiny_model(), learner_config()), Checkpoints(tmp_path, 2)
    assert kept.restore(learner) is None
    for step in (1, 2, 3):
        learner.add(made_up(3))
        learner.step()
        assert kept.write(learner, step, {"run": "r0"}) == ""
    assert kept.steps() == [2, 3]
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(learner, "save", lambda *args: (_ for _ in ()).throw(full))
    assert "step 4 could not be written" in (said := kept.write(learner, 4, {})) and "No space left" in said
    assert kept.steps() == [2, 3] and not list(tmp_path.glob("*.partial"))
    other = Learner(tiny_model(1), learner_config())
    assert kept.restore(other) == {"run": "r0", "step": 3}
    assert parameters(other).equal(parameters(learner))
    for file in (tmp_path / "step-00000003").iterdir():
        file.write_bytes(b"damaged")
    assert kept.restore(other) == {"run": "r0", "step": 2}
    for file in (tmp_path / "step-00000002").iterdir():
        file.write_bytes(b"damaged")
    with pytest.raises(ConfigurationError, match="begin anew"):
        kept.restore(other)


# ---- the sampler


class _Actors:
    """Groups are finished in the order in which the test says."""

    def __init__(self, monkeypatch, fails=()):
        self.orders, self.fails = {}, set(fails)
        monkeypatch.setattr("ray.wait", lambda refs, **kw: ([min(refs)], []))
        monkeypatch.setattr("ray.get", self._get)

    def play(self, order):
        reference = len(self.orders)
        self.orders[reference] = order
        return reference

    def _get(self, reference):
        import ray

        if reference in self.fails:
            raise ray.exceptions.RayError("the actor died")
        version = f"r0-step-{self.orders[reference].min_version}"
        return [msgspec.msgpack.encode(_trajectory(i, 1.0, version)) for i in range(self.orders[reference].size)]


def _sampler(tmp_path, actors, runs=("r0",), first=0, staleness=1, **changes):
    job = {"algorithm": {"groups": 4, "group_size": 2, "minibatches": 2}, "sampling": {"concurrency": 4}, "steps": 5}
    config = read_train_config(_write(tmp_path, **job, **changes))
    return Sampler(config, Staleness(staleness), actors, list(runs), first)


def test_groups_of_earlier_steps_come_first_and_few_are_played_at_a_time(tmp_path, monkeypatch):
    actors = _Actors(monkeypatch)
    sampler = _sampler(tmp_path, actors)
    sampler.sample_up_to(1)
    assert len(actors.orders) == 2  # four trajectories at a time, two a group
    assert len(list(sampler.groups_of(0))) == 4
    names = [o.name for o in actors.orders.values()]
    assert names[:4] == [f"r0-s0-g{i}" for i in range(4)] and len(set(names)) == len(names)
    sampler.sample_up_to(2)
    assert [len(list(sampler.groups_of(s))) for s in (1, 2)] == [4, 4]
    oldest = {o.name.split("-")[1]: o.min_version for o in actors.orders.values()}
    assert oldest == {"s0": "0", "s1": "0", "s2": "1"}
    seeds = {o.seed for o in actors.orders.values()}
    assert len(seeds) == 12


def test_a_group_that_fails_is_played_again_and_one_that_always_fails_is_an_error(tmp_path, monkeypatch):
    import ray

    actors = _Actors(monkeypatch, fails=(0, 3))
    sampler = _sampler(tmp_path, actors)
    sampler.sample_up_to(0)
    assert len(list(sampler.groups_of(0))) == 4
    broken = _Actors(monkeypatch, fails=range(100))
    sampler = _sampler(tmp_path, broken)
    sampler.sample_up_to(0)
    with pytest.raises(ray.exceptions.RayError):
        list(sampler.groups_of(0))


def test_after_a_restart_the_first_step_goes_on_under_its_old_names(tmp_path, monkeypatch):
    actors = _Actors(monkeypatch)
    sampler = _sampler(tmp_path, actors, runs=("r0", "r3"), first=2)
    sampler.sample_up_to(3)
    list(sampler.groups_of(2))
    list(sampler.groups_of(3))
    assert {o.name[:6] for o in actors.orders.values()} == {"r0-s2-", "r3-s3-"}
    assert sampler.prefixes(2) == ["r0-", "r3-"] and sampler.prefixes(3) == ["r3-"]


def test_useless_groups_are_replaced_up_to_the_cap(tmp_path, monkeypatch):
    actors = _Actors(monkeypatch)
    algorithm = {"groups": 4, "group_size": 2, "minibatches": 2, "dynamic_sampling": {"enabled": True, "cap": 2}}
    job = {"algorithm": algorithm, "sampling": {"concurrency": 4}}
    sampler = Sampler(read_train_config(_write(tmp_path, **job)), Staleness(0), actors, ["r0"], 0)
    sampler.sample_up_to(0)
    count = 0
    for _ in sampler.groups_of(0):
        count += 1
        sampler.replace(0)
    assert count == 8


# ---- figures and their display

_FIGURES = {
    "step": 3,
    "reward_mean": 0.5,
    "step_s": 2.0,
    "tokens_per_s_dedicated": 100.0,
    "tokens_per_s_borrowed": 50.0,
    "staleness_mean": 0.5,
    "serving_slack_ms": 12.3,
}


def test_a_step_is_a_line_where_there_is_no_terminal(capsys):
    display = Display(5, Console(width=200))
    with display.shown():
        display.begin_step(3, 4)
        display.group_done()
        display.end_step(_FIGURES)
    out = capsys.readouterr().out
    assert "step 3: reward 0.500, 2.0 s" in out and "|log ratio| –, SLO slack 12 ms" in out


def test_a_terminal_shows_the_latest_steps_and_how_far_it_is():
    console = Console(width=140, force_terminal=True, file=io.StringIO())
    display = Display(50, console)
    with display.shown():
        for step in range(20):
            display.begin_step(step, 4)
            display.group_done()
            display.end_step({**_FIGURES, "step": step, "sampler_log_ratio_abs_mean": 0.0123})
    last = console.file.getvalue().rpartition("log ratio")[2]
    assert "20/50" in last and "1/4" in last and "0.0123" in last
    assert "│ 19" in last and "│ 11" not in last


def test_turns_that_the_store_does_not_have_as_they_were_used_are_counted(tmp_path):
    whole, other, unknown = (_trajectory(i, 1.0) for i in range(3))
    with contextlib.closing(SqliteStore(tmp_path / "turns.sqlite")) as store:
        for trajectory, token_ids in ((whole, (0, 1, 2)), (other, (0, 1, 7))):
            store.begin(trajectory.trajectory_id, "g", {})
            turn = trajectory.turns[0]
            store.add_turn(
                trajectory.trajectory_id,
                Turn(0, turn.input_token_ids, token_ids, turn.logprobs, turn.spans),
            )
        assert lost_of([whole], store) == {"turns": 0, "tokens": 0}
        assert lost_of([whole, other, unknown], store) == {"turns": 2, "tokens": 6}
