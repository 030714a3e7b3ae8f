"""How Megatron-Core, SGLang and vLLM cut up a checkpoint, in plain torch: the independent reference for the layouts.

Each function returns the parameters of one rank by name, from `full`, the canonical tensors. `pad` is what the padding
of the vocabulary holds.
"""

import torch


def padded(weight, multiple, pad):
    missing = -len(weight) % multiple
    return torch.cat([weight, torch.full((missing, *weight.shape[1:]), pad, dtype=weight.dtype)])


def interleaved_qkv(full, prefix, kind, shape):
    """[q q k v | q q k v | ...] by group."""
    groups = shape.num_kv_heads
    q, k, v = (full[f"{prefix}{part}_proj.{kind}"] for part in "qkv")
    width = q.shape[1:]
    q = q.view(groups, -1, shape.head_dim, *width)
    k, v = (part.view(groups, 1, shape.head_dim, *width) for part in (k, v))
    return torch.cat([q, k, v], dim=1).reshape(-1, *width)


def megatron_rank(full, shape, *, tp, pp, dp, ep, etp, te, experts, rank, pad, vocab_multiple):
    tp_rank, dp_rank, stage = rank % tp, rank // tp % dp, rank // (tp * dp)
    inner = tp_rank + tp * dp_rank
    etp_rank, ep_rank = inner % etp, inner // etp % ep
    out = {}

    def vocab(name):
        return padded(full[name], vocab_multiple * tp, pad).chunk(tp)[tp_rank]

    if stage == 0:
        out["embedding.word_embeddings.weight"] = vocab("model.embed_tokens.weight")
    if stage == pp - 1:
        out["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not shape.tied_embeddings:
            out["output_layer.weight"] = vocab("lm_head.weight")
        elif pp > 1:
            out["output_layer.weight"] = vocab("model.embed_tokens.weight")
    for local in range(shape.num_layers // pp):
        layer = stage * (shape.num_layers // pp) + local
        hf, mc = f"model.layers.{layer}.", f"decoder.layers.{local}."
        moe = shape.has_experts(layer)
        norm1 = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
        norm2 = "mlp.linear_fc1.layer_norm_weight" if te and not moe else "pre_mlp_layernorm.weight"
        out[mc + norm1] = full[hf + "input_layernorm.weight"]
        out[mc + norm2] = full[hf + "post_attention_layernorm.weight"]
        for kind in ["weight"] + ["bias"] * shape.qkv_bias:
            qkv = interleaved_qkv(full, hf + "self_attn.", kind, shape)
            out[f"{mc}self_attention.linear_qkv.{kind}"] = qkv.chunk(tp)[tp_rank]
        out[mc + "self_attention.linear_proj.weight"] = full[hf + "self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
        if shape.qk_norm:
            out[mc + "self_attention.q_layernorm.weight"] = full[hf + "self_attn.q_norm.weight"]
            out[mc + "self_attention.k_layernorm.weight"] = full[hf + "self_attn.k_norm.weight"]
        if not moe:
            gate, up, down = (full[f"{hf}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            out[mc + "mlp.linear_fc1.weight"] = torch.cat([gate.chunk(tp)[tp_rank], up.chunk(tp)[tp_rank]])
            out[mc + "mlp.linear_fc2.weight"] = down.chunk(tp, 1)[tp_rank]
            continue
        out[mc + "mlp.router.weight"] = full[hf + "mlp.gate.weight"]
        out |= megatron_experts(
            full, shape, hf + "mlp.experts.", mc + "mlp.experts.", ep, ep_rank, etp, etp_rank, experts
        )
    return out


def megatron_experts(full, shape, hf, mc, ep, ep_rank, etp, etp_rank, experts):
    count = shape.num_experts // ep
    fc1, fc2 = [], []
    for expert in range(ep_rank * count, (ep_rank + 1) * count):
        gate, up, down = (full[f"{hf}{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        fc1.append(torch.cat([gate.chunk(etp)[etp_rank], up.chunk(etp)[etp_rank]]))
        fc2.append(down.chunk(etp, 1)[etp_rank])
    if experts == "grouped":  # used as weight1.view(E, H, 2I) and weight2.view(E, I, H)
        weight1 = torch.stack([weight.T for weight in fc1]).reshape(shape.hidden, -1)
        weight2 = torch.stack([weight.T for weight in fc2]).reshape(-1, shape.hidden)
        return {mc + "weight1": weight1, mc + "weight2": weight2}
    out = {}
    for index in range(count):
        if experts == "sequential":
            out[f"{mc}local_experts.{index}.linear_fc1.weight"] = fc1[index]
            out[f"{mc}local_experts.{index}.linear_fc2.weight"] = fc2[index]
        else:
            out[f"{mc}linear_fc1.weight{index}"] = fc1[index]
            out[f"{mc}linear_fc2.weight{index}"] = fc2[index]
    return out


def merged_rank(full, shape, *, tp, ep, etp, vocab_tp, rank, pad, vocab_multiple):
    tp_rank = rank % tp
    out = {"model.norm.weight": full["model.norm.weight"]}
    for name in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not shape.tied_embeddings):
        out[name] = padded(full[name], vocab_multiple, pad).chunk(vocab_tp)[rank % vocab_tp]
    for layer in range(shape.num_layers):
        p = f"model.layers.{layer}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        for norm in (
            norms
            + [
                "self_attn.q_norm",
                "self_attn.k_norm",
            ]
            * shape.qk_norm
        ):
            out[f"{p}{norm}.weight"] = full[f"{p}{norm}.weight"]
        for kind in ["weight"] + ["bias"] * shape.qkv_bias:
            q, k, v = (full[f"{p}self_attn.{part}_proj.{kind}"] for part in "qkv")
            if tp > shape.num_kv_heads:  # each head is held by several neighbouring ranks
                k, v = (
                    part.view(shape.num_kv_heads, shape.head_dim, *part.shape[1:])
                    .repeat_interleave(tp // shape.num_kv_heads, 0)
                    .flatten(0, 1)
                    for part in (k, v)
                )
            out[f"{p}self_attn.qkv_proj.{kind}"] = torch.cat([part.chunk(tp)[tp_rank] for part in (q, k, v)])
        out[p + "self_attn.o_proj.weight"] = full[p + "self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
        if not shape.has_experts(layer):
            gate, up, down = (full[f"{p}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            out[p + "mlp.gate_up_proj.weight"] = torch.cat([gate.chunk(tp)[tp_rank], up.chunk(tp)[tp_rank]])
            out[p + "mlp.down_proj.weight"] = down.chunk(tp, 1)[tp_rank]
            continue
        out[p + "mlp.gate.weight"] = full[p + "mlp.gate.weight"]
        count, ep_rank, etp_rank = shape.num_experts // ep, rank // etp % ep, rank % etp
        w13, w2 = [], []
        for expert in range(ep_rank * count, (ep_rank + 1) * count):
            gate, up, down = (full[f"{p}mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            w13.append(torch.cat([gate.chunk(etp)[etp_rank], up.chunk(etp)[etp_rank]]))
            w2.append(down.chunk(etp, 1)[etp_rank])
        out[p + "mlp.experts.w13_weight"], out[p + "mlp.experts.w2_weight"] = torch.stack(w13), torch.stack(w2)
    return out


def huggingface_rank(full, shape, *, fused_experts):
    out = {name: weight for name, weight in full.items() if not (fused_experts and ".experts." in name)}
    for layer in range(shape.num_layers if fused_experts else 0):
        if shape.has_experts(layer):
            p = f"model.layers.{layer}.mlp.experts."
            gate, up, down = (
                torch.stack([full[f"{p}{expert}.{part}_proj.weight"] for expert in range(shape.num_experts)])
                for part in ("gate", "up", "down")
            )
            out[p + "gate_up_proj"], out[p + "down_proj"] = torch.cat([gate, up], dim=1), down
    return out
