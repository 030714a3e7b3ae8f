"""Which classes may cross: those that both processes have registered, and nothing is imported to find one."""

import dataclasses
import enum
import subprocess
import sys

import msgspec
import pytest

from rlinf_comm import DecodeError, UnsupportedValueError, codec, decode, encode, pack, record, unpack
from rlinf_comm.records import modules_of


@record
@dataclasses.dataclass
class Inner:
    x: object = 1


@record
class Raising(msgspec.Struct):
    how: str

    def __post_init__(self):
        if self.how != "fine":
            raise {
                "exit": SystemExit(3),
                "memory": MemoryError(),
                "syntax": SyntaxError("no"),
                "stop": KeyboardInterrupt(),
            }[self.how]


def forged(name, *fields, values=(), tag=5):
    return msgspec.msgpack.encode([[[name, *fields]], [tag, 0, *values]])


IMPORTER = """
import sys, msgspec
from rlinf_comm import DecodeError, decode
before = set(sys.modules)
for name in ("this:s", "antigravity:fly", "wsgiref.simple_server:WSGIServer"):
    for tag in (5, 6, 7, 8):
        try:
            decode(msgspec.msgpack.encode([[[name]], [tag, 0]]), ())
        except DecodeError as error:
            assert "no class is registered as" in str(error)
        else:
            raise AssertionError(name)
assert set(sys.modules) == before, set(sys.modules) - before
"""


def test_a_name_from_bytes_imports_nothing():
    done = subprocess.run([sys.executable, "-c", IMPORTER], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize("how", ["exit", "memory", "syntax"])
def test_whatever_a_class_raises_while_it_is_rebuilt_is_a_decode_error(how):
    header = forged(f"{__name__}:Raising", "how", values=(how,), tag=6)
    with pytest.raises(DecodeError, match=r"not an encoded value: (SystemExit|MemoryError|SyntaxError)"):
        decode(header, ())


def test_control_c_passes():
    with pytest.raises(KeyboardInterrupt):
        decode(forged(f"{__name__}:Raising", "how", values=("stop",), tag=6), ())


def test_a_class_may_have_a_name_that_outlives_its_module():
    @record(name="sample/1")
    @dataclasses.dataclass
    class Moved:
        x: int

    assert b"sample/1" in encode(Moved(2)).header
    assert type(unpack(pack(Moved(2)))) is Moved
    with pytest.raises(ValueError, match=r"'sample/1' belongs to .*Moved"):
        record(name="sample/1")(Inner)


def test_a_class_that_is_defined_again_takes_its_name_over():
    def define():
        @record
        @dataclasses.dataclass
        class Cell:
            x: int

        return Cell

    first, second = define(), define()
    assert type(unpack(pack(second(1)))) is second
    third = define()
    assert type(unpack(pack(third(1)))) is third
    assert first is not second


def test_what_is_no_record_is_refused():
    for wrong in (int, type("Plain", (), {}), lambda: 1):
        with pytest.raises(TypeError, match=r"only dataclasses, Enums and msgspec\.Structs"):
            record(wrong)  # type: ignore[arg-type]


def test_a_subclass_is_registered_on_its_own():
    @dataclasses.dataclass
    class More(Inner):
        y: int = 2

    with pytest.raises(UnsupportedValueError, match=r"More cannot cross a channel; put @rlinf_comm.record above"):
        encode([More()])


def test_a_flag_takes_bits_and_an_enum_a_name_of_its_own():
    @record
    class Colour(enum.Enum):
        RED = 1

        @classmethod
        def _missing_(cls, value):
            raise AssertionError("reached from bytes")

    name = f"{__name__}:{Colour.__qualname__}"
    for tag, value in ((8, 1), (7, "BLUE"), (7, [1])):
        with pytest.raises(DecodeError):
            decode(forged(name, values=(value if value != [1] else [1, 1],), tag=tag), ())


def test_the_modules_that_a_value_needs():
    assert modules_of({"a": [(Inner(Inner(Raising("fine"))), 3)], "b": object()}) == [__name__]
    assert modules_of([1, "x"]) == []


def nested_lists(depth):
    value: list = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_depth_is_capped_the_same_in_both_directions():
    deepest = nested_lists(codec.MAX_DEPTH)
    assert unpack(pack(deepest)) == deepest
    with pytest.raises(UnsupportedValueError, match=f"nested more than {codec.MAX_DEPTH} containers deep"):
        encode(nested_lists(codec.MAX_DEPTH + 1))
    inside = [2**70]
    for _ in range(codec.MAX_DEPTH - 1):
        inside = [inside]
    assert unpack(pack(inside)) == inside
