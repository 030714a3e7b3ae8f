"""The places where a directory keeps its claims: names to bytes, changed by one atomic step. There are two kinds: the
job's own server (name_server.py), and any torch.distributed.Store.
"""

from __future__ import annotations

import base64
import hmac
from typing import TYPE_CHECKING, Any, Protocol

from rlinf_comm.errors import CommError, NotTrusted
from rlinf_comm.wire.secret import key_for, where_it_comes_from

if TYPE_CHECKING:
    import torch.distributed

MAX_LISTED = 1000

_PREFIX = "rlinf-comm/peers/"
_LEFT = "left"
"""Stands where a claim was, since a store cannot delete a key only if it is unchanged."""
_SEAL_BYTES = 16


class Names(Protocol):
    """Raises CommError where it cannot be reached."""

    def swap(self, name: str, expected: bytes, new: bytes) -> bytes:
        """Puts `new` in the place of `expected` if that is there; what is there afterwards. b"" stands for no claim."""
        ...

    def get(self, name: str) -> bytes: ...

    def listed(self) -> list[str]:
        """Names that are claimed, or were; at most MAX_LISTED."""
        ...

    def close(self) -> None: ...


class StoreNames:
    """Keeps names in a store that is there already. Whoever can read the store reads the addresses, which hold no
    secret; a claim counts if its seal is this job's.
    """

    def __init__(self, store: torch.distributed.Store) -> None:
        self._store: Any = store
        self._key = key_for("claim")

    def swap(self, name: str, expected: bytes, new: bytes) -> bytes:
        new_text = self._text_of(name, new)
        stored = ""
        for before in ("", _LEFT) if not expected else (self._text_of(name, expected),):
            stored = self._do(lambda before=before: self._store.compare_set(_PREFIX + name, before, new_text)).decode()
            if stored == new_text:
                if new:
                    self._list(name)
                return new
        return self._claim_in(name, stored)

    def get(self, name: str) -> bytes:
        key = _PREFIX + name
        text = self._do(lambda: self._store.get(key) if self._store.check([key]) else b"")
        return self._claim_in(name, text.decode())

    def listed(self) -> list[str]:
        count = self._do(lambda: self._store.add(_PREFIX + "/count", 0))
        keys = [f"{_PREFIX}/{index}" for index in range(1, min(count, MAX_LISTED) + 1)]
        return self._do(lambda: [self._store.get(key).decode() for key in keys if self._store.check([key])])

    def close(self) -> None:
        pass  # it belongs to whoever made it

    def _list(self, name: str) -> None:
        index = self._do(lambda: self._store.add(_PREFIX + "/count", 1))
        self._do(lambda: self._store.set(f"{_PREFIX}/{index}", name))

    def _text_of(self, name: str, claim: bytes) -> str:
        return base64.b85encode(self._seal(name, claim) + claim).decode() if claim else _LEFT

    def _claim_in(self, name: str, text: str) -> bytes:
        if text in ("", _LEFT):
            return b""
        try:
            content = base64.b85decode(text)
        except ValueError:
            content = b""
        claim = content[_SEAL_BYTES:]
        if not hmac.compare_digest(content[:_SEAL_BYTES], self._seal(name, claim)):
            raise NotTrusted(
                f"the claim of the name {name!r} in the {type(self._store).__name__} given is not of this job: "
                f"{where_it_comes_from()}"
            )
        return claim

    def _seal(self, name: str, claim: bytes) -> bytes:
        return hmac.digest(self._key, len(name).to_bytes(4, "little") + name.encode() + claim, "sha256")[:_SEAL_BYTES]

    def _do(self, call: Any) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise CommError(f"the {type(self._store).__name__} given does not answer: {error}") from error
