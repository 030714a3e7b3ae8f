"""Calls of tools: whatever a tool does, the caller gets a result that says who caused a failure."""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from types import ModuleType
from typing import Any, Literal

import pytest

from rlinf_algos import AlgosError
from rlinf_workers.agents.messages import ToolCall
from rlinf_workers.agents.pictures import part_of
from rlinf_workers.agents.tools import (
    CheckedTool,
    EpisodeTools,
    FunctionTool,
    ToolFailed,
    ToolResult,
    ToolSpec,
    ToolUnavailable,
    check_tools,
    make_tools,
    start_tools,
)
from rlinf_workers.agents.tools.custom import MAX_LEFT_CALLS, FunctionOptions
from rlinf_workers.agents.tools.limits import cut
from rlinf_workers.plugins import OptionError


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 60))


async def call(function: Callable[..., Any], arguments: Any = None, **options: Any) -> ToolResult:
    """The result of one call of a function as a tool."""
    tool = CheckedTool(FunctionTool(function, FunctionOptions(**options)))
    await tool.start()
    return await tool.open("episode").call(function.__name__, {} if arguments is None else arguments)


class Counter:
    """A tool whose sessions count their calls, and fail as the test says."""

    time_limit_s: float | None = 5.0
    max_characters = 1000
    keeps_state = True

    def __init__(self, failures: tuple[int, ...] = (), *, name: str = "count") -> None:
        self.specs = (ToolSpec(name=name, description="", parameters={"type": "object"}),)
        self.failures = list(failures)
        self.num_open, self.num_calls, self.is_closed = 0, 0, False

    async def start(self) -> None:
        pass

    def open(self, episode: str) -> "CounterSession":
        self.num_open += 1
        return CounterSession(self)

    async def close(self) -> None:
        self.is_closed = True


class CounterSession:
    def __init__(self, tool: Counter) -> None:
        self.tool, self.value = tool, 0

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        self.tool.num_calls += 1
        if self.tool.num_calls in self.tool.failures:
            raise ToolUnavailable("lost")
        self.value += 1
        return ToolResult(text=str(self.value))

    async def close(self) -> None:
        self.tool.num_open -= 1


class Recreated(Counter):
    def open(self, episode: str) -> "RecreatedSession":
        self.num_open += 1
        return RecreatedSession(self)


class RecreatedSession(CounterSession):
    def snapshot(self) -> bytes:
        return str(self.value).encode()

    async def restore(self, snapshot: bytes) -> ToolResult:
        self.value = int(snapshot)
        return ToolResult(text="")


# -- who caused it -----------------------------------------------------------------------------------------------------


async def works() -> str:
    return "done"


async def fails() -> str:
    raise ToolFailed("There is no file 'x'.")


async def unavailable() -> str:
    raise ToolUnavailable("the server answers 500")


async def crashes() -> str:
    raise KeyError("own mistake")


def crashes_in_thread() -> str:
    raise ZeroDivisionError


async def exits() -> str:
    raise SystemExit(3)


def exits_in_thread() -> str:
    sys.exit(3)


async def hangs() -> str:
    await asyncio.sleep(60)
    return ""


def hangs_in_thread() -> str:
    time.sleep(5)
    return ""


async def cancels_itself() -> str:
    raise asyncio.CancelledError


async def cannot_be_cancelled() -> str:
    for _ in range(2):
        try:
            await asyncio.sleep(0.3)
        except asyncio.CancelledError:
            pass
    return ""


async def stops_iteration() -> str:
    raise StopIteration


async def returns_garbage() -> Any:
    return ToolResult(text=b"\xff")  # type: ignore[arg-type]


async def returns_what_is_no_json() -> Any:
    return object()


@pytest.mark.parametrize(
    ("function", "failure", "detail"),
    [
        (works, "", ""),
        (fails, "policy", "There is no file 'x'."),
        (unavailable, "service", "the server answers 500"),
        (crashes, "service", "KeyError: 'own mistake'"),
        (crashes_in_thread, "service", "in crashes_in_thread"),
        (exits, "service", "the tool raised SystemExit"),
        (exits_in_thread, "service", "the tool raised SystemExit"),
        (hangs, "service", "hangs did not answer within 0.2 s"),
        (hangs_in_thread, "service", "hangs_in_thread did not answer within 0.2 s"),
        (cancels_itself, "service", "cancels_itself cancelled itself"),
        (cannot_be_cancelled, "service", "cannot_be_cancelled did not answer within 0.2 s"),
        (stops_iteration, "service", "StopIteration"),
        (returns_garbage, "service", "returned an invalid ToolResult"),
        (returns_what_is_no_json, "service", "TypeError"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_who_caused_a_failure(function, failure, detail):
    result = run(call(function, time_limit_s=0.2 if function.__name__ not in ("works", "fails") else 10))
    assert result.failure == failure
    assert detail in result.detail
    assert (result.text == "done") is (failure == "")
    assert result.text == result.detail or failure != "policy"  # the policy reads what it did


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"city": 3}, "city: 3 is not of type 'string'"),
        ({}, "'city' is a required property"),
        ({"city": "Bern", "day": 2}, "Additional properties are not allowed ('day' was unexpected)"),
        ({"city": "Bern", "days": 5}, "days: 5 is not one of [1, 7]"),
        ("Bern", "must be an object, not str"),
        (["Bern"], "must be an object, not list"),
    ],
)
def test_wrong_arguments_are_the_policys(arguments, problem):
    result = run(call(weather, arguments))
    assert (result.failure, problem in result.text) == ("policy", True), result


def test_an_unknown_function_is_the_policys():
    async def main() -> ToolResult:
        tools = [CheckedTool(FunctionTool(weather))]
        await start_tools(tools)
        return await EpisodeTools(tools, "e").call("whether", {})

    result = run(main())
    assert (result.failure, result.text) == ("policy", "There is no tool 'whether'; did you mean 'weather'?")


def test_the_caller_can_cancel_a_call():
    states: list[str] = []

    async def waits() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            states.append("ended")
        return ""

    async def main() -> None:
        task = asyncio.ensure_future(call(waits))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert states == ["ended"]


def test_texts_are_cut_in_the_middle_and_valid():
    async def floods() -> str:
        return "a" * 10_000 + "\ud800" + "z" * 10_000

    text = run(call(floods, max_characters=300)).text
    assert len(text) == 300
    assert text.startswith("aaa") and text.endswith("zzz")
    num_left_out = int(text.partition("[... ")[2].partition(" ")[0])
    assert num_left_out == 20_001 - text.count("a", 0, 140) - text.count("z")
    assert cut("x" * 100, 100) == "x" * 100

    async def surrogate() -> str:
        return "a\ud800"

    assert run(call(surrogate)).text == "a?"


def test_calls_that_never_return_do_not_pile_up():
    release = threading.Event()

    def waits() -> str:
        release.wait(60)
        return ""

    async def main() -> tuple[list[str], str]:
        tool = CheckedTool(FunctionTool(waits, FunctionOptions(time_limit_s=0.01)))
        await tool.start()
        session = tool.open("e")
        late = [(await session.call("waits", {})).detail for _ in range(MAX_LEFT_CALLS)]
        refused = (await session.call("waits", {})).detail
        release.set()
        while (await session.call("waits", {})).failure:
            await asyncio.sleep(0.01)
        return late, refused

    late, refused = run(main())
    assert all("did not answer" in detail for detail in late)
    assert refused == f"{MAX_LEFT_CALLS} calls of waits have not returned after their deadline"


# -- functions as tools ------------------------------------------------------------------------------------------------


async def weather(city: str, days: Literal[1, 7] = 1) -> str:
    """The forecast for a city.

    It is often right.

    Args:
        city: its name
            in English.
        days: how far ahead.

    Returns:
        a text.
    """
    return f"{city} {days}"


def test_a_function_becomes_a_spec():
    spec = FunctionTool(weather).specs[0]
    assert spec.as_openai() == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The forecast for a city.\n\nIt is often right.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name in English."},
                    "days": {"enum": [1, 7], "default": 1, "description": "how far ahead."},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    assert FunctionTool(weather, FunctionOptions(name="forecast")).specs[0].name == "forecast"


def test_arguments_and_results_are_converted():
    def shape(size: tuple[int, int], *, names: list[str] = []) -> dict[str, Any]:  # noqa: B006
        return {"size": list(size), "is_tuple": isinstance(size, tuple), "names": names}

    assert run(call(shape, {"size": [2, 3]})).text == '{"size":[2,3],"is_tuple":true,"names":[]}'
    assert run(call(weather, {"city": "Bern", "days": 7})).text == "Bern 7"


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda x: x, "'x' of the tool .* has no annotation"),
        (lambda *names: names, "passes arguments by name"),
    ],
)
def test_functions_without_a_schema_are_refused(function, problem):
    with pytest.raises(AlgosError, match=problem):
        FunctionTool(function)

    def takes_a_lock(lock: threading.Event) -> None:
        pass

    with pytest.raises(AlgosError, match="takes_a_lock have no JSON schema"):
        FunctionTool(takes_a_lock)


# -- by name -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_tools(monkeypatch) -> None:
    module: Any = ModuleType("own_tools")
    module.weather, module.Counter, module.counter, module.number = weather, Counter, Counter(), 3
    monkeypatch.setitem(sys.modules, "own_tools", module)


@pytest.mark.usefixtures("own_tools")
def test_custom_tools_are_located_by_import_path():
    tools = make_tools(
        ["own_tools:weather", {"tool": "own_tools:Counter", "failures": (1,), "name": "own"}, "own_tools:counter"]
    )
    run(start_tools(tools))
    assert [spec.name for tool in tools for spec in tool.specs] == ["weather", "own", "count"]
    limited = make_tools([{"tool": "own_tools:weather", "time_limit_s": 3, "name": "forecast"}])[0]
    assert (limited.time_limit_s, limited.specs[0].name) == (3, "forecast")


@pytest.mark.usefixtures("own_tools")
@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("serach", "no tool is called 'serach'; did you mean 'search'?"),
        ("own_tools:wether", "cannot be imported"),
        ("own_tools:number", "is a int, neither a function nor a class of tools"),
        ({"path": "x"}, "needs the key `tool`"),
        ({"tool": "own_tools:weather", "time_limit": 3}, "did you mean 'time_limit_s'?"),
        ({"tool": "own_tools:weather", "max_characters": 3}, "must be at least 100"),
        ({"tool": "own_tools:weather", "time_limit_s": 0}, "must be above 0"),
        ({"tool": "own_tools:Counter", "wrong": 3}, "unexpected keyword argument 'wrong'"),
        ({"tool": "own_tools:counter", "failures": 3}, "is an object and takes no options"),
    ],
)
def test_wrong_entries_are_refused(entry, problem):
    with pytest.raises((AlgosError, OptionError)) as error:
        make_tools([entry])
    assert problem in str(error.value)


def test_entries_are_checked_without_importing_custom_tools():
    problems = list(check_tools(["serach", "absent_package:tool", {"path": "x"}, "own_tools_of_nobody:x"]))
    assert [(index, option) for index, option, _ in problems] == [(0, ""), (1, ""), (2, ""), (3, "")]
    assert "did you mean 'search'?" in problems[0][2]


def test_two_functions_of_one_name_are_refused():
    tools = [CheckedTool(Counter()), CheckedTool(Counter())]
    with pytest.raises(ToolUnavailable, match="two tools have a function 'count'"):
        run(start_tools(tools))
    assert all(tool.tool.is_closed for tool in tools)  # type: ignore[attr-defined]


def test_a_wrong_schema_is_refused_at_the_start():
    counter = Counter()
    counter.specs = (ToolSpec(name="count", description="", parameters={"type": "objekt"}),)
    with pytest.raises(ToolUnavailable, match="the parameters of the tool 'count' are no JSON schema"):
        run(start_tools([CheckedTool(counter)]))


def test_a_schema_fetches_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        counter = Counter()
        reference = {"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"}
        counter.specs = (ToolSpec(name="count", description="", parameters=reference),)

        async def main() -> ToolResult:
            await start_tools([tool := CheckedTool(counter)])
            return await tool.open("e").call("count", {})

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)  # without an answer a request hangs
        thread.start()
        thread.join(5)
        with pytest.raises(BlockingIOError):
            server.accept()
        assert "Unresolvable" in run(main()).detail


# -- episodes ----------------------------------------------------------------------------------------------------------


async def count(tools: EpisodeTools, times: int) -> list[str]:
    return [(await tools.call("count", {})).text for _ in range(times)]


async def started(tool: Counter) -> list[CheckedTool]:
    tools = [CheckedTool(tool)]
    await start_tools(tools)
    return tools


@pytest.mark.parametrize(
    ("sees", "content"),
    [(True, [{"type": "text", "text": "a map"}, part_of(b"png")]), (False, "a map\n[image left out]")],
)
def test_a_policy_sees_the_pictures_of_a_tool_or_reads_that_there_is_one(sees, content):
    def draw() -> ToolResult:
        """Draws a map."""
        return ToolResult(text="a map", pictures=(b"png",))

    async def main() -> list[dict[str, Any]]:
        tools = [CheckedTool(FunctionTool(draw))]
        await start_tools(tools)
        return await EpisodeTools(tools, "e", sees=sees).answers([ToolCall("1", "draw", "{}")])

    assert run(main()) == [{"role": "tool", "tool_call_id": "1", "name": "draw", "content": content}]


def test_a_service_that_fails_once_is_tried_again_with_the_same_state():
    async def main() -> None:
        tool = Recreated(failures=(3,))
        episode = EpisodeTools(await started(tool), "e")
        assert await count(episode, 4) == ["1", "2", "3", "4"]
        assert (tool.num_calls, tool.num_open) == (5, 1)
        await episode.close()
        assert tool.num_open == 0

    run(main())


def test_a_service_that_fails_again_is_the_result():
    async def main() -> None:
        tool = Recreated(failures=(1, 2))
        episode = EpisodeTools(await started(tool), "e")
        result = await episode.call("count", {})
        assert (result.failure, result.detail, tool.num_calls) == ("service", "lost", 2)
        assert await count(episode, 1) == ["1"]
        once = EpisodeTools(await started(Recreated(failures=(1,))), "e", num_attempts=1)
        assert (await once.call("count", {})).failure == "service"

    run(main())


def test_a_state_that_cannot_be_recreated_is_not_tried_again():
    async def main() -> None:
        tool = Counter(failures=(1, 3))
        episode = EpisodeTools(await started(tool), "e")
        assert await count(episode, 1) == ["1"]  # no state was lost by the first failure
        for _ in range(2):
            result = await episode.call("count", {})
            assert result.failure == "service"
            assert "lost; the state of count cannot be recreated" in result.detail
        assert tool.num_calls == 3
        with pytest.raises(ToolUnavailable, match="cannot be recreated"):
            episode.branch("other")

    run(main())


def test_branches_continue_from_the_same_state():
    async def main() -> None:
        tools = await started(Recreated())
        episode = EpisodeTools(tools, "e")
        await count(episode, 2)
        branches = [episode.branch(name) for name in "ab"]
        assert await count(branches[0], 2) == ["3", "4"]
        assert await count(branches[1].branch("c"), 1) == ["3"]  # of a branch that has not called anything yet
        assert await count(episode, 1) == ["3"]
        assert await count(branches[1], 1) == ["3"]

    run(main())


def test_a_closed_episode_opens_nothing():
    async def main() -> None:
        tool = Recreated()
        episode = EpisodeTools(await started(tool), "e")
        await count(episode, 1)
        await episode.close()
        result = await episode.call("count", {})
        assert (result.failure, tool.num_open) == ("service", 0)

    run(main())


def test_a_session_that_does_not_close_is_reported(caplog):
    class Stuck(CounterSession):
        async def close(self) -> None:
            raise OSError("gone")

    class Tool(Counter):
        def open(self, episode: str) -> Stuck:
            return Stuck(self)

    async def main() -> None:
        episode = EpisodeTools(await started(Tool()), "e")
        await count(episode, 1)
        await episode.close()

    run(main())
    assert "a session of count did not close" in caplog.text
