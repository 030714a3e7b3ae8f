"""LoRA (arXiv:2106.09685) with peft: a model with frozen weights and trained low-rank updates of some of them. The
other modules of a policy, such as heads, are trained whole.

Differences from usual peft: the adapter is float32 whatever the model's dtype, because bfloat16 rounds AdamW steps
away; it has no dropout, because completions are sampled without it and their policy is the one to train; and it is
merged for engines that cannot serve it beside the base.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlinf_comm.weights.layouts import LORA_A, LORA_B, is_adapter_tensor
from rlinf_workers.errors import WeightFilesError
from rlinf_workers.models.language_model import (
    ADAPTER_CONFIG,
    ModelSettings,
    is_adapter,
    load_tokenizer,
    pretrained_model,
)
from rlinf_workers.models.lora_settings import LoraSettings as LoraSettings
from rlinf_workers.models.picture_processor import copy_processor
from rlinf_workers.models.pictures import auto_class
from rlinf_workers.models.placement import tensors_of
from rlinf_workers.trainers.base import ModelAdapter, ModelOutputs
from rlinf_workers.trainers.served import LowRank, Served

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
"""The value of `targets` that adapts every linear layer but the head."""
HEAD = ".lm_head"
"""Suffix of the head's name of a language model inside another model."""
ADAPTER_STEM = "adapter_model"
ADAPTER_WEIGHTS = f"{ADAPTER_STEM}.safetensors"
"""Beside ADAPTER_CONFIG in an adapter's folder; both names are peft's."""
BASE_FILE = "base.json"
"""Beside them: the base that the adapter belongs to (`digest`), and the dtype in which its weights are used
(`dtype`)."""
A, B, HELD = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."
"""Components of parameter names in a model with an adapter."""
PEFT_PREFIX = "base_model.model."


def find_targets(folder: str, targets: Sequence[str]) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
    """Finds the layers that the targets match; the model is created without memory, from its config.

    Args:
        targets: module names, or suffixes of names (`q_proj`); or only `all-linear`, all except the head.
    Returns: the targets for `LoraSettings`, as short as possible; and name -> (inputs, outputs) of every matched layer.
    Raises: ValueError for a target that matches no layer, or one that cannot be adapted.
    """
    model = _outline(folder)
    head = model.get_output_embeddings()
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head}
    return _chosen_targets(model, linear, targets, model.config.model_type, "the head")


def _outline(folder: str) -> Any:
    """The model in a folder, without memory."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=False)


def first_adapter(model: ModelSettings, lora: LoraSettings) -> dict[str, Tensor]:
    """A of each layer by canonical name, as `LoraModel.build` draws it; without building the model. B is 0.

    Raises: ValueError as `LoraModel.build`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    outline, tensors = _outline(model.folder), dict[str, Tensor]()
    inject_adapter_in_model(LoraConfig(r=lora.rank, target_modules=list(lora.targets)), outline)
    _check_layers(outline, lora)
    with torch.random.fork_rng():
        torch.manual_seed(model.seed)
        for name, sizes in find_targets(model.folder, lora.targets)[1].items():
            layer = nn.utils.skip_init(nn.Linear, *sizes, bias=False, dtype=getattr(torch, model.dtype))
            alone: Any = nn.ModuleDict({"layer": layer})
            inject_adapter_in_model(LoraConfig(r=lora.rank, target_modules=["layer"]), alone)
            tensors[name + LORA_A] = alone["layer"].lora_A["default"].weight.detach().float()
    return tensors


def policy_targets(
    policy: nn.Module, backbone: Sequence[str], targets: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
    """Like `find_targets` for a policy: the trained linear layers of its backbone, except heads of language models."""
    inside = LoraSettings(rank=1, alpha=1.0, targets=(), base_digest="", backbone=tuple(backbone)).is_inside
    linear = {
        name: part
        for name, part in policy.named_modules()
        if isinstance(part, nn.Linear) and part.weight.requires_grad and inside(name) and not name.endswith(HEAD)
    }
    return _chosen_targets(policy, linear, targets, type(policy).__name__, "no layer of the backbone that is trained")


def _chosen_targets(
    model: nn.Module, linear: Mapping[str, nn.Linear], targets: Sequence[str], kind: str, others: str
) -> tuple[tuple[str, ...], dict[str, tuple[int, int]]]:
    """
    Args:
        linear: the layers that can be adapted.
        others: linear layers that cannot be adapted -> what they are.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    chosen = dict(linear) if tuple(targets) == (ALL_LINEAR,) else {}
    for target in targets if not chosen else ():
        matches = _matching(modules, [target])
        if not matches:
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ValueError(f"{target!r} is no layer of {kind}; use {ALL_LINEAR}, or of {ends}")
        if not matches & linear.keys():
            name = min(matches)
            what = others if isinstance(modules[name], nn.Linear) else f"a {type(modules[name]).__name__}"
            raise ValueError(f"{target!r} means {name}, {what}; only linear layers below the head have adapters")
        chosen |= {name: linear[name] for name in matches & linear.keys()}
    ends = sorted({name.rpartition(".")[2] for name in chosen})
    short = ends if _matching(modules, ends) == chosen.keys() else sorted(chosen)
    sizes = {name: (layer.in_features, layer.out_features) for name, layer in linear.items() if name in chosen}
    return tuple(short), sizes


def _matching(modules: Mapping[str, Any], targets: Sequence[str]) -> set[str]:
    changes = LoraSettings(rank=1, alpha=1.0, targets=tuple(targets), base_digest="").changes
    return set(filter(changes, modules))


class LoraModel(ModelAdapter):
    """A model with an adapter: trains and saves only the adapter and the modules outside the backbone. One rank writes
    its files.

    Args:
        base: adapter of the model without LoRA.
        model: its folder, which has weights; its dtype, and the seed of the adapter.
    """

    stem = ADAPTER_STEM
    has_adapter = True

    def __init__(self, base: ModelAdapter, model: ModelSettings, lora: LoraSettings) -> None:
        self.base, self._settings, self.lora = base, model, lora
        self.shares_rows = base.shares_rows

    def build(self, device: torch.device) -> nn.Module:
        """The same adapter in every process, by the seed; its initial update is 0.

        Raises: ValueError if peft adapts other layers than the targets name.
        """
        from peft import inject_adapter_in_model

        model = self.base.build(device)
        whole = [p for name, p in model.named_parameters() if p.requires_grad and not self.lora.is_inside(name)]
        model.requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(self._settings.seed)
            inject_adapter_in_model(self._peft_config(trains=True), model)
        _check_layers(model, self.lora)
        for parameter in whole:
            parameter.requires_grad_(True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model.eval()

    def answers(self, model: Any, batch: Any, *, entropies: bool) -> ModelOutputs:
        return self.base.answers(model, batch, entropies=entropies)

    def base_answers(self, model: Any, batch: Any) -> ModelOutputs:
        with _adapter_off(model):
            return self.base.answers(model, batch, entropies=False)

    def num_calls(self, batch: Any) -> int:
        return self.base.num_calls(batch)

    def served(self, tensors: Mapping[str, Tensor]) -> Served:
        held = {name: tensor for name, tensor in tensors.items() if not name.endswith((A, B))}
        layers = [name.removesuffix(A) for name in tensors if name.endswith(A)]
        changes = {
            f"{layer}.weight": LowRank(a=tensors[layer + A], b=tensors[layer + B], scale=self.lora.scale)
            for layer in layers
        }
        return Served(weights={name.replace(HELD, "."): tensor for name, tensor in held.items()}, changes=changes)

    def is_frozen(self, name: str) -> bool:
        return self.lora.is_inside(name) and not is_adapter_tensor(name)

    def saved(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {n: tensor for n, tensor in tensors.items() if n.endswith((A, B)) or not self.lora.is_inside(n)}

    def written_together(self, model: Any, names: Iterable[str]) -> Iterable[Sequence[str]]:
        """All tensors together: peft reads one file."""
        return [list(names)]

    def to_files(self, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {peft_name(name): tensor for name, tensor in tensors.items()}

    def describe(self, folder: str) -> None:
        """Writes the adapter's config and its base's digest, beside the base's config and tokenizer: a folder that peft
        loads onto the base in its original folder."""
        self.base.describe(folder)
        self._peft_config(trains=False).save_pretrained(folder)
        base = {"digest": self.lora.base_digest, "dtype": self._settings.dtype}
        Path(folder, BASE_FILE).write_text(json.dumps(base), encoding="utf-8")

    @torch.no_grad()
    def load(self, model: Any, folder: str) -> None:
        """Raises: ValueError for a folder without an adapter, or with one of another base or shape."""
        own = self.saved(tensors_of(model))
        tensors = self.read(folder, {peft_name(name): tuple(tensor.shape) for name, tensor in own.items()})
        for name, tensor in own.items():
            tensor.copy_(tensors[peft_name(name)])

    def read(self, folder: str, needs: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The tensors of an adapter's file, by peft's names.

        Args:
            needs: their shapes.

        Raises: as `load`.
        """
        if not is_adapter(folder):
            raise ValueError(f"{folder}: holds a whole model, and an adapter is trained here; leave lora out")
        check_base(folder, self.lora.base_digest, self._settings.folder)
        tensors = load_file(f"{folder}/{ADAPTER_WEIGHTS}")
        saved = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if saved != needs:
            name = sorted(saved.items() ^ needs.items())[0][0]
            raise ValueError(
                f"{folder}: {name} is {saved.get(name, 'absent')} there and {needs.get(name, 'absent')} here; "
                "use the rank and the targets that it was trained with"
            )
        return tensors

    def _peft_config(self, *, trains: bool) -> LoraConfig:
        from peft import LoraConfig

        config = LoraConfig(
            r=self.lora.rank,
            lora_alpha=self.lora.alpha,  # pyright: ignore[reportArgumentType], any number is divided by the rank
            target_modules=list(self.lora.targets),
            task_type="CAUSAL_LM" if self.lora.backbone == ("",) else None,
            base_model_name_or_path=self._settings.folder,
            inference_mode=not trains,
        )
        config.target_modules = sorted(self.lora.targets)  # pyright: ignore[reportAttributeAccessIssue], a set has no order
        return config


def _check_layers(model: nn.Module, lora: LoraSettings) -> None:
    """peft adapts the routed experts of some mixtures in place of layers whose names end like theirs did before
    transformers 5, and those could not be served. Raises: ValueError."""
    layers = [name.removesuffix(A) for name, _ in model.named_parameters() if name.endswith(A)]
    if others := [name for name in layers if not lora.changes(name)]:
        raise ValueError(
            f"actor.lora.targets: peft adapts {others[0]}, the experts of a layer, in place of the layers named "
            f"{', '.join(lora.targets)}; name only layers of attention, such as [q_proj, v_proj]"
        )


def peft_name(name: str) -> str:
    """The name of an adapter's parameter in peft's files; of its canonical name, too."""
    return PEFT_PREFIX + name.replace(".default.", ".")


def name_in_memory(name: str) -> str:
    """The name in a model of `LoraModel` of an adapter's tensor with that canonical name."""
    return name.replace(LORA_A, A).replace(LORA_B, B)


def merged_model(folder: str, dtype: torch.dtype) -> Any:
    """The plain model (`transformers.PreTrainedModel`) of an adapter and its base, merged by peft.

    Raises: OSError if the base has moved; WeightFilesError naming tensors of the adapter that belong to no layer of the
        base, or layers without a tensor: peft itself warns, and merges what was there before.
    """
    from peft import PeftModel

    model = PeftModel.from_pretrained(pretrained_model(base_of(folder), dtype), folder)
    names = {name.replace(".default.", ".").removesuffix(".default") for name, _ in model.named_parameters()}
    names ^= load_file(f"{folder}/{ADAPTER_WEIGHTS}").keys()
    if names := sorted(name for name in names if ".lora_" in name):
        raise WeightFilesError(
            f"{folder}: its adapter does not fit its base {base_of(folder)}: {', '.join(names[:4])}"
            f"{f' and {len(names) - 4} more' if len(names) > 4 else ''} are in one of the two alone"
        )
    return model.merge_and_unload()  # pyright: ignore[reportCallIssue]


def write_merged(folder: str, output: str, dtype: str | None = None) -> None:
    """Writes the merged model and its tokenizer into an existing folder.

    Args:
        dtype: dtype of the result; None: that of the weights that the adapter was trained on.
    """
    base: dict[str, str] = json.loads(Path(folder, BASE_FILE).read_text(encoding="utf-8"))
    merged_model(folder, getattr(torch, dtype or base["dtype"])).save_pretrained(output)
    load_tokenizer(folder).save_pretrained(output)
    copy_processor(folder, output)


@torch.no_grad()
def add_adapter(policy: nn.Module, folder: str) -> None:
    """Merges an adapter, and loads its heads, into a plain policy with the weights of the adapter's base.

    Raises: WeightFilesError for tensors that the policy does not have, or has with another shape.
    """
    config = json.loads(Path(folder, ADAPTER_CONFIG).read_text(encoding="utf-8"))
    scale, tensors = config["lora_alpha"] / config["r"], policy.state_dict()
    adapter = {name.removeprefix(PEFT_PREFIX): t for name, t in load_file(f"{folder}/{ADAPTER_WEIGHTS}").items()}
    changes = {
        f"{name.removesuffix(LORA_A)}.weight": LowRank(a=t, b=adapter[name.removesuffix(LORA_A) + LORA_B], scale=scale)
        for name, t in adapter.items()
        if name.endswith(LORA_A)
    }
    heads = {name: t for name, t in adapter.items() if not is_adapter_tensor(name)}
    shapes = {name: [len(change.b), change.a.shape[1]] for name, change in changes.items()}
    shapes |= {name: list(t.shape) for name, t in heads.items()}
    for name, shape in shapes.items():
        if name not in tensors or list(tensors[name].shape) != shape:
            raise WeightFilesError(f"{folder}: the policy has no {name} of the shape {shape}")
    for name in shapes:
        tensors[name].copy_(changes[name].added_to(tensors[name]) if name in changes else heads[name])


def base_of(folder: str) -> str:
    """The folder of the base that an adapter was trained on."""
    return json.loads(Path(folder, ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]


def check_base(folder: str, digest: str, base: str) -> None:
    """Raises: ValueError unless the adapter in a folder was trained on the base of that digest."""
    actual = json.loads(Path(folder, BASE_FILE).read_text(encoding="utf-8"))["digest"]
    if actual != digest:
        raise ValueError(
            f"{folder}: its adapter was trained on another base than {base} (digest {actual[:12]}, not {digest[:12]}); "
            f"it was {base_of(folder)}"
        )


@contextmanager
def _adapter_off(model: nn.Module) -> Iterator[None]:
    """Context in which the model computes like its base. peft's own method also toggles requires_grad, which breaks a
    sharded model."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True  # pyright: ignore[reportPrivateUsage]
        assert layers and all(layer.disable_adapters for layer in layers), "peft switches its adapters otherwise"
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # pyright: ignore[reportPrivateUsage]
