"""Tensors are taken out of values of any depth, and put back in their places."""

import dataclasses

import msgspec
import pytest
import torch

from rlinf_comm import DecodeError
from rlinf_comm.peers.transports.lifted import TensorSlot, lift_out, put_back


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    tokens: torch.Tensor | str
    rest: object

    def __post_init__(self):
        assert not isinstance(self.tokens, TensorSlot), "the codec does not run it either"


class Row(msgspec.Struct, frozen=True):
    x: torch.Tensor | TensorSlot
    y: int = 0


def test_tensors_are_taken_out_of_any_value_and_put_back():
    t = [torch.full((1,), i) for i in range(5)]
    value = {"a": [t[0], (t[1], "text")], "s": Sample(t[2], {"r": Row(t[3], 7)}), 5: t[4], "same": [1, {"b": 2}]}
    out, taken = lift_out(value, lambda leaf: isinstance(leaf, torch.Tensor))
    assert [each.item() for each in taken] == [0, 1, 2, 3, 4]
    assert out["a"][1] == (TensorSlot(1), "text") and type(out["a"][1]) is tuple and out["same"] is value["same"]
    assert out["s"].rest["r"] == Row(TensorSlot(3), 7)
    back = put_back(out, taken)
    assert back["s"].rest["r"].x is t[3] and back["a"][1][0] is t[1] and list(back) == ["a", "s", 5, "same"]
    assert value["a"][0] is t[0] and value["s"].tokens is t[2]


def test_a_value_without_tensors_stays_itself_and_one_that_contains_itself_is_left_to_the_codec():
    value = {"a": [1, (2.0, None)], "b": Sample("no", b"tensor")}
    assert lift_out(value, lambda leaf: False)[0] is value
    loop: list[object] = [torch.ones(1)]
    loop.append(loop)
    assert lift_out(loop, lambda leaf: isinstance(leaf, torch.Tensor)) == (loop, [])


@pytest.mark.parametrize("index", [1, -1, "0", None, 1 << 70])
def test_a_forged_place_is_a_decode_error(index):
    with pytest.raises(DecodeError, match="of 1"):
        put_back({"a": [TensorSlot(0), TensorSlot(index)]}, [torch.ones(1)])
