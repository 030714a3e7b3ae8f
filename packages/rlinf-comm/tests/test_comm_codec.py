"""rlinf_comm.codec: everything comes back bit for bit and as the same type; everything else is refused by name."""

import contextlib
import dataclasses
import enum
import math
import pathlib
import struct
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from comm_properties import holds_for
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from rlinf_comm import DecodeError, Encoded, UnsupportedValueError, decode, encode, pack, record, unpack
from rlinf_comm._arrays import describe_tensor
from rlinf_comm.testing import assert_bitwise_equal


@record
class Role(enum.Enum):
    ACTOR = "actor"
    ROLLOUT = ("rollout", 2)


@record
class Level(enum.IntEnum):
    LOW = 1


@record
class Access(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


@record
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    token_ids: torch.Tensor
    text: str
    score: float | None = None
    steps: tuple[int, ...] = ()


@record
@dataclasses.dataclass
class Group:
    samples: list[Any]
    role: Role = Role.ACTOR
    length: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.samples)

    @record
    class Nested(enum.Enum):
        ONE = 1


@record
@dataclasses.dataclass
class Countdown:
    value: int

    def __post_init__(self) -> None:
        self.value -= 1


@record
@dataclasses.dataclass(frozen=True)
class Holder:
    item: Any


@record
@dataclasses.dataclass
class Empty:
    pass


@record
class Point(msgspec.Struct, frozen=True, kw_only=True):
    x: float
    tags: list[str] = []


def through_buffers(value):
    """decode(encode(value)) with private, writable copies of the buffers."""
    encoded = encode(value)
    return decode(encoded.header, [bytearray(buffer) for buffer in encoded.buffers])


def assert_crosses(value) -> None:
    assert_bitwise_equal(through_buffers(value), value)
    assert_bitwise_equal(unpack(pack(value)), value)


# --- values -----------------------------------------------------------------------------------------------------------

SCALARS = [
    None, True, False, 0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 2**127, -(2**200),
    0.0, -0.0, 1.5, math.inf, -math.inf, 5e-324, "", "text", "ünï ☃ \x00", b"", b"\x00\xff",
    pathlib.Path("/a/b c"), pathlib.Path("r"), Role.ACTOR, Role.ROLLOUT, Level.LOW,
    Access.READ, Access.READ | Access.RUN, Access(0), Group.Nested.ONE,
]  # fmt: skip


@pytest.mark.parametrize("value", SCALARS, ids=repr)
def test_scalars_come_back(value):
    assert_crosses(value)
    assert_crosses({"list": [value, value], "tuple": (value,), "list beside a container": [value, []]})


def test_nan_keeps_its_payload():
    payload = struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\x7f")[0]
    assert struct.pack("<d", unpack(pack([payload]))[0]) == b"\x01\x02\x03\x04\x05\x06\xf8\x7f"


def test_containers_keep_their_types():
    assert_crosses(
        {
            "t": (),
            "l": [],
            "d": {},
            "n": [[], (), [()], ({"a": (1, [2, (3,)])},)],
            "m": {1: "int", "1": "str", -5: [1.0]},
            "big": [1, (2**70,), {"x": 2**70}],
        }
    )


def test_dataclasses_come_back_with_all_their_fields():
    samples = [Sample(token_ids=torch.arange(3), text="a", steps=(1, 2)), Sample(token_ids=torch.ones(0), text="b")]
    group = Group(samples, Role.ROLLOUT)
    back = unpack(pack([group, group.samples[0]]))
    assert_bitwise_equal(back, [group, group.samples[0]])
    assert back[0].length == 2
    assert_crosses([Empty(), Empty()])


def test_post_init_does_not_run_again():
    assert unpack(pack(Countdown(5))) == Countdown(5)


def test_structs_come_back():
    assert unpack(pack({"p": Point(x=1.0, tags=["a"])})) == {"p": Point(x=1.0, tags=["a"])}


def test_a_class_is_listed_once():
    one, many = (len(encode([Point(x=float(i)) for i in range(n)]).header) for n in (1, 101))
    assert many - one < 100 * len("test_comm_codec:Point")


# --- tensors and arrays -----------------------------------------------------------------------------------------------

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape(dtype):
    raw = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
    full = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(2, 3, 4)
    for tensor in (
        full,
        full[1, 2, 3],
        full[:0],
        full[:, 1:1],
        full.transpose(0, 2),
        full[:, ::2, 1:],
        full[1:].flatten(),
    ):
        assert_crosses(tensor)


def test_special_views():
    assert_crosses(torch.ones(1).expand(4, 3))
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert_bitwise_equal(unpack(pack(conjugate)), conjugate.resolve_conj())
    assert_bitwise_equal(unpack(pack(conjugate.imag)), conjugate.imag.resolve_neg())
    parameter = torch.nn.Parameter(torch.ones(2))
    assert_bitwise_equal(unpack(pack([parameter])), [parameter.detach()])


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", ">i4", "f2", "f8", "c8", "M8[ns]", "m8[s]", "S3", "U2"])
def test_arrays_of_many_dtypes(dtype):
    array = np.arange(6).astype(dtype if dtype not in ("M8[ns]", "m8[s]") else "i8").astype(dtype)
    for view in (array, array.reshape(2, 3), array.reshape(2, 3).T, array[::-2], array[:0], array[0].reshape(())):
        assert_crosses(view)
    assert_crosses([array[1]])


def test_contiguous_tensors_are_not_copied():
    tensor, array = torch.zeros(5), np.zeros(5)
    encoded = encode([tensor, array])
    tensor[0] = array[0] = 1.0
    assert torch.frombuffer(encoded.buffers[0], dtype=torch.float32)[0] == 1.0
    assert np.frombuffer(encoded.buffers[1])[0] == 1.0
    assert encoded.num_bytes == len(encoded.header) + 20 + 40


def test_encoded_buffers_keep_the_memory_alive():
    encoded = encode(torch.full((100_000,), 7.0))
    torch.zeros(100_000)  # would reuse the memory, were it free
    assert decode(encoded.header, encoded.buffers).eq(7.0).all()


def test_decoded_tensors_are_views_that_keep_the_buffer_alive():
    encoded = encode(torch.zeros(4))
    memory = bytearray(encoded.buffers[0])
    tensor = decode(encoded.header, [memory])
    memory[3] = 0x40
    assert tensor[0] == 2.0
    with pytest.raises(BufferError):
        memory.clear()  # exported


def test_unpacked_tensors_are_private_and_aligned():
    blob = pack([torch.ones(1, dtype=torch.uint8), torch.ones(3, dtype=torch.float64)])
    first, second = unpack(blob)[1], unpack(blob)[1]
    first += 1
    assert second.eq(1.0).all()
    assert first.data_ptr() % 64 == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


class Opaque:
    pass


@dataclasses.dataclass
class Unregistered:
    x: int


def _local_class():
    @dataclasses.dataclass
    class Local:
        x: int

    return Local(1)


REFUSED = [
    ({"samples": [1, 2, 3, Holder(lambda: 1)]}, "samples[3].item: a function cannot cross a channel; allowed: None"),
    (Group(["s", Opaque()]), ".Opaque cannot cross a channel"),
    (lambda: 1, "value: a function"),
    ([1, ({"k": {3}},)], "value[1][0]['k']: a set"),
    ({"a": {"b": {True: 1}}}, "a['b']: a dict with the key True cannot cross a channel; keys must be str"),
    ({"a": {(1, 2): 1}}, "a: a dict with the key (1, 2)"),
    ({1 << 64: 1}, "value: a dict with the key 18446744073709551616"),
    ([Opaque], "value[0]: a class"),
    ([math], "value[0]: a module"),
    (
        _local_class(),
        ".Local cannot cross a channel; put @rlinf_comm.record above the class, or call rlinf_comm.record(Local) in",
    ),
    (
        {"t": torch.ones(2, requires_grad=True) * 2},
        "t: a tensor with a gradient graph cannot cross a channel; the graph",
    ),
    ({"t": torch.ones(2).to_sparse()}, "t: a tensor of layout torch.sparse_coo"),
    ({"t": torch.ones(2, device="meta")}, "t: a tensor on meta cannot cross a channel; it has a shape but no values"),
    ({"t": np.array([None])}, "t: an array of dtype object"),
    ({"t": np.zeros(1, dtype=[("x", "f4")])}, "t: an array of dtype [('x'"),
    ({"s": ["ok", "\ud800"]}, "s[1]: text that is no valid Unicode"),
    ([{"x": 1j}], "value[0]['x']: a complex"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_refusals_name_the_place(value, message):
    with pytest.raises(UnsupportedValueError) as caught:
        encode(value)
    assert message in str(caught.value)
    assert "allowed: " in str(caught.value)


def test_subclasses_of_builtins_are_refused():
    class Text(str):
        pass

    for value in (Text("x"), type("List", (list,), {})([1])):
        with pytest.raises(UnsupportedValueError):
            encode([value])


def test_a_value_that_contains_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        encode(value)


def test_a_field_that_was_never_set_is_refused():
    incomplete = Sample.__new__(Sample)
    with pytest.raises(UnsupportedValueError, match="never set"):
        encode({"sample": incomplete})


# --- hostile and damaged bytes ----------------------------------------------------------------------------------------


def forged(name: str, *fields: str, tag: int = 5) -> bytes:
    return msgspec.msgpack.encode([[[name, *fields]], [tag, 0, *[1 for _ in fields]]])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (forged("subprocess:Popen", "args"), "no class is registered as 'subprocess:Popen'"),
        (forged(f"{__name__}:Unregistered", "x"), "no class is registered as .*; import the module"),
        (forged("this:X"), "no class is registered"),
        (forged(f"{__name__}:Countdown", "value", "more"), "run the same code"),
        (forged(f"{__name__}:Countdown", "value", tag=7), "not an encoded value|no Enum"),
        (b"", "not an encoded value"),
        (b"\xc1", "not an encoded value"),
        (msgspec.msgpack.encode([[], [99]]), "not an encoded value"),
        (msgspec.msgpack.encode([[], [10, 0, "float32", 3]]), "not an encoded value"),
        (msgspec.msgpack.encode([[], []]), "not an encoded value"),
    ],
)
def test_foreign_headers_build_nothing(header, message):
    with pytest.raises(DecodeError, match=message):
        decode(header, ())


def test_damaged_blobs_are_noticed():
    blob = pack({"t": torch.arange(100), "x": 1})
    for damaged in (
        blob[:-1],
        blob[:50],
        blob[:3],
        b"",
        b"x" + blob[1:],
        blob + b"\x00",
        blob[:4] + b"\xff" * 4 + blob[8:],
    ):
        with pytest.raises(DecodeError):
            unpack(damaged)


# --- properties -------------------------------------------------------------------------------------------------------

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.sampled_from(Role), st.builds(Access, st.integers(0, 7)),
    hnp.arrays(st.sampled_from(["f4", "i8", "u1", "?"]), hnp.array_shapes(min_dims=0, min_side=0, max_side=4)),
    hnp.arrays("i4", hnp.array_shapes(min_dims=0, min_side=0, max_side=4)).map(torch.from_numpy),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(-(2**63), 2**64 - 1)), inner, max_size=4),
        st.builds(Holder, inner),
        st.builds(lambda text: Point(x=1.0, tags=[text]), st.text()),
    ),
    max_leaves=12,
)


@holds_for(values, num=60, num_slow=500)
def test_any_value_comes_back(value):
    assert_crosses(value)


@settings(max_examples=150)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_crash(blob):
    for function in (lambda: decode(blob, ()), lambda: unpack(blob)):
        with contextlib.suppress(DecodeError):
            function()


# --- other ------------------------------------------------------------------------------------------------------------


def test_control_messages_need_no_torch():
    program = (
        "import sys, rlinf_comm, numpy as np\n"
        "value = {'a': [1, (2, np.arange(3).tolist())]}\n"
        "assert rlinf_comm.unpack(rlinf_comm.pack(value)) == value\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_encoded_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Encoded(b"", ()).header = b"x"  # type: ignore[misc]


class OnDevice(torch.Tensor):
    """As a tensor in another memory looks to the codec: `cpu()` is the only way to its values."""

    @property
    def is_cpu(self):
        return False

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()


def test_a_tensor_on_a_device_goes_through_host_memory():
    values = torch.arange(6.0).view(2, 3)
    owner, pointer, num_bytes, dtype = describe_tensor(values.t().as_subclass(OnDevice))
    assert (type(owner), num_bytes, dtype) == (torch.Tensor, 24, "float32")
    assert owner.data_ptr() == pointer != values.data_ptr()
    assert owner.is_contiguous()
    assert_bitwise_equal(owner, values.t().contiguous())
