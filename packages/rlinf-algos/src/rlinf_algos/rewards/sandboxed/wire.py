"""Calls between two processes that do not trust each other: plain data by value, other objects by number.

Copied into both sandboxes and imported there; imports nothing of ours. A message is a line of JSON: a request
`["ask", what, ...]`, or an answer `["value", result, arguments as the call left them]` or `["raised", name of the
exception, text]`. Messages are only parsed as data: None, numbers, texts, bytes, lists, tuples, sets, dicts, Decimal,
Fraction, numbers of objects and, on the program's side, names of objects to import there. While one side waits for an
answer, the other may send requests, too: functions that were passed can be called back.
"""

import json
import os
import sys
from decimal import Decimal
from fractions import Fraction

TYPE_CHECKING = False  # importing typing takes longer than the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_MESSAGE_BYTES = 16 << 20
NUMBERS = "biufc"
"""Kinds of numpy dtypes that are numbers."""
LISTS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}

if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)


class Gone(BaseException):
    """The other process has ended or closed its end."""


class Wire:
    """One end of the connection. `wrap` creates a proxy for the other side's object with this number; `unwrap` returns
    the number of a proxy, None for anything else; `serve` answers requests of the other side. `name_of` returns module
    and name of an object that the other side imports instead; `imported` does that there."""

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        *,
        wrap: "Callable[[int], Any]",
        unwrap: "Callable[[Any], int | None]",
        serve: "Callable[[list[Any]], list[Any]]",
        name_of: "Callable[[Any], tuple[str, str] | None] | None" = None,
        imported: "Callable[[str, str], Any] | None" = None,
    ):
        self._read, self._write = os.fdopen(read_fd, "rb"), write_fd
        self._wrap, self._unwrap, self._serve = wrap, unwrap, serve
        self._name_of, self._imported = name_of, imported
        self._objects = []
        self.has_text = False
        """Whether text or bytes have arrived, as data or in an exception."""
        self.is_gone = False
        """Whether the other process ended, even if the exception was caught."""

    def ask(self, *question: "Any") -> "list[Any]":
        """Sends a request and returns the answer message."""
        self._send(["ask", *question])
        while (message := self.receive())[0] == "ask":
            self.answer(message)
        return message

    def answer(self, message: "list[Any]"):
        self._send(self._serve(message[1:]))

    def receive(self) -> "list[Any]":
        try:
            line = self._read.readline(MAX_MESSAGE_BYTES)
            message = json.loads(line)
        except (OSError, ValueError, RecursionError) as error:
            self.is_gone = True
            raise Gone(str(error)) from None
        if not isinstance(message, list) or not message or message[0] not in ("ask", "value", "raised"):
            self.is_gone = True
            raise Gone("no message")
        return message

    def _send(self, message: "list[Any]"):
        left = json.dumps(message).encode() + b"\n"
        try:
            while left:
                left = left[os.write(self._write, left) :]
        except OSError as error:
            self.is_gone = True
            raise Gone(str(error)) from None

    def object(self, number: int) -> "Any":
        """The object with this number, which was sent from here before."""
        return self._objects[number]

    def encode(self, value: "Any") -> "Any":
        if value is None or isinstance(value, bool):
            return value
        if type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "") in tuple(NUMBERS):
            return ["array", value.dtype.str, self.encode(value.tolist())] if value.shape else self.encode(value.item())
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        for name, kind in LISTS.items():
            if isinstance(value, kind):
                return [name, [self.encode(item) for item in value]]
        if isinstance(value, dict):
            return ["dict", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if isinstance(value, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, Decimal):
            return ["decimal", str(value)]
        if isinstance(value, Fraction):
            return ["fraction", value.numerator, value.denominator]
        if (number := self._unwrap(value)) is not None:
            return ["yours", number]
        if self._name_of is not None and (name := self._name_of(value)) is not None:
            return ["named", *name]
        self._objects.append(value)
        return ["mine", len(self._objects) - 1]

    def decode(self, encoded: "Any") -> "Any":
        if not isinstance(encoded, list):
            self.has_text |= isinstance(encoded, str)
            return encoded
        kind, *values = encoded
        if kind in LISTS:
            return LISTS[kind](self.decode(item) for item in values[0])
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in values[0]}
        if kind == "bytes":
            self.has_text = True
            return bytes.fromhex(values[0])
        if kind == "complex":
            return complex(*map(float, values))
        if kind == "decimal":
            return Decimal(values[0])
        if kind == "fraction":
            return Fraction(*map(int, values))
        if kind == "array" and values[0][1:2] in tuple(NUMBERS) and values[0][2:].isdigit():
            import numpy

            return numpy.array(self.decode(values[1]), dtype=values[0])
        if kind == "yours":
            return self.object(values[0])
        if kind == "mine":
            return self._wrap(int(values[0]))
        if kind == "named" and self._imported is not None:
            return self._imported(*values)
        raise ValueError(f"unknown kind of value {kind!r}")
