"""Small checkpoints of pi0 and pi0.5 in openpi's PyTorch format and in LeRobot's, with numbers of their own."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

PALIGEMMA, EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
VISION = PALIGEMMA + "model.vision_tower.vision_model."
TEXT = PALIGEMMA + "model.language_model."
LAYERS, HEAD, NUM_TOKENS = 2, 16, 30
STATISTICS = {"q01": [-1.0] * 4, "q99": [3.0] * 4, "mean": [0.0] * 4, "std": [1.0] * 4}
WORDS = ["<pad>", "<bos>", "<unk>", "Task:", "push,", "State:", ";\nAction:", *map(str, range(10))]


def published_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """Names as openpi's conversion to PyTorch writes them; PaliGemma 32 wide, SigLIP 64 with 16 heads, the expert
    48. The kinds `pi0` and `pi05` differ in how the expert is told the time, and the first one reads a state."""
    shapes: dict[str, tuple[int, ...]] = {
        VISION + "embeddings.patch_embedding.weight": (64, 3, 14, 14),
        VISION + "embeddings.patch_embedding.bias": (64,),
        VISION + "embeddings.position_embedding.weight": (4, 64),
        VISION + "post_layernorm.weight": (64,),
        VISION + "post_layernorm.bias": (64,),
        PALIGEMMA + "model.multi_modal_projector.linear.weight": (32, 64),
        PALIGEMMA + "model.multi_modal_projector.linear.bias": (32,),
        PALIGEMMA + "lm_head.weight": (NUM_TOKENS, 32),
        TEXT + "norm.weight": (32,),
        EXPERT + "lm_head.weight": (NUM_TOKENS, 48),
        "action_in_proj.weight": (48, 4),
        "action_in_proj.bias": (48,),
        "action_out_proj.weight": (4, 48),
        "action_out_proj.bias": (4,),
    }
    shapes |= _norm_shapes(EXPERT + "model.norm", kind)
    layers = {"time_mlp_in": 48, "time_mlp_out": 48}
    if kind == "pi0":
        layers = {"state_proj": 6, "action_time_mlp_in": 96, "action_time_mlp_out": 48}
    for name, size in layers.items():
        shapes |= {f"{name}.weight": (48, size), f"{name}.bias": (48,)}
    for i in range(LAYERS):
        b = f"{VISION}encoder.layers.{i}."
        shapes |= {f"{b}{n}.{part}": (64,) for n in ("layer_norm1", "layer_norm2") for part in ("weight", "bias")}
        for layer in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= {f"{b}self_attn.{layer}.weight": (64, 64), f"{b}self_attn.{layer}.bias": (64,)}
        shapes |= {f"{b}mlp.fc1.weight": (96, 64), f"{b}mlp.fc1.bias": (96,)}
        shapes |= {f"{b}mlp.fc2.weight": (64, 96), f"{b}mlp.fc2.bias": (64,)}
        for prefix, width, hidden in ((TEXT, 32, 40), (EXPERT + "model.", 48, 56)):
            b = f"{prefix}layers.{i}."
            shapes |= {
                f"{b}self_attn.q_proj.weight": (2 * HEAD, width),
                f"{b}self_attn.o_proj.weight": (width, 2 * HEAD),
            }
            shapes |= {f"{b}self_attn.{n}_proj.weight": (HEAD, width) for n in "kv"}
            shapes |= {f"{b}mlp.{n}_proj.weight": (hidden, width) for n in ("gate", "up")}
            shapes |= {f"{b}mlp.down_proj.weight": (width, hidden)}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                if prefix == TEXT:
                    shapes |= {f"{b}{norm}.weight": (width,)}
                else:
                    shapes |= _norm_shapes(b + norm, kind)
    return shapes


def _norm_shapes(name: str, kind: str) -> dict[str, tuple[int, ...]]:
    """Of the expert: of a plain norm, or of one that the time adapts."""
    if kind == "pi0":
        return {f"{name}.weight": (48,)}
    return {f"{name}.dense.weight": (144, 48), f"{name}.dense.bias": (144,)}


def published_tensors(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in published_shapes(kind).items():
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = 0.1 * drawn if len(shape) == 1 else drawn / torch.tensor(shape[1:]).prod() ** 0.5
        if "norm" in name and name.startswith(VISION) and name.endswith("weight"):
            tensors[name] += 1
    return tensors


RENAMED = {
    PALIGEMMA + "lm_head": "model.vlm.language_model.embed_tokens",
    VISION: "model.vlm.vision_tower.",
    PALIGEMMA + "model.": "model.vlm.",
    EXPERT + "model.": "model.dit.",
}
"""What begins a name in the files, and in the model here."""
IN_LEROBOT = {"chunk_size": 3, "max_action_dim": 4, "max_state_dim": 32}
IN_OPENPI = {"action_dim": 4, "action_horizon": 3, "paligemma_variant": "gemma_2b", "precision": "bfloat16"}
"""Of their config.json."""


def plain_tensors(kind: str) -> dict[str, Tensor]:
    """`published_tensors` by the names that workers_plain_pi knows."""
    tensors = {}
    for name, tensor in published_tensors(kind).items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if kind == "pi0" and name.startswith(("state_proj", "action_in_proj", "action_time_mlp")):
            name = f"embed_action_time.{name}"
        tensors[name] = tensor
    return tensors


def write_layout(folder: Path, layout: str, kind: str) -> None:
    """A checkpoint as `openpi` converts it, or as the policy of `lerobot` saves itself."""
    tensors, config = published_tensors(kind), dict(IN_OPENPI)
    if layout == "lerobot":
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        config = {"type": kind} | IN_LEROBOT
    write_checkpoint(folder, tensors, config)


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], config: dict) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")  # type: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", pad_token="<pad>").save_pretrained(folder)
    (folder / "assets" / "lab").mkdir(parents=True)
    statistics = {"norm_stats": {"state": STATISTICS, "actions": STATISTICS}}
    (folder / "assets" / "lab" / "norm_stats.json").write_text(json.dumps(statistics))
