"""OpenVLA in plain torch, from the names of the published tensors alone, and a small checkpoint in that format."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor

DINO, SIGLIP = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."
LLAMA = "language_model.model."
HEADS, LAYERS, NUM_TOKENS, PADDED = 2, 2, 270, 288
MEANS = [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]]
STDS = [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]]
WORDS = ["In:", "What", "action", "should", "the", "robot", "take", "to", "push", "cube?", "reach?", "\u2581"]


def _norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    return x * w[name + ".weight"] + w[name + ".bias"]


def _linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def _attention(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | float) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(-3, -2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5 + mask
    return (scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2)


def plain_tower(
    w: dict[str, Tensor], prefix: str, picture: Tensor, num_blocks: int, language: Tensor | None = None
) -> Tensor:
    """[3, H, W] -> [patches, width]: the output of block `num_blocks` - 1, of 16 heads, without the final norm. With
    FiLM each block scales and shifts what attention left by `language` [H]."""
    kernel = w[prefix + "patch_embed.proj.weight"]
    size = kernel.shape[-1]
    patches = picture.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
    x = patches @ kernel.flatten(1).T + w[prefix + "patch_embed.proj.bias"] + w[prefix + "pos_embed"][0]
    x = torch.cat([*(w[prefix + n][0] for n in ("cls_token", "reg_token") if prefix + n in w), x])
    for i in range(num_blocks):
        b = f"{prefix}blocks.{i}."
        q, k, v = _linear(_norm(x, w, b + "norm1"), w, b + "attn.qkv").chunk(3, -1)
        x = x + _linear(_attention(q, k, v, 16, 0.0), w, b + "attn.proj") * w.get(b + "ls1.scale_factor", 1.0)
        if language is not None:
            x = (1 + _linear(language, w, b + "scale")) * x + _linear(language, w, b + "shift")
        hidden = _gelu(_linear(_norm(x, w, b + "norm2"), w, b + "mlp.fc1"))
        x = x + _linear(hidden, w, b + "mlp.fc2") * w.get(b + "ls2.scale_factor", 1.0)
    return x[-len(patches) :]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _turned(x: Tensor) -> Tensor:
    """Rotary positions (arXiv:2104.09864) of [T, heads * d]: halves of a head turn together."""
    x = x.unflatten(-1, (HEADS, -1))
    half = x.shape[-1] // 2
    angles = torch.arange(len(x), dtype=x.dtype)[:, None] / 10000 ** (torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def plain_patches(
    w: dict[str, Tensor], picture: Tensor, num_blocks: tuple[int, int], language: Tensor | None = None
) -> Tensor:
    """Picture [H, W, 3] uint8 of the right size -> [patches, H]."""
    pictures = [(picture.permute(2, 0, 1) / 255 - torch.tensor(m)[:, None, None]) / torch.tensor(s)[:, None, None]
             for m, s in zip(MEANS, STDS, strict=True)]  # fmt: skip
    dtype = w["projector.fc1.weight"].dtype
    towers = zip((DINO, SIGLIP), pictures, num_blocks, strict=True)
    features = torch.cat([plain_tower(w, name, p.to(dtype), n, language) for name, p, n in towers], -1)
    hidden = _gelu(_linear(_gelu(_linear(features, w, "projector.fc1")), w, "projector.fc2"))
    return _linear(hidden, w, "projector.fc3")


def plain_llama(w: dict[str, Tensor], x: Tensor, mask: Tensor | float) -> Tensor:
    """Embeddings [P, H] -> last states [P, H]."""
    for i in range(LAYERS):
        b = f"{LLAMA}layers.{i}."
        h = _rms(x, w[b + "input_layernorm.weight"])
        q, k, v = (_linear(h, w, f"{b}self_attn.{n}_proj") for n in "qkv")
        x = x + _linear(_attention(_turned(q), _turned(k), v, HEADS, mask), w, b + "self_attn.o_proj")
        h = _rms(x, w[b + "post_attention_layernorm.weight"])
        x = x + _linear(F.silu(_linear(h, w, b + "mlp.gate_proj")) * _linear(h, w, b + "mlp.up_proj"), w,
                        b + "mlp.down_proj")  # fmt: skip
    return _rms(x, w[LLAMA + "norm.weight"])


def plain_logits(w: dict[str, Tensor], picture: Tensor, ids: list[int], num_blocks: tuple[int, int]) -> Tensor:
    """Picture [H, W, 3] uint8 of the right size, tokens -> logits [T, padded vocabulary] after each position."""
    embedded = w[LLAMA + "embed_tokens.weight"][ids]
    x = torch.cat([embedded[:1], plain_patches(w, picture, num_blocks), embedded[1:]])
    mask = torch.full((len(x), len(x)), -torch.inf, dtype=x.dtype).triu(1)
    return _linear(plain_llama(w, x, mask), w, "language_model.lm_head")


def _tower_shapes(prefix: str, width: int, blocks: int, *, dino: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, 3, 7, 7),
        "patch_embed.proj.bias": (width,),
        "pos_embed": (1, 9, width),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    shapes |= {"cls_token": (1, 1, width), "reg_token": (1, 4, width)} if dino else {"attn_pool.latent": (1, 1, width)}
    for i in range(blocks):
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{i}.{norm}.weight": (width,), f"blocks.{i}.{norm}.bias": (width,)}
        if dino:
            shapes |= {f"blocks.{i}.{ls}.scale_factor": (width,) for ls in ("ls1", "ls2")}
        layers = {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.fc1": (3, 1), "mlp.fc2": (1, 3)}
        for name, (out, into) in layers.items():
            shapes[f"blocks.{i}.{name}.weight"] = (out * width, into * width)
            shapes[f"blocks.{i}.{name}.bias"] = (out * width,)
    return {prefix + name: shape for name, shape in shapes.items()}


def published_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Names as in the index of openvla-7b, of small shapes: towers 32 and 48 wide with 3 and 2 blocks, Llama 24."""
    shapes = _tower_shapes(DINO, 32, 3, dino=True) | _tower_shapes(SIGLIP, 48, 2, dino=False)
    for name, (out, into) in {"fc1": (320, 80), "fc2": (24, 320), "fc3": (24, 24)}.items():
        shapes |= {f"projector.{name}.weight": (out, into), f"projector.{name}.bias": (out,)}
    shapes |= {f"{LLAMA}embed_tokens.weight": (PADDED, 24), "language_model.lm_head.weight": (PADDED, 24)}
    shapes |= {f"{LLAMA}norm.weight": (24,)}
    for i in range(LAYERS):
        b = f"{LLAMA}layers.{i}."
        shapes |= {f"{b}self_attn.{n}_proj.weight": (24, 24) for n in "qkvo"}
        shapes |= {f"{b}mlp.gate_proj.weight": (40, 24), f"{b}mlp.up_proj.weight": (40, 24)}
        shapes |= {f"{b}mlp.down_proj.weight": (24, 40), f"{b}input_layernorm.weight": (24,)}
        shapes |= {f"{b}post_attention_layernorm.weight": (24,)}
    generator = torch.Generator().manual_seed(seed)
    return {name: _number(name, shape, generator) for name, shape in shapes.items()}


def _number(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    drawn = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * drawn + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return drawn * 1.4 / torch.tensor(shape[1:]).prod() ** 0.5


def write_checkpoint(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Two safetensors files and their index, config, processor, tokenizer."""
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, mine in parts.items():
        save_file({name: tensors[name].contiguous() for name in mine}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, mine in parts.items() for name in mine}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = {
        "model_type": "llama",
        "vocab_size": PADDED,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "pad_token_id": NUM_TOKENS,
    }
    statistics = {"q01": [-0.5, 0.0, 0.25], "q99": [0.5, 2.0, 0.25], "mask": [True, True, False]}
    config = {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "use_fused_vision_backbone": True,
        "image_sizes": [21, 21],
        "n_action_bins": 256,
        "pad_to_multiple_of": PADDED - NUM_TOKENS,
        "text_config": text,
        "norm_stats": {"bridge_orig": {"action": statistics}, "kuka": {"action": {"q01": [0.0], "q99": [1.0]}}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"image_resize_strategy": "resize-naive", "interpolations": ["bicubic", "bicubic"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"means": MEANS, "stds": STDS}))
    vocabulary = {"<unk>": 0, "<s>": 1} | {word: 2 + i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    begin = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = begin  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))


def prompt_ids(instruction: str) -> list[int]:
    """What that tokenizer makes of the prompt."""
    words = f"In: What action should the robot take to {instruction}? Out:".split()
    return [1, *(2 + WORDS.index(word) if word in WORDS else 0 for word in words), 2 + WORDS.index("\u2581")]
