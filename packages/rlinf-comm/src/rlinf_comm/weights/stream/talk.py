"""The messages between two ends of a weight stream: deadlines, messages of earlier attempts, and failures of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from rlinf_comm.errors import DecodeError, WeightTimeout
from rlinf_comm.weights.stream.wire import MessageLink

_Message = TypeVar("_Message")
_Result = TypeVar("_Result")

_SLICE_S = 0.25
"""A wait notices this soon that another one has failed."""


class Cancelled(Exception):
    """Another talk of the same call failed."""


class Talk:
    """The messages exchanged with one peer within one call.

    Args:
        who: The other side, as errors name it.
    """

    def __init__(self, link: MessageLink, name: str, who: str, policy_version: int, timeout_s: float) -> None:
        self._link = link
        self._name = name
        self.who = who
        self._policy_version = policy_version
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s
        self.is_cancelled = threading.Event()

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def send(self, message: object) -> None:
        """Sends a message. Raises WeightTimeout or PeerLost."""
        try:
            self._link.send(self._name, message, timeout_s=self.left_s)
        except TimeoutError as error:
            raise self._timeout(f"did not take a {type(message).__name__}") from error

    def receive(
        self, kind: type[_Message] | tuple[type[_Message], ...], key: tuple[str, int] | None = None
    ) -> _Message:
        """The next message of that kind, and of that session and attempt; others are of earlier attempts.

        Raises:
            WeightTimeout, PeerLost. DecodeError: what came is no message. Cancelled: another talk failed.
        """
        while True:
            message = self._next(getattr(kind, "__name__", "message"))
            message_key = (getattr(message, "session", None), getattr(message, "attempt", None))
            if isinstance(message, kind) and key in (None, message_key):
                return message

    def _next(self, what: str) -> Any:
        while True:
            if self.is_cancelled.is_set():
                raise Cancelled
            try:
                message = self._link.receive(self._name, timeout_s=min(self.left_s, _SLICE_S))
            except TimeoutError as error:
                if self.left_s <= 0:
                    raise self._timeout(f"sent no {what}") from error
                continue
            if not hasattr(message, "session") or not hasattr(message, "attempt"):
                raise DecodeError(f"{self.who} sent a {type(message).__name__}, which is no message of a weight stream")
            return message

    def _timeout(self, what: str) -> WeightTimeout:
        return WeightTimeout(
            f"{self.who} ({self._name!r}) {what} within timeout_s={self._timeout_s:g}, for version "
            f"{self._policy_version}",
            expected_version=self._policy_version,
        )


def for_each(
    call: Callable[[int, Talk], _Result], talks: Mapping[int, Talk], *, stop_at_failure: bool
) -> list[_Result]:
    """Calls it for all of them at the same time; raises the first failure, by rank, after all have ended.

    Args:
        stop_at_failure: The others stop waiting as soon as one has failed.
    """
    if len(talks) <= 1:
        return [call(rank, talk) for rank, talk in talks.items()]
    with ThreadPoolExecutor(len(talks), thread_name_prefix="weight-stream") as pool:
        futures = [pool.submit(call, rank, talk) for rank, talk in talks.items()]
        try:
            if stop_at_failure:
                wait(futures, return_when=FIRST_EXCEPTION)
            else:
                wait(futures)
        finally:
            if stop_at_failure:  # those that are done do not look
                for talk in talks.values():
                    talk.is_cancelled.set()
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda error: isinstance(error, Cancelled)):
        raise error
    return [future.result() for future in futures]
