"""The protocol number goes up with the control messages that it stands for."""

import hashlib
import json
from typing import Any

import msgspec

from rlinf_workers.launchers.messages import Birth, Message
from rlinf_workers.protocol import PROTOCOL

RECORDED = {
    1: "5fd1d846d66890fc",
    2: "8fa6526e0e1211d7",
    3: "4768129f1f156047",
    4: "4768129f1f156047",
    5: "bf1e13ad52208182",
    6: "ba15abe57c194116",
    7: "75437bd46e27c645",
}
"""Protocol -> the digest of the messages' forms."""


def _bare(schema: Any) -> Any:
    """Without what is written for people."""
    if isinstance(schema, dict):
        return {key: _bare(value) for key, value in schema.items() if key not in ("description", "title")}
    return [_bare(value) for value in schema] if isinstance(schema, list) else schema


def test_the_number_stands_for_these_messages():
    messages = _bare(msgspec.json.schema(Message)), _bare(msgspec.json.schema(Birth))
    digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
    assert RECORDED[PROTOCOL] == digest, (
        "a control message has changed. If a driver and a worker of which one has the code of before would "
        "misunderstand each other, raise PROTOCOL in rlinf_workers/protocol.py; then put "
        f"{PROTOCOL}: {digest!r} into RECORDED, under the new number if it is new"
    )
