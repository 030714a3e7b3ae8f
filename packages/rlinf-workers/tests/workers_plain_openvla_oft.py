"""OpenVLA-OFT in plain torch, from the names of the published tensors alone, and the files of its parts."""

import json
from pathlib import Path

import torch
from torch import Tensor
from workers_plain_openvla import LLAMA, NUM_TOKENS, plain_llama, plain_patches, write_checkpoint

WIDTH, NUM_DIMS, STATE_SIZE, END = 24, 3, 5, 2
RANK = 32
"""Of the LoRA that the vision backbone's file has; its scale is 16 / 32."""
STATISTICS = {
    "action": {
        "q01": [-0.5, 0.0, 0.25],
        "q99": [0.5, 2.0, 0.25],
        "min": [-1.0, -1.0, 0.0],
        "max": [1.0, 3.0, 1.0],
        "mask": [True, True, False],
    },
    "proprio": {"q01": [-1.0] * STATE_SIZE, "q99": [1.0, 2.0, 3.0, 4.0, 0.5]},
}


def plain_states(
    w: dict[str, Tensor],
    pictures: list[Tensor],
    ids: list[int],
    state: Tensor | None,
    *,
    film: bool,
    num_numbers: int,
    ends: tuple[int, ...] = (END,),
) -> Tensor:
    """[num_numbers, H]: the states of one row that predict the chunk, all positions seeing all."""
    table = w[LLAMA + "embed_tokens.weight"]
    words = table[[*ids, *ends]]
    language = words.mean(0) if film else None
    seen = [plain_patches(w, picture, (2, 1), language) for picture in pictures]
    if state is not None:
        hidden = state @ w["proprio_projector.fc1.weight"].T + w["proprio_projector.fc1.bias"]
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        seen.append((hidden @ w["proprio_projector.fc2.weight"].T + w["proprio_projector.fc2.bias"])[None])
    empty = torch.zeros(num_numbers, words.shape[1], dtype=words.dtype)
    x = torch.cat([words[:1], *seen, words[1 : len(ids)], empty, words[len(ids) :]])
    before = len(x) - len(ends) - num_numbers
    return plain_llama(w, x, 0.0)[before - 1 : before - 1 + num_numbers]


def plain_token_logprobs(w: dict[str, Tensor], states: Tensor) -> Tensor:
    """[num_numbers, 256], bin 0 being the lowest number and the last token of the vocabulary."""
    logits = states @ w["language_model.lm_head.weight"].T
    return logits[:, NUM_TOKENS - 256 : NUM_TOKENS].log_softmax(-1).flip(-1)


def plain_numbers(w: dict[str, Tensor], states: Tensor) -> Tensor:
    """[K, A] in -1..1, by the L1 head."""

    def norm(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return x * w[f"action_head.model.{name}.weight"] + w[f"action_head.model.{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"action_head.model.{name}.weight"].T + w[f"action_head.model.{name}.bias"]

    x = linear(norm(states.reshape(-1, NUM_DIMS * states.shape[1]), "layer_norm1"), "fc1").relu()
    for i in range(2):
        x = x + linear(norm(x, f"mlp_resnet_blocks.{i}.ffn.0"), f"mlp_resnet_blocks.{i}.ffn.1").relu()
    return linear(norm(x, "layer_norm2"), "fc2")


def part_tensors(seed: int = 1) -> dict[str, Tensor]:
    """Projector of the state, L1 head and FiLM, in the model's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "proprio_projector.fc1.weight": (WIDTH, STATE_SIZE),
        "proprio_projector.fc2.weight": (WIDTH, WIDTH),
        "action_head.model.layer_norm1.weight": (NUM_DIMS * WIDTH,),
        "action_head.model.fc1.weight": (WIDTH, NUM_DIMS * WIDTH),
        "action_head.model.layer_norm2.weight": (WIDTH,),
        "action_head.model.fc2.weight": (NUM_DIMS, WIDTH),
    }
    for i in range(2):
        shapes |= {f"action_head.model.mlp_resnet_blocks.{i}.ffn.{j}.weight": (WIDTH,) * (1 + j) for j in (0, 1)}
    for tower, width, blocks in (("featurizer", 32, 3), ("fused_featurizer", 48, 2)):
        for i in range(blocks):
            names = [f"vision_backbone.{tower}.blocks.{i}.{what}.weight" for what in ("scale", "shift")]
            shapes |= dict.fromkeys(names, (width, WIDTH))
    shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor + 1 if "norm" in name and "weight" in name else tensor for name, tensor in tensors.items()}


def write_oft_checkpoint(folder: Path, tensors: dict[str, Tensor], parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """As fine-tuning leaves it: merged weights, statistics, a state dict for each part. All tensors as they count, with
    those of the vision backbone's LoRA added, which adapts the convolution `patch_embed.proj` as well."""
    write_checkpoint(folder, tensors)
    (folder / "dataset_statistics.json").write_text(json.dumps({"libero_spatial_no_noops": STATISTICS}))
    for part in ("proprio_projector", "action_head"):
        saved = {f"module.{name.removeprefix(part + '.')}": t for name, t in parts.items() if name.startswith(part)}
        torch.save(saved, folder / f"{part}--150000_checkpoint.pt")
    generator, saved, counted = torch.Generator().manual_seed(2), {}, tensors | parts
    towers = {name: t for name, t in counted.items() if name.startswith("vision_backbone.")}
    for name, tensor in towers.items():
        at = name.split(".")
        if "blocks" in at and at[4] not in ("scale", "shift"):
            at.insert(4, "block")
        if at[-2] in ("qkv", "proj", "fc1", "fc2"):
            layer = ".".join(at[:-1])
            saved[f"{layer}.base_layer.{at[-1]}"] = tensor
            if at[-1] == "weight":
                ones = (1,) * (tensor.ndim - 2)
                down, up = (
                    0.1 * torch.randn(shape, generator=generator)
                    for shape in ((RANK, *tensor.shape[1:]), (len(tensor), RANK, *ones))
                )
                saved |= {f"{layer}.lora_A.default.weight": down, f"{layer}.lora_B.default.weight": up}
                counted[name] = tensor + 0.5 * torch.einsum("or,r...->o...", up.flatten(1), down)
        else:
            saved[".".join(at)] = tensor
    torch.save(saved, folder / "vision_backbone--150000_checkpoint.pt")
    return counted
