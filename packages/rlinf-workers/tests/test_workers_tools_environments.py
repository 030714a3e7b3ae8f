"""Text environments: those of Gymnasium and of OpenEnv, and who causes a failure."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Text

from rlinf_algos import AlgosError
from rlinf_workers.agents.tools import TextStep, ToolFailed, make_environments
from rlinf_workers.plugins import OptionError

LETTERS = "abcdefghijklmnopqrstuvwxyz "


class Counting(gymnasium.Env):
    """Asks for words and counts the steps; some words make it fail."""

    observation_space = Text(10_000)
    action_space = Text(20, min_length=1, charset=LETTERS)

    def __init__(self, *, limit: int = 3) -> None:
        self.limit, self.num_steps, self.threads = limit, 0, {threading.get_ident()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.num_steps = 0
        self.threads.add(threading.get_ident())
        return f"Number {self.np_random.integers(1000)}, floor {options['floor']}", {}

    def step(self, action: str) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.num_steps += 1
        self.threads.add(threading.get_ident())
        match action:
            case "crash":
                raise KeyError("own mistake")
            case "exit":
                sys.exit(1)
            case "hang":
                time.sleep(1)
            case "garbage":
                return 7, 0.0, False, False, {}
            case "nan":
                return "x", float("nan"), False, False, {}
            case "flood":
                return "x" * 100_000, 0.0, False, False, {}
        assert len(self.threads) == 1
        return f"{self.num_steps}: {action}", 0.5, action == "stop", self.num_steps == self.limit, {}


class Custom:
    """An environment without Gymnasium."""

    def __init__(self, *, greeting: str) -> None:
        self.greeting = greeting

    async def reset(self, seed: int, row: Mapping[str, Any]) -> TextStep:
        return TextStep(text=f"{self.greeting} {seed}")

    async def step(self, text: str) -> TextStep:
        if text == "door":
            raise ToolFailed("There is no door.")
        return TextStep(text="", reward=1.0, terminated=True)

    async def close(self) -> None:
        raise OSError("gone")


@pytest.fixture(autouse=True)
def own_module(monkeypatch) -> None:
    module: Any = ModuleType("own_environments")
    module.Counting, module.Custom, module.number = Counting, Custom, 3
    monkeypatch.setitem(sys.modules, "own_environments", module)


def play(name: str, texts: list[str], *, seed: int = 0, **options: Any) -> list[TextStep]:
    """What an environment answers to a reset and these texts."""

    async def main() -> list[TextStep]:
        environment = make_environments({"name": name, **options})()
        try:
            return [await environment.reset(seed, {"floor": 2}), *[await environment.step(text) for text in texts]]
        finally:
            await environment.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def counting(*texts: str, seed: int = 0, **options: Any) -> list[TextStep]:
    return play("gymnasium", list(texts), seed=seed, id="own_environments:Counting", **options)


def test_an_environment_of_gymnasium():
    steps = counting("north", "stop", arguments={"limit": 5})
    assert [(step.text, step.reward, step.terminated, step.truncated, step.failure) for step in steps[1:]] == [
        ("1: north", 0.5, False, False, ""),
        ("2: stop", 0.5, True, False, ""),
    ]
    assert counting("a", "b", arguments={"limit": 2})[2].truncated
    assert counting()[0].text == counting()[0].text != counting(seed=1)[0].text
    assert counting()[0].text.endswith("floor 2")


def test_a_registered_environment():
    gymnasium.register("Counting-v0", entry_point=lambda **options: Counting(**options), disable_env_checker=True)
    try:
        assert play("gymnasium", ["north"], id="Counting-v0")[1].text == "1: north"
    finally:
        gymnasium.registry.pop("Counting-v0")


def test_a_text_that_is_no_action_changes_nothing():
    steps = counting("NORTH!", "", "a" * 21, "north")
    assert [step.failure for step in steps] == ["", "policy", "policy", "policy", ""]
    assert steps[1].text.startswith("This is no possible action: 'NORTH!'. Possible: Text(")
    assert steps[-1].text == "1: north"


@pytest.mark.parametrize(
    ("word", "detail"),
    [
        ("crash", "KeyError: 'own mistake'"),
        ("exit", "it raised SystemExit"),
        ("hang", "step of the environment did not answer within 0.3 s"),
        ("garbage", "step returned a int as the text"),
        ("nan", "step returned the reward nan"),
    ],
)
def test_an_environment_that_fails_is_the_services(word, detail):
    steps = counting(word, "north", time_limit_s=0.3 if word == "hang" else 30)
    assert (steps[1].failure, detail in steps[1].detail) == ("service", True), steps
    assert (steps[2].failure, steps[2].detail) == ("service", "the episode has ended, or has not begun")


def test_long_texts_are_cut():
    text = counting("flood", max_characters=500)[1].text
    assert len(text) <= 500 and "left out" in text


@pytest.mark.parametrize(
    ("id", "detail"),
    [
        ("CartPole-v1", "CartPole-v1 has the observation_space Box"),
        ("Absent-v0", "there is no environment 'Absent-v0'"),
        ("absent_package:Absent-v0", "there is no environment 'absent_package:Absent-v0'"),
    ],
)
def test_other_environments_are_the_services(id, detail):
    step = play("gymnasium", [], id=id)[0]
    assert (step.failure, detail in step.detail) == ("service", True), step


def test_a_custom_environment(caplog):
    steps = play("own_environments:Custom", ["door", "window", "window"], seed=3, greeting="Hello")
    assert [(step.text, step.failure, step.terminated) for step in steps] == [
        ("Hello 3", "", False),
        ("There is no door.", "policy", False),
        ("", "", True),
        ("", "service", False),
    ]
    assert "an environment did not close" in caplog.text


def test_an_environment_that_cannot_be_created_is_the_services():
    step = play("own_environments:Custom", [], welcome="Hello")[0]
    assert (step.failure, "unexpected keyword argument 'welcome'" in step.detail) == ("service", True)


def test_64_environments_at_once_are_kept_apart():
    async def main() -> None:
        create = make_environments(
            {"name": "gymnasium", "id": "own_environments:Counting", "arguments": {"limit": 100}}
        )
        environments = [create() for _ in range(64)]

        async def one(i: int) -> list[str]:
            await environments[i].reset(i, {"floor": 2})
            texts = [(await environments[i].step("x" * (i % 20 + 1))).text for _ in range(i % 5 + 1)]
            await environments[i].close()
            return texts

        results = await asyncio.gather(*map(one, range(64)))
        assert results == [[f"{k + 1}: {'x' * (i % 20 + 1)}" for k in range(i % 5 + 1)] for i in range(64)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("gymnasum", {}, "did you mean 'gymnasium'?"),
        ("gymnasium", {}, "missing required field `id`"),
        ("gymnasium", {"id": "x", "time_limit_s": 0}, "time_limit_s=0.0 must be above 0"),
        ("openenv", {"uri": "x"}, "did you mean 'url'?"),
        ("own_environments:number", {}, "is a int, not a class"),
    ],
)
def test_wrong_names_and_options_are_refused(name, options, problem):
    with pytest.raises((AlgosError, OptionError)) as error:
        make_environments({"name": name, **options})
    assert problem in str(error.value)


# -- OpenEnv: its package needs another version of `mcp` than the tool of that name -----------------------------------

OPENENV_SERVER = """
import sys
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
import uvicorn


class Say(Action):
    message: str
    loud: bool = False


class Heard(Observation):
    text: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.num_steps = 0
        return Heard(text=f"seed {seed}")

    def step(self, action, timeout_s=None, **more):
        if action.message == "crash":
            raise ValueError("own mistake")
        self.num_steps += 1
        text = action.message.upper() if action.loud else action.message
        return Heard(text=f"{self.num_steps}: {text}", reward=0.5, done=action.message == "stop")

    @property
    def state(self):
        return State(step_count=self.num_steps)


app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="critical")
"""


def test_openenv_that_is_not_installed_is_said():
    if "openenv" in sys.modules or _is_installed("openenv"):
        pytest.skip("it is installed")
    step = play("openenv", [], url="http://127.0.0.1:9")[0]
    assert (step.failure, "needs openenv: pip install openenv" in step.detail) == ("service", True)


def _is_installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


@pytest.mark.slow
def test_a_server_of_openenv(tmp_path):
    pytest.importorskip("openenv.core.generic_client")
    script = Path(tmp_path, "server.py")
    script.write_text(OPENENV_SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(script), str(port)])
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert server.poll() is None
        options = {"url": f"http://127.0.0.1:{port}", "observation_key": "text", "action": {"loud": True}}
        steps = play("openenv", ["north", "stop"], seed=7, **options)
        assert [(step.text, step.reward, step.terminated) for step in steps] == [
            ("seed 7", 0.0, False),
            ("1: NORTH", 0.5, False),
            ("2: STOP", 0.5, True),
        ]
        refused = play("openenv", ["north"], url=options["url"], action_key="words")[1]
        assert refused.failure == "policy"
        crashed = play("openenv", ["crash", "north"], **options)
        assert [step.failure for step in crashed] == ["", "service", "service"]
        assert play("openenv", [], url=options["url"], observation_key="words")[0].failure == "service"
    finally:
        server.kill()
        server.wait()
    assert play("openenv", [], **options)[0].failure == "service"
