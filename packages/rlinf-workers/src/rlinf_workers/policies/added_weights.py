"""Reads weights of checkpoints that were trained with a LoRA adapter or by reinforcement learning.

An adapter is a folder as peft writes it: `adapter_config.json` and `adapter_model.safetensors`, whose tensors are named
`base_model.model.<layer>.lora_A.weight` and `....lora_B.weight`. Its layers may be linear or convolutions. Training by
reinforcement learning adds a value head, and for flow policies a noise head, whose sizes differ between code bases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf_comm.weights import Box
from rlinf_workers.models.language_model import ADAPTER_CONFIG
from rlinf_workers.models.lora import ADAPTER_STEM, PEFT_PREFIX
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.policies.base import PolicyError

HEADS_OF_RL = ("value_head.", "noise_head.", "reinflow_explore_noise_net.")
"""Prefixes of tensors that training by reinforcement learning adds; the names are those of RLinf's research code."""
_LORA = re.compile(r"(?P<layer>.+)\.lora_(?P<half>[AB])(\.default)?\.weight$")


def is_head_of_rl(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to a head that reinforcement learning added."""
    return name.removeprefix("model.").startswith(HEADS_OF_RL)


def ignored_heads(files: WeightFiles) -> tuple[str, ...]:
    """A note that names the heads of reinforcement learning in a checkpoint, which are not loaded."""
    names = [name.removeprefix("model.") for name in files.specs if is_head_of_rl(name)]
    heads = sorted({name.partition(".")[0] for name in names})
    if not heads:
        return ()
    return (
        f"{files.folder}: {' and '.join(heads)} ({len(names)} tensors, from reinforcement learning) not loaded; the "
        "heads start anew",
    )


def lora_change(down: Tensor, up: Tensor) -> Tensor:
    """The update of a weight before scaling: [out, in] for a linear layer, or [out, in, h, w] for a convolution.

    Args:
        down: `lora_A`, [rank, in] or [rank, in, h, w].
        up: `lora_B`, [out, rank] or [out, rank, 1, 1].
    """
    return (up.flatten(1) @ down.flatten(1)).view(len(up), *down.shape[1:])


def files_of(folder: str, lora_folder: str | None) -> WeightFiles:
    """The weights of a checkpoint, with an adapter added.

    Raises:
        PolicyError: the adapter is of another kind, or of another model.
        WeightFilesError: files are incomplete.
    """
    return WeightFiles(folder) if lora_folder is None else AdaptedFiles(folder, lora_folder)


def check_is_no_adapter(folder: str) -> None:
    """Raises: PolicyError for the folder of an adapter in place of a checkpoint."""
    path = Path(folder, ADAPTER_CONFIG)
    if path.is_file() and not Path(folder, "config.json").is_file():
        base = json.loads(path.read_text()).get("base_model_name_or_path")
        raise PolicyError(
            f"{folder} is a LoRA adapter of {base}; set options.folder to that base and options.lora_folder to {folder}"
        )


class AdaptedFiles(WeightFiles):
    """The weights of a folder with the update of an adapter added to each tensor that is read.

    Raises: as `files_of`.
    """

    def __init__(self, folder: str | Path, lora_folder: str | Path) -> None:
        super().__init__(folder)
        self._config = _adapter_config(Path(lora_folder))
        self._adapter = WeightFiles(lora_folder, stem=ADAPTER_STEM)
        self._halves = self._adapted(Path(lora_folder))

    def read(self, name: str, box: Box | None = None) -> Tensor:
        tensor = super().read(name, box)
        if name not in self._halves:
            return tensor
        assert box is None, "an update is added to whole tensors"
        down, up = (self._adapter.read(half).float() for half in self._halves[name])
        change = _scale(self._config, name.removesuffix(".weight"), len(down)) * lora_change(down, up)
        return (tensor.float() + change).to(tensor.dtype)

    def _adapted(self, lora_folder: Path) -> Mapping[str, tuple[str, str]]:
        """Name of a tensor of the base -> names of `lora_A` and `lora_B` in the adapter."""
        halves: dict[str, dict[str, str]] = {}
        others = []
        for name in self._adapter.specs:
            own = name.removeprefix(PEFT_PREFIX)
            if (match := _LORA.match(own)) is not None:
                halves.setdefault(f"{match['layer']}.weight", {})[match["half"]] = name
            elif not is_head_of_rl(own):
                others.append(own)
        wrong = [name for name, pair in halves.items() if name not in self.specs or len(pair) != 2]
        if others or wrong or not halves:
            named = ", ".join([*others, *wrong][:4]) or "nothing"
            raise PolicyError(
                f"{lora_folder} does not fit {self.folder}: it has {named}, which is no LoRA update of a weight there"
            )
        for name, pair in halves.items():
            down, up = (self._adapter.specs[pair[half]].shape for half in "AB")
            if (up[0], *down[1:]) != self.specs[name].shape or up[1] != down[0]:
                raise PolicyError(
                    f"{lora_folder} does not fit {self.folder}: the update of {name} has the shapes {list(down)} and "
                    f"{list(up)}, and the weight {list(self.specs[name].shape)}"
                )
        return {name: (pair["A"], pair["B"]) for name, pair in halves.items()}


def _adapter_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise PolicyError(f"{path} does not exist; options.lora_folder has to be a LoRA adapter that peft saved")
    config: dict[str, Any] = json.loads(path.read_text())
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("fan_in_fan_out"):
        raise PolicyError(f"{path} is no plain LoRA of peft; merge it into its base with peft (merge_and_unload)")
    return config


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Factor of a layer's update; peft matches its patterns with the end of a layer's name."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?{pattern}$", layer):
            alpha = value
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
