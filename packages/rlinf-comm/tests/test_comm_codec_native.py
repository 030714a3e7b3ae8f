"""The native half of the codec: its wire form against an independent model, its fallbacks, and hostile headers."""

import contextlib
import dataclasses
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from comm_properties import holds_for
from hypothesis import given, settings, strategies as st

from rlinf_comm import _C, DecodeError, PeerLost, _arrays, _lifting, _lowering, codec, decode, encode, record
from rlinf_comm.testing import assert_bitwise_equal


@record
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    left: Any
    right: Any = None


@record
@dataclasses.dataclass
class Plain:
    x: Any


@record
@dataclasses.dataclass
class Guarded:
    """The property hides the field, so that the value lies in the instance's dict where only vars() finds it."""

    amount: int

    def get_amount(self) -> int:
        return vars(self)["amount"]

    def set_amount(self, value: int) -> None:
        vars(self)["amount"] = value * 2


Guarded.amount = property(Guarded.get_amount, Guarded.set_amount)  # type: ignore[assignment]

without_dlpack = _C.Codec(
    refused=_arrays.NotEncodable,
    describe_class=_lowering.describe_class,
    describe_tensor=_arrays.describe_tensor,
    describe_array=_arrays.describe_array,
    find_class=_lifting.find_class,
    lift=_lifting.lift,
    build_tensor=_arrays.build_tensor,
    ndarray=np.ndarray,
    find_dtype=_arrays.find_numpy_dtype,
    torch_bridge=lambda: (None, []),
    decode_error=lambda error, place: error,  # type: ignore[arg-type, return-value]
    describe_view=_arrays.describe_view,
    build_view=_arrays.build_view,
    peer_lost=PeerLost,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2, torch.uint16]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if dtype.itemsize > 1 else raw.view(dtype).squeeze(-1)
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-300, 300), st.floats(), st.text(), st.binary(max_size=300),
    tensors(), tensors().map(lambda tensor: tensor.ne(0).numpy() if tensor.is_complex() else tensor.float().numpy()),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=20),
        st.lists(inner, max_size=20).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=40), st.integers(-(2**63), 2**64 - 1)), inner, max_size=20),
        st.builds(lambda left, right: Pair(left=left, right=right), inner, inner),
        st.builds(Plain, inner),
    ),
    max_leaves=30,
)


class Model:
    """The wire form as codec.py describes it, written down a second time: the tree that msgspec would write."""

    def __init__(self) -> None:
        self.classes: list[list[str]] = []
        self.buffers: list[bytes] = []

    def tree(self, value: Any) -> Any:
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            return [4, hex(value)]
        if isinstance(value, (list, tuple)):
            return [1 if type(value) is list else 3, *map(self.tree, value)]
        if isinstance(value, dict):
            return {key: self.tree(item) for key, item in value.items()}
        if isinstance(value, (torch.Tensor, np.ndarray)):
            tensor = torch.as_tensor(value).contiguous()
            flat = tensor.reshape(-1)
            self.buffers.append(bytes(flat.view(torch.uint8).tolist()) if tensor.numel() else b"")
            name = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else value.dtype.str
            return [10 if isinstance(value, torch.Tensor) else 11, len(self.buffers) - 1, name, *value.shape]
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            entry = [f"{__name__}:{type(value).__name__}", *names]
            if entry not in self.classes:
                self.classes.append(entry)
            index = self.classes.index(entry)
            return [5, index, *(self.tree(getattr(value, name)) for name in names)]
        return value


@holds_for(values, num=60, num_slow=500)
def test_the_wire_form_is_the_documented_one(value):
    model = Model()
    root = model.tree(value)
    encoded = encode(value)
    assert encoded.header == msgspec.msgpack.encode([model.classes, root])
    assert [bytes(buffer) for buffer in encoded.buffers] == model.buffers


@settings(max_examples=100)
@given(values)
def test_a_torch_without_the_dlpack_exchange_gives_the_same(value):
    header, buffers = without_dlpack.encode(value)
    encoded = encode(value)
    assert header == encoded.header
    assert [bytes(buffer) for buffer in buffers] == [bytes(buffer) for buffer in encoded.buffers]
    copies = [bytearray(buffer) for buffer in buffers]
    assert_bitwise_equal(without_dlpack.decode(header, copies), value)
    assert_bitwise_equal(decode(header, copies), value)


@holds_for(values, st.data(), num=60, num_slow=1000)
def test_damaged_headers_are_errors_or_other_values_and_never_crash(value, data):
    encoded = encode(value)
    header = bytearray(encoded.header)
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(header)))
    for damaged in (header, header[:cut]):
        with contextlib.suppress(DecodeError):
            decode(bytes(damaged), [bytearray(buffer) for buffer in encoded.buffers])


@pytest.mark.parametrize(
    "root",
    [
        [10, 0, "float32", 3],  # 12 of 16 bytes
        [10, 0, "float32", -4],
        [10, 0, "float32", 1 << 62, 4],
        [10, 0, "float32", 0, 1 << 62, 1 << 62],
        [10, 1, "float32", 4],
        [10, 0, "no_such_dtype", 4],
        [10, 0],
        [11, 0, "<f4", 3],
        [11, 0, "O", 2],
        [11, 0, "no dtype", 2],
        [1, [10, 0, "float32", 5]],
        [5, 0],
        [4, "0x1", 2],
        [4, "no number"],
        [0],
        {1.5: 1},
        [-1, 2],
        ["text", 2],
    ],
    ids=repr,
)
def test_what_does_not_fit_is_refused(root):
    with pytest.raises(DecodeError, match="not an encoded value"):
        decode(msgspec.msgpack.encode([[], root]), [bytearray(16)])


def test_deep_nesting_is_an_error_and_no_crash():
    for header in (b"\x92\x90" + b"\x92\x01" * 100_000 + b"\xc0", b"\x92\x90" + b"\x81\xa1k" * 100_000 + b"\xc0"):
        with pytest.raises(DecodeError, match="nested more than 258 deep"):
            decode(header, ())


def test_a_size_that_the_header_cannot_hold_takes_no_memory():
    with pytest.raises(DecodeError, match="cut short"):
        decode(b"\x92\x90\xdd\xff\xff\xff\xff\x01", ())


def test_fields_under_a_property_are_stored_as_they_were():
    value = Guarded.__new__(Guarded)
    vars(value)["amount"] = 21
    header, buffers = codec.NATIVE.encode(value)
    assert decode(header, buffers).amount == 21


def test_buffers_stay_alive_as_long_as_what_looks_at_them_and_no_longer():
    class Buffer(bytearray):
        pass

    encoded = encode({"t": torch.arange(6.0), "a": np.arange(3)})
    buffers = [Buffer(buffer) for buffer in encoded.buffers]
    alive = [weakref.ref(buffer) for buffer in buffers]
    back = decode(encoded.header, buffers)
    del buffers
    gc.collect()
    assert all(reference() is not None for reference in alive)
    view = back.pop("t")[2:]
    del back
    gc.collect()
    assert [reference() is not None for reference in alive] == [True, False]
    assert view.tolist() == [2.0, 3.0, 4.0, 5.0]
    del view
    gc.collect()
    assert alive[0]() is None


def test_threads_learn_classes_together():
    """Each with classes that nobody has seen: the first look at a class runs Python code, and threads change there."""
    here = {"__module__": __name__}
    classes = [dataclasses.make_dataclass(f"Fresh{index}", [("x", Any)], namespace=here) for index in range(40)]
    for cls in classes:
        record(cls)
    start, failures = threading.Barrier(4), []

    def work() -> None:
        start.wait()
        for cls in classes:
            encoded = encode([cls(1), cls(torch.ones(2))])
            back = decode(encoded.header, encoded.buffers)
            if back[0] != cls(1) or not back[1].x.equal(torch.ones(2)):
                failures.append(cls)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_a_process_that_has_encoded_an_array_ends_well() -> None:
    """Nothing of Python is touched once the interpreter has gone, which ends a process of Python 3.12 by a signal."""
    code = "import numpy, rlinf_comm; rlinf_comm.encode(numpy.arange(3))"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0
