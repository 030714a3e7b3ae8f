"""Boxes of tensors from safetensors files: what is read is what the file has, and damage is named."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlinf_comm.weights import Block, Box, BufferSpec, Layout, RankLayout
from rlinf_workers.errors import WeightFilesError
from rlinf_workers.models import weight_files
from rlinf_workers.models.weight_files import WeightFiles

TENSORS = {
    "a": torch.arange(60, dtype=torch.float32).view(5, 4, 3),
    "b": torch.arange(12, dtype=torch.bfloat16).view(6, 2),
    "c": torch.arange(4),
    "scalar": torch.tensor(2.5),
}


@pytest.fixture(params=["one file", "an index"])
def folder(request, tmp_path) -> Path:
    if request.param == "one file":
        save_file(TENSORS, tmp_path / "model.safetensors")
        return tmp_path
    listed = {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors", "scalar": "2.safetensors"}
    for file in set(listed.values()):
        save_file({name: TENSORS[name] for name in TENSORS if listed[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return tmp_path


def test_specs_and_boxes_are_those_of_the_files(folder, monkeypatch):
    monkeypatch.setattr(weight_files, "MAX_MAPPED_BYTES", 40)  # mapped anew between reads
    files = WeightFiles(folder)
    assert {name: (spec.shape, spec.dtype) for name, spec in files.specs.items()} == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in TENSORS.items()
    }
    for name, tensor in TENSORS.items():
        stored = files.read(name)
        assert stored.dtype == tensor.dtype
        assert torch.equal(stored, tensor)
    assert torch.equal(files.read("a", Box((1, 0, 1), (3, 2, 2))), TENSORS["a"][1:4, 0:2, 1:3])
    assert files.read("b", Box((6, 0), (0, 2))).shape == (0, 2)


def test_a_layout_is_filled(folder):
    """Rank 1 has the last rows of a, transposed in its first two dimensions, behind c in another dtype."""
    files = WeightFiles(folder)
    stored = RankLayout(
        {"fused": BufferSpec((4, 2, 3), "bfloat16"), "c": BufferSpec((6,), "int64")},
        (
            Block("a", Box((3, 0, 0), (2, 4, 3)), "fused", 0, (3, 6, 1)),
            Block("c", Box((1,), (3,)), "c", 2, (1,)),
        ),
    )
    layout = Layout(files.specs, (RankLayout({}, ()), stored))
    around = torch.full((2, 4, 2, 3), -1.0, dtype=torch.bfloat16)
    buffers = {"fused": around[1], "c": torch.full((6,), -1)}  # the first begins inside its memory
    files.fill(layout, 1, buffers)
    assert torch.equal(buffers["fused"], TENSORS["a"][3:].transpose(0, 1).bfloat16())
    assert (around[0] == -1).all()
    assert buffers["c"].tolist() == [-1, -1, 1, 2, 3, -1]
    del buffers["fused"]
    files.fill(layout, 1, buffers)


def test_what_does_not_fit_is_named_before_anything_is_read(folder):
    files = WeightFiles(folder)
    with pytest.raises(WeightFilesError, match=r"no safetensors file has 'd'"):
        files.read("d")
    with pytest.raises(WeightFilesError, match=r"a has the shape \(5, 4, 3\); \[3:6, 0:4, 0:3\] is not in it"):
        files.read("a", Box((3, 0, 0), (3, 4, 3)))
    with pytest.raises(WeightFilesError, match=r"d, e not in its safetensors files"):
        files.check({"a": (5, 4, 3), "d": (1,), "e": (2,)})
    with pytest.raises(WeightFilesError, match=r"b \[6, 2\] instead of \[2, 6\]"):
        files.check({"a": (5, 4, 3), "b": (2, 6)})


def test_damage_is_named(tmp_path):
    with pytest.raises(WeightFilesError, match=r"neither model.safetensors nor .* the folder of a model with weights"):
        WeightFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(WeightFilesError, match=r"pytorch_model.bin, a pickle that is not read"):
        WeightFiles(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for broken in (whole[:-8], whole[:20], b"version https://git-lfs.github.com/spec/v1\n", pickle.dumps({})):
        (tmp_path / "model.safetensors").write_bytes(broken)
        with pytest.raises(WeightFilesError, match=r"model.safetensors: is not a whole safetensors file"):
            WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "is no index of safetensors files"),
        ("{}", "is no index of safetensors files"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "lists gone.safetensors, not in this folder"),
        ('{"weight_map": {"other": "there.safetensors"}}', "the index says it has 'other', but"),
    ],
)
def test_an_index_that_is_wrong_is_named(tmp_path, index, says):
    save_file(TENSORS, tmp_path / "there.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightFilesError, match=says):
        WeightFiles(tmp_path)


def test_only_what_is_asked_for_is_read(tmp_path):
    """A file of 8 GiB, nearly all of it a hole."""
    num_rows = 1 << 31
    header = json.dumps({"w": {"dtype": "F32", "shape": [num_rows, 1], "data_offsets": [0, 4 * num_rows]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * num_rows)
    files = WeightFiles(tmp_path)
    assert files.specs["w"].num_bytes == 8 << 30
    assert not files.read("w", Box((num_rows - 5, 0), (3, 1))).any()
