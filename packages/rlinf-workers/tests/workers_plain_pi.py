"""pi0 and pi0.5 in plain torch, one row at a time, from the names of their tensors alone.

Legend: P tokens of pictures and prompt, H actions that are predicted.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

VISION, TEXT, EXPERT = "model.vlm.vision_tower.", "model.vlm.language_model.", "model.dit."
Weights = dict[str, Tensor]
Layer = tuple[Tensor, Tensor]
"""Keys and values that a layer of the vision-language model leaves, [P, head] each."""


def _linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)


def _norm(x: Tensor, w: Weights, name: str) -> Tensor:
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    return x * w[name + ".weight"] + w[name + ".bias"]


def _gelu(x: Tensor) -> Tensor:
    """By its approximation with tanh, as SigLIP's and Gemma's configs name it."""
    return 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


def plain_vision(w: Weights, picture: Tensor, num_heads: int) -> Tensor:
    """[3, S, S] in -1..1 -> [patches, width], projected to the language model."""
    kernel = w[VISION + "embeddings.patch_embedding.weight"]
    size = kernel.shape[-1]
    patches = picture.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
    x = patches @ kernel.flatten(1).T + w[VISION + "embeddings.patch_embedding.bias"]
    x = x + w[VISION + "embeddings.position_embedding.weight"]
    i = 0
    while (b := f"{VISION}encoder.layers.{i}.") + "mlp.fc1.weight" in w:
        h = _norm(x, w, b + "layer_norm1")
        q, k, v = (_linear(h, w, f"{b}self_attn.{n}_proj").unflatten(-1, (num_heads, -1)) for n in "qkv")
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + _linear(mixed, w, b + "self_attn.out_proj")
        x = x + _linear(_gelu(_linear(_norm(x, w, b + "layer_norm2"), w, b + "mlp.fc1")), w, b + "mlp.fc2")
        i += 1
    return _linear(_norm(x, w, VISION + "post_layernorm"), w, "model.vlm.multi_modal_projector.linear")


def _turned(x: Tensor, first: int) -> Tensor:
    """Rotary positions (arXiv:2104.09864) of [T, heads, d], the first of which is `first`: halves turn together."""
    half = x.shape[-1] // 2
    at = torch.arange(first, first + len(x), dtype=x.dtype)[:, None]
    angles = at / 10000 ** (torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


def _rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _gemma(
    w: Weights, prefix: str, x: Tensor, before: list[Layer], seen: Tensor, condition: Tensor | None
) -> tuple[Tensor, list[Layer]]:
    """Layers over [T, width] behind what each layer left before; one head of keys for all.

    Args:
        seen: [T, tokens before + T] bool.
        condition: of adaptive norms; None: ordinary ones.
    """

    def norm(x: Tensor, name: str) -> tuple[Tensor, Tensor | float]:
        if condition is None:
            return _rms(x) * (1 + w[name + ".weight"]), 1.0
        scale, shift, gate = _linear(condition, w, name + ".dense").chunk(3)
        return _rms(x) * (1 + scale) + shift, gate

    left, i = [], 0
    while (b := f"{prefix}layers.{i}.") + "mlp.up_proj.weight" in w:
        h, gate = norm(x, b + "input_layernorm")
        first = len(before[i][0]) if before else 0
        head = len(w[b + "self_attn.k_proj.weight"])
        q = _turned(_linear(h, w, b + "self_attn.q_proj").unflatten(-1, (-1, head)), first)
        k = _turned(_linear(h, w, b + "self_attn.k_proj")[:, None], first)[:, 0]
        v = _linear(h, w, b + "self_attn.v_proj")
        left.append((k, v))
        if before:
            k, v = torch.cat([before[i][0], k]), torch.cat([before[i][1], v])
        scores = (torch.einsum("qhd,kd->hqk", q, k) / head**0.5).masked_fill(~seen, -torch.inf)
        mixed = torch.einsum("hqk,kd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + gate * _linear(mixed, w, b + "self_attn.o_proj")
        h, gate = norm(x, b + "post_attention_layernorm")
        x = x + gate * _linear(_gelu(_linear(h, w, b + "mlp.gate_proj")) * _linear(h, w, b + "mlp.up_proj"), w,
                               b + "mlp.down_proj")  # fmt: skip
        i += 1
    return norm(x, prefix + "norm")[0], left


def plain_prefix(w: Weights, pictures: list[Tensor], ids: list[int], num_heads: int) -> tuple[Tensor, list[Layer]]:
    """What the vision-language model says of pictures and prompt, [P, width], and what its layers leave. All tokens
    see each other."""
    words = w[TEXT + "embed_tokens.weight"][ids]
    x = torch.cat([*(plain_vision(w, one, num_heads) for one in pictures), words * words.shape[-1] ** 0.5])
    return _gemma(w, TEXT, x, [], torch.ones(len(x), len(x), dtype=torch.bool), None)


def _waves(time: float, width: int, dtype: torch.dtype) -> Tensor:
    periods = [0.004 * (4.0 / 0.004) ** (i / (width // 2 - 1)) for i in range(width // 2)]
    return torch.tensor([f(2 * math.pi * time / p) for f in (math.sin, math.cos) for p in periods], dtype=dtype)


def plain_pi0(w: Weights, prefix: list[Layer], state: Tensor, chunk: Tensor, time: float) -> tuple[Tensor, Tensor]:
    """State [size], actions [H, D] at a time -> what the expert says of them [H, width], and velocities [H, D]. The
    state is a token, which does not see the actions."""
    m = "embed_action_time."
    actions = _linear(chunk, w, m + "action_in_proj")
    waves = _waves(time, actions.shape[-1], actions.dtype).expand_as(actions)
    mixed = F.silu(_linear(torch.cat([actions, waves], -1), w, m + "action_time_mlp_in"))
    x = torch.cat([_linear(state, w, m + "state_proj")[None], _linear(mixed, w, m + "action_time_mlp_out")])
    seen = torch.ones(len(x), len(prefix[0][0]) + len(x), dtype=torch.bool)
    seen[0, -len(chunk) :] = False
    features = _gemma(w, EXPERT, x, prefix, seen, None)[0][1:]
    return features, _linear(features, w, "action_out_proj")


def plain_pi05(w: Weights, prefix: list[Layer], chunk: Tensor, time: float) -> tuple[Tensor, Tensor]:
    """The same; the time goes into the norms, and there is no state."""
    x = _linear(chunk, w, "action_in_proj")
    waves = _waves(time, x.shape[-1], x.dtype)
    condition = F.silu(_linear(F.silu(_linear(waves, w, "time_mlp_in")), w, "time_mlp_out"))
    seen = torch.ones(len(x), len(prefix[0][0]) + len(x), dtype=torch.bool)
    features = _gemma(w, EXPERT, x, prefix, seen, condition)[0]
    return features, _linear(features, w, "action_out_proj")


Predict = Callable[[Tensor, float], tuple[Tensor, Tensor]]
"""Noisy actions [n, H, D] and their time -> what the expert says of them, [n, H, width], and velocities [n, H, D]."""


def plain_predict(
    w: Weights, pictures: list[Tensor], prompts: list[list[int]], states: Tensor | None, num_heads: int
) -> Predict:
    """
    Args:
        pictures: [n, 3, S, S] for each camera.
        states: [n, size] for pi0; None: pi0.5.
    """
    prefixes = [plain_prefix(w, [camera[i] for camera in pictures], ids, num_heads)[1] for i, ids in enumerate(prompts)]

    def predict(chunk: Tensor, time: float) -> tuple[Tensor, Tensor]:
        if states is None:
            rows = [plain_pi05(w, prefix, one, time) for prefix, one in zip(prefixes, chunk, strict=True)]
        else:
            rows = [plain_pi0(w, p, s, one, time) for p, s, one in zip(prefixes, states, chunk, strict=True)]
        features, velocities = zip(*rows, strict=True)
        return torch.stack(features), torch.stack(velocities)

    return predict


def plain_chain_logprobs(predict: Predict, chain: Tensor, steps: Tensor | None, w: Weights) -> Tensor:
    """Chain [n, steps + 1, H, D] -> [n, H, D], by torch's normal distribution; Flow-SDE at noise level 0.5 where each
    row has one noisy step, else Flow-Noise with deviations of a head `noise_head` from 0.08 to 0.16."""
    num_steps, total = chain.shape[1] - 1, torch.zeros_like(chain[:, 0])
    for k in range(num_steps):
        t, s = 1 - k / num_steps, 1 - (k + 1) / num_steps
        features, velocity = predict(chain[:, k], t)
        if steps is None:
            hidden = torch.tanh(_linear(torch.tanh(_linear(features, w, "noise_head.0")), w, "noise_head.2"))
            share = (torch.tanh(_linear(hidden, w, "noise_head.4")) + 1) / 2
            mean, std, counts = chain[:, k] + (s - t) * velocity, 0.08 * 2.0**share, torch.ones(len(chain))
        else:
            sigma = 0.5 * (t / (1 - (s if k == 0 else t))) ** 0.5
            drift = velocity + sigma**2 / (2 * t) * (chain[:, k] + (1 - t) * velocity)
            mean, std = chain[:, k] + (s - t) * drift, torch.tensor(sigma * (t - s) ** 0.5)
            counts = (steps == k).to(chain.dtype)
        total = total + counts[:, None, None] * torch.distributions.Normal(mean, std).log_prob(chain[:, k + 1])
    return total


def plain_value(features: Tensor, w: Weights) -> Tensor:
    """[..., width] -> [...]"""
    x = _linear(features, w, "value_head.0")
    return _linear(x * 0.5 * (1 + torch.erf(x / 2**0.5)), w, "value_head.2")[..., 0]
