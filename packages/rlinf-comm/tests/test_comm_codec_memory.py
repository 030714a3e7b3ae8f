"""What the objects of a header take at most, for whatever a header may say."""

import dataclasses
import pathlib
import tracemalloc

import msgspec
import numpy as np
import pytest

from rlinf_comm import codec, record

MAX_BYTES_FOR_A_BYTE = 100
NUM_ELEMENTS = 3000


@record
@dataclasses.dataclass
class Empty:
    pass


@record
@dataclasses.dataclass
class One:
    x: object


@record
class Row(msgspec.Struct):
    x: int


def several(make, *args):
    return [make(*args) for _ in range(NUM_ELEMENTS)]


CASES = {
    "empty dicts": several(dict),
    "dicts of one entry": several(dict, [(0, 0)]),
    "dicts of six entries": several(dict, [(index, 0) for index in range(6)]),
    "empty lists": several(list),
    "tuples": several(lambda: (0,)),
    "integers": several(lambda: 1000),
    "texts": several(lambda: "\u2603"),
    "text with one wide character": ["a" * 20_000 + "\U0001f642"],
    "records": several(Empty) + several(One, 0),
    "structs": several(Row, 0),
    "paths": several(pathlib.Path, ""),
    "numpy scalars": several(np.bool_, True),
    "arrays": several(np.zeros, 1, np.uint8),
}


@pytest.mark.parametrize("name", CASES)
def test_a_value_takes_less_than_a_hundred_times_its_header(name):
    encoded = codec.encode(CASES[name])
    codec.decode(encoded.header, encoded.buffers)  # whatever is looked up once
    tracemalloc.start()
    try:
        value = codec.decode(encoded.header, encoded.buffers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(value) == len(CASES[name])
    assert peak < MAX_BYTES_FOR_A_BYTE * len(encoded.header)
