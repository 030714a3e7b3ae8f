"""Comparison of values bit for bit, with the place of the first difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlinf_comm._arrays import tensor_types


def assert_bitwise_equal(actual: Any, expected: Any, path: str = "value") -> None:
    """Compares values of any depth bit for bit: +0.0 is not -0.0, and a NaN equals a NaN of the same payload.

    Tensors and arrays must agree in type, dtype, shape and bits; strides do not matter.

    Raises:
        AssertionError: `value['w'][2, 5]: 1.0 (0x3f800000) instead of 1.0000001 (0x3f800001); 3 of 64 elements differ`.
    """
    assert type(actual) is type(expected), f"{path}: a {type(actual).__name__} instead of a {type(expected).__name__}"
    if isinstance(expected, tensor_types()):
        _assert_arrays_equal(_tensor_bits(actual, path), _tensor_bits(expected, path), actual, expected, path)
    elif isinstance(expected, np.ndarray):
        _assert_arrays_equal(_array_bits(actual), _array_bits(expected), actual, expected, path)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{path}: keys {list(actual)} instead of {list(expected)}"
        for key, item in expected.items():
            assert_bitwise_equal(actual[key], item, f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{path}: {len(actual)} elements instead of {len(expected)}"
        for index, item in enumerate(expected):
            assert_bitwise_equal(actual[index], item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_bitwise_equal(getattr(actual, field.name), getattr(expected, field.name), f"{path}.{field.name}")
    elif isinstance(expected, (float, np.generic)):
        same = np.asarray(actual).tobytes() == np.asarray(expected).tobytes()
        assert same, f"{path}: {actual!r} instead of {expected!r}"
    else:
        assert actual == expected, f"{path}: {actual!r} instead of {expected!r}"


def _tensor_bits(tensor: Any, path: str) -> np.ndarray:
    """[num_elements, element_bytes] uint8."""
    import torch

    assert tensor.layout is torch.strided, f"{path}: a tensor of layout {tensor.layout} has no plain bits"
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
    return flat.numpy().reshape(plain.numel(), plain.element_size())


def _array_bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, array.itemsize)


def _assert_arrays_equal(bits: np.ndarray, expected_bits: np.ndarray, actual: Any, expected: Any, path: str) -> None:
    assert actual.dtype == expected.dtype, f"{path}: dtype {actual.dtype} instead of {expected.dtype}"
    shapes = tuple(actual.shape), tuple(expected.shape)
    assert shapes[0] == shapes[1], f"{path}: shape {shapes[0]} instead of {shapes[1]}"
    differing = np.flatnonzero((bits != expected_bits).any(axis=1))
    if len(differing):
        first = int(differing[0])
        index = tuple(int(i) for i in np.unravel_index(first, shapes[1]))
        raise AssertionError(
            f"{path}{list(index)}: {actual[index].item()!r} (0x{_hexadecimal(bits[first])}) instead of "
            f"{expected[index].item()!r} (0x{_hexadecimal(expected_bits[first])}); "
            f"{len(differing)} of {len(bits)} elements differ"
        )


def _hexadecimal(element: np.ndarray) -> str:
    return element[::-1].tobytes().hex()  # most significant byte first
