"""Custom reward functions: calls them with the arguments they take, under a time limit.

The function is called as `f(completion, answer)`. If it has a parameter `prompt`, it gets the prompt; if it has a
parameter `row`, all columns of the data row (a dict; empty for generated problems); if it has one called `pictures`,
the files of the prompt's pictures (a tuple of bytes); all by name. It returns a number, a bool, or a `RewardResult`.
"""

import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import PICTURE_FILES, RewardResult, as_result, close_reward

TIME_LIMIT_S = 60.0
_PARAMETERS = ("prompt", "row", "pictures")
_LOOK_S = 0.05


class CustomReward:
    """Calls a custom function in a thread with a time limit.

    Args:
        function: see the module's docstring.
        name: its name in messages.
        time_limit_s: time limit of each call. Exceeding it is an error with the call's stack; the thread is abandoned.

    Raises:
        RewardError: the function does not accept these arguments.
    """

    reads_prompts = True

    def __init__(self, function: Callable[..., Any], *, name: str, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._function, self._name, self._time_limit_s = function, name, time_limit_s
        self._named = _named_parameters(function, name)
        self.reads_pictures = "pictures" in self._named
        self.reads_rows = "row" in self._named or self.reads_pictures

    def __call__(self, completion: str, reference: str) -> RewardResult:
        return self.score_batch([completion], [reference])[0]

    def score_batch(
        self,
        completions: Sequence[str],
        references: Sequence[str],
        prompts: Sequence[str] | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[RewardResult, ...]:
        """One result for each completion, in order.

        Raises:
            RewardError: a call raised (its exception is the cause), hung, or returned no number.
        """
        rows = [{}] * len(completions) if rows is None else rows
        arguments: dict[str, Sequence[Any]] = {
            "prompt": [""] * len(completions) if prompts is None else prompts,
            "row": [{name: one for name, one in row.items() if name != PICTURE_FILES} for row in rows],
            "pictures": [row.get(PICTURE_FILES, ()) for row in rows],
        }
        calls = [
            (pair, {name: arguments[name][i] for name in self._named})
            for i, pair in enumerate(zip(completions, references, strict=True))
        ]
        work = _Work(self._function, calls)
        self._watch(work)
        if work.error is not None:
            completion, reference = calls[len(work.results)][0]
            raise RewardError(
                f"reward {self._name!r} on completion {completion[-80:]!r}, answer {reference[-80:]!r}: "
                f"{type(work.error).__name__}: {work.error}"
            ) from work.error
        return tuple(as_result(value, f"reward {self._name!r}") for value in work.results)

    def close(self) -> None:
        close_reward(self._function)

    def _watch(self, work: "_Work") -> None:
        thread = threading.Thread(target=work.run, name=f"reward {self._name}", daemon=True)
        thread.start()
        while not work.done.wait(_LOOK_S):
            if time.monotonic() - work.started_s > self._time_limit_s:
                frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
                ours = (__file__, threading.__file__)
                stack = [one for one in traceback.extract_stack(frame) if one.filename not in ours]
                raise RewardError(
                    f"reward {self._name!r} did not return within {self._time_limit_s:g} s; it is at\n"
                    + "".join(traceback.format_list(stack)).rstrip()
                )


class _Work:
    """Consecutive calls; `run` stops at the first that raises."""

    def __init__(self, function: Callable[..., Any], calls: Sequence[tuple[tuple[str, str], dict[str, Any]]]) -> None:
        self._function, self._calls = function, calls
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.started_s = time.monotonic()
        self.done = threading.Event()

    def run(self) -> None:
        try:
            for pair, named in self._calls:
                self.started_s = time.monotonic()
                self.results.append(self._function(*pair, **named))
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it again, including SystemExit
            self.error = error
        finally:
            self.done.set()


def _named_parameters(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C
        return ()
    parameters = signature.parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    named = tuple(one for one in _PARAMETERS if one in parameters or takes_all)
    try:
        signature.bind("", "", **dict.fromkeys(named, ""))
    except TypeError as error:
        raise RewardError(
            f"the reward {name!r} has the parameters {signature}: {error}. It is called as f(completion, answer), with "
            "prompt=, row= and pictures= if it has parameters of these names"
        ) from error
    return named
