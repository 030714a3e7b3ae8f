"""What a config names, the launcher and the weight sync: found, made with its options, or a message with the key."""

import os
from pathlib import Path
from typing import Any

import pytest

from rlinf.config.common import ClusterConfig
from rlinf.errors import ProcessesLost, RunFailed, UserError
from rlinf.machine import machine_of
from rlinf.plugin_checks import named_class
from rlinf.processes.env_vars import as_in_workers, worker_env_vars
from rlinf.processes.executor import check_plugins, make_executor, run_failed
from rlinf_algos import Registry
from rlinf_sched import Cluster
from rlinf_workers import ClusterRefused, NodeLost, RemoteError, WorkerLost
from rlinf_workers.launchers import Node

MADE: list[dict[str, object]] = []


class Recording:
    def __init__(self, *, color: str = "red", **settings: object) -> None:
        MADE.append({"color": color, **settings})

    def serve(self, service: str, handler: object) -> None: ...

    def shutdown(self) -> None: ...


def make(tmp_path: Path, **config):
    cluster = Cluster.cpu_slots(1, memory_bytes=1)
    return make_executor(
        ClusterConfig(**config), cluster, models=(), log_folder=tmp_path, worker_timeout_s=7.0, forks=True
    )


class Typed:
    def __init__(self, sizes: tuple[int, ...], free, unknown: "Unknown" = None) -> None: ...  # noqa: F821  # pyright: ignore


def test_values_are_checked_where_the_constructor_says_what_it_takes() -> None:
    def check(**options: object) -> None:
        named_class(Registry("thing", {}), f"{__name__}:Typed", options, at="thing")

    check(sizes=[1, 2], free="anything")
    check(sizes=[1], free=[{}], unknown="its own business")


def test_a_launcher_of_ones_own_gets_the_settings_of_the_run_and_its_options(tmp_path: Path) -> None:
    path = f"{Recording.__module__}:Recording"
    make(tmp_path, launcher=path, launcher_options={"color": "blue"}, pin_slots=False).shutdown()
    assert MADE == [{"color": "blue", "heartbeat_timeout_s": 7.0, "pins_slots": False, "forks": True}]


class OnNodes(Recording):
    """Two machines, of which the second has GPUs that torch does not find."""

    @classmethod
    def nodes(cls, *, refuses: bool = False, **_: object) -> list[Node]:
        if refuses:
            raise ClusterRefused("nobody is there")
        first = Node(id="1", hostname="a", address="10.0.0.1", num_cpus=2, memory_bytes=4)
        return [first, Node(id="2", hostname="b", address="10.0.0.2", num_cpus=3, num_gpus=4, memory_bytes=6)]

    notes = ("the cluster is open",)

    def __init__(self, *, refuses: bool = False, loses: bool = False, **settings: Any) -> None:
        if refuses:
            raise ClusterRefused("no room")
        if loses:
            raise NodeLost("node 1 is gone")
        super().__init__(**settings)


def test_devices_are_of_the_nodes_that_the_launcher_knows(tmp_path: Path) -> None:
    MADE.clear()
    path = f"{OnNodes.__module__}:OnNodes"
    machine = machine_of(ClusterConfig(launcher=path))
    assert [(node.num_cpus, node.memory_bytes) for node in machine.nodes] == [(2, 4), (3, 6)]
    assert (machine.num_cpus, machine.memory_bytes) == (5, 10)
    assert machine.unusable_gpus == "b (10.0.0.2): 3 CPUs, 4 GPUs, of which torch finds 0 there"
    make(tmp_path, launcher=path).shutdown()
    assert MADE[0]["cluster"] == Cluster.cpu_slots(1, memory_bytes=1)
    with pytest.raises(UserError, match="nobody is there"):
        machine_of(ClusterConfig(launcher=path, launcher_options={"refuses": True}))
    with pytest.raises(UserError, match="no room"):
        make(tmp_path, launcher=path, launcher_options={"refuses": True})


def test_a_node_that_is_lost_at_the_start_is_a_loss_of_processes_and_no_wrong_input(tmp_path: Path) -> None:
    path = f"{OnNodes.__module__}:OnNodes"
    with pytest.raises(ProcessesLost, match="node 1 is gone"):
        make(tmp_path, launcher=path, launcher_options={"loses": True})
    executor = make(tmp_path, launcher=path)
    assert executor.notes == ["the cluster is open"]
    executor.shutdown()


def test_workers_get_the_credentials_that_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is tried in the driver sees what it will see in a worker."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.setenv("WANDB_API_KEY", "0a1b")
    passing = ClusterConfig(pass_env_vars=("OPENAI_API_KEY",))
    assert "OPENAI_API_KEY" not in worker_env_vars(ClusterConfig())
    assert worker_env_vars(passing)["OPENAI_API_KEY"] == "sk-1"
    with as_in_workers(passing):
        assert os.environ["OPENAI_API_KEY"] == "sk-1" and "WANDB_API_KEY" not in os.environ
    hint = r"hint: workers get no .*: --cluster.pass_env_vars '\[OPENAI_API_KEY\]'"
    with pytest.raises(UserError, match=hint), as_in_workers(ClusterConfig()):
        raise UserError("reward.path=my:reward: KeyError: 'OPENAI_API_KEY'")
    assert os.environ["WANDB_API_KEY"] == "0a1b"
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UserError, match=r"cluster\.pass_env_vars: OPENAI_API_KEY not set"):
        check_plugins(passing)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"launcher": "locale"}, "cluster.launcher: no launcher is called 'locale'; did you mean 'local'?"),
        ({"launcher": "nowhere:Launcher"}, "cluster.launcher: the launcher 'nowhere:Launcher' cannot be imported"),
        ({"launcher_options": {"colour": 1}}, "cluster.launcher_options: local got an unexpected keyword argument"),
        ({"launcher_options": {"forks": True}}, "cluster.launcher_options: local is given 'forks' by the run"),
        ({"weight_sync": "share"}, "cluster.weight_sync: no weight sync is called 'share'; did you mean 'shared'?"),
        ({"weight_sync_options": {"port": 1}}, "cluster.weight_sync_options: auto takes none"),
        (
            {"launcher": f"{__name__}:Recording", "launcher_options": {"color": 1}},
            f"cluster.launcher_options.color=1: {__name__}:Recording wants it to be a valid string",
        ),
        (
            {"weight_sync": "shared", "weight_sync_options": {"port": 1}},
            "cluster.weight_sync_options: shared got an unexpected keyword argument 'port'",
        ),
    ],
)
def test_what_cannot_be_made_is_named_by_its_key(config: dict, text: str) -> None:
    with pytest.raises(UserError) as caught:
        check_plugins(ClusterConfig(**config))
    assert str(caught.value).startswith(text)


def test_settings_that_a_worker_refused_are_shown_without_its_traceback():
    lost = ("rollout/1", "here", "could not start", "a.log", "Traceback")
    refused = run_failed(WorkerLost(*lost, refusal="no such color: redd"), Path("logs"), during="step 0: ")
    assert isinstance(refused, UserError) and refused.message == "no such color: redd"
    assert refused.hint == "worker rollout/1 was not started; logs/rollout/1.log has what it said before"
    other = run_failed(WorkerLost(*lost), Path("logs"), during="step 0: ")
    assert isinstance(other, RunFailed) and "Traceback" in str(other)


@pytest.mark.parametrize(("raised", "goes_on"), [("ProcessLost", True), ("PeerLost", True), ("ValueError", False)])
def test_a_run_goes_on_after_a_lost_process_or_connection_and_not_after_a_mistake(raised: str, goes_on: bool):
    failure = run_failed(RemoteError("rollout/0", raised, "it is gone", "Traceback"), None, during="step 3: ")
    assert isinstance(failure, ProcessesLost) is goes_on
