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

    parts = {"tp": tp, "tp_rank": tp_rank, "ep": ep, "ep_rank": ep_rank, "etp": etp, "etp_rank": etp_rank}
    last = stage == pp - 1
    if stage == 0 or (last and shape.mtp_layers):
        out["embedding.word_embeddings.weight"] = vocab("model.embed_tokens.weight")
    if last:
        out["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not shape.tied_embeddings:
            out["output_layer.weight"] = vocab("lm_head.weight")
        elif pp > 1:
            out["output_layer.weight"] = vocab("model.embed_tokens.weight")
    for local in range(shape.num_layers // pp):
        layer = stage * (shape.num_layers // pp) + local
        out |= megatron_layer(full, shape, layer, f"decoder.layers.{local}.", te=te, experts=experts, **parts)
    for local in range(shape.mtp_layers if last else 0):
        layer, mc = shape.num_layers + local, f"mtp.layers.{local}."
        hf = f"model.layers.{layer}."
        out[mc + "enorm.weight"], out[mc + "hnorm.weight"] = full[hf + "enorm.weight"], full[hf + "hnorm.weight"]
        out[mc + "eh_proj.weight"] = full[hf + "eh_proj.weight"].chunk(tp)[tp_rank]
        out[mc + "final_layernorm.weight"] = full[hf + "shared_head.norm.weight"]
        out |= megatron_layer(full, shape, layer, mc + "transformer_layer.", te=te, experts=experts, **parts)
    return out


def megatron_layer(full, shape, layer, mc, *, te, experts, tp, tp_rank, ep, ep_rank, etp, etp_rank):
    """The names are those of megatron-core 0.16.1: transformer/{attention,multi_latent_attention,mlp}.py and
    transformer/moe/{moe_layer,router,experts,shared_experts}.py."""
    hf, out = f"model.layers.{layer}.", {}
    moe = shape.has_experts(layer)
    norm1 = "self_attention.linear_qkv.layer_norm_weight" if te and shape.latent is None else "input_layernorm.weight"
    norm2 = "mlp.linear_fc1.layer_norm_weight" if te and not moe else "pre_mlp_layernorm.weight"
    out[mc + norm1] = full[hf + "input_layernorm.weight"]
    out[mc + norm2] = full[hf + "post_attention_layernorm.weight"]
    out[mc + "self_attention.linear_proj.weight"] = full[hf + "self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
    if shape.latent is not None:
        out |= megatron_latent(full, shape, hf + "self_attn.", mc + "self_attention.", te, tp, tp_rank)
    else:
        for kind in ["weight"] + ["bias"] * shape.qkv_bias:
            qkv = interleaved_qkv(full, hf + "self_attn.", kind, shape)
            out[f"{mc}self_attention.linear_qkv.{kind}"] = qkv.chunk(tp)[tp_rank]
    if shape.qk_norm:
        out[mc + "self_attention.q_layernorm.weight"] = full[hf + "self_attn.q_norm.weight"]
        out[mc + "self_attention.k_layernorm.weight"] = full[hf + "self_attn.k_norm.weight"]

    def mlp(here, there):
        gate, up, down = (full[f"{there}{part}_proj.weight"] for part in ("gate", "up", "down"))
        out[here + "linear_fc1.weight"] = torch.cat([gate.chunk(tp)[tp_rank], up.chunk(tp)[tp_rank]])
        out[here + "linear_fc2.weight"] = down.chunk(tp, 1)[tp_rank]

    if not moe:
        mlp(mc + "mlp.", hf + "mlp.")
        return out
    out[mc + "mlp.router.weight"] = full[hf + "mlp.gate.weight"]
    if shape.router_bias:
        out[mc + "mlp.router.expert_bias"] = full[hf + "mlp.gate.e_score_correction_bias"]
    if shape.shared_intermediate:
        mlp(mc + "mlp.shared_experts.", hf + ("mlp.shared_expert." if shape.shared_gate else "mlp.shared_experts."))
    if shape.shared_gate:
        out[mc + "mlp.shared_experts.gate_weight"] = full[hf + "mlp.shared_expert_gate.weight"]
    there, here = hf + "mlp.experts.", mc + "mlp.experts."
    return out | megatron_experts(full, shape, there, here, ep, ep_rank, etp, etp_rank, experts)


def megatron_latent(full, shape, hf, mc, te, tp, tp_rank):
    out = {}
    pairs = [("kv", "kv_a_proj_with_mqa", "kv_b_proj")]
    if shape.latent.q_rank:
        pairs.append(("q", "q_a_proj", "q_b_proj"))
    else:
        out[mc + "linear_q_proj.weight"] = full[hf + "q_proj.weight"].chunk(tp)[tp_rank]
    for part, down, up in pairs:
        whole = full[f"{hf}{down}.weight"]
        out[f"{mc}linear_{part}_down_proj.weight"] = whole if te else whole.chunk(tp)[tp_rank]
        norm = f"linear_{part}_up_proj.layer_norm_weight" if te else f"{part}_layernorm.weight"
        out[mc + norm] = full[f"{hf}{part}_a_layernorm.weight"]
        out[f"{mc}linear_{part}_up_proj.weight"] = full[f"{hf}{up}.weight"].chunk(tp)[tp_rank]
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
    parts = {"tp": tp, "tp_rank": tp_rank, "ep": ep, "ep_rank": rank // etp % ep, "etp": etp, "etp_rank": rank % etp}
    for layer in range(shape.num_layers):
        out |= merged_layer(full, shape, layer, f"model.layers.{layer}.", **parts)
    if shape.mtp_layers:  # the draft model, sglang/srt/models/deepseek_nextn.py
        hf = f"model.layers.{shape.num_layers}."
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
            out[f"draft.model.{name}.weight"] = full[f"{hf}{name}.weight"]
        out |= merged_layer(full, shape, shape.num_layers, "draft.model.decoder.", **parts)
    return out


def merged_layer(full, shape, layer, p, *, tp, tp_rank, ep, ep_rank, etp, etp_rank):
    hf, out = f"model.layers.{layer}.", {}
    norms = ["input_layernorm", "post_attention_layernorm"] + ["self_attn.q_norm", "self_attn.k_norm"] * shape.qk_norm
    for norm in norms:
        out[f"{p}{norm}.weight"] = full[f"{hf}{norm}.weight"]
    out[p + "self_attn.o_proj.weight"] = full[hf + "self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
    if shape.latent is not None:
        out |= merged_latent(full, shape, hf + "self_attn.", p + "self_attn.", tp, tp_rank)
    else:
        out |= merged_qkv(full, shape, hf + "self_attn.", p + "self_attn.", tp, tp_rank)

    def mlp(there, here):
        gate, up, down = (full[f"{there}{part}_proj.weight"] for part in ("gate", "up", "down"))
        out[here + "gate_up_proj.weight"] = torch.cat([gate.chunk(tp)[tp_rank], up.chunk(tp)[tp_rank]])
        out[here + "down_proj.weight"] = down.chunk(tp, 1)[tp_rank]

    if not shape.has_experts(layer):
        mlp(hf + "mlp.", p + "mlp.")
        return out
    shared = "mlp.shared_expert" if shape.shared_gate else "mlp.shared_experts"
    if shape.shared_intermediate:
        mlp(f"{hf}{shared}.", f"{p}{shared}.")
    whole = ["gate.weight"] + ["gate.e_score_correction_bias"] * shape.router_bias
    for name in whole + ["shared_expert_gate.weight"] * shape.shared_gate:
        out[f"{p}mlp.{name}"] = full[f"{hf}mlp.{name}"]
    count = shape.num_experts // ep
    w13, w2 = [], []
    for expert in range(ep_rank * count, (ep_rank + 1) * count):
        gate, up, down = (full[f"{hf}mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        w13.append(torch.cat([gate.chunk(etp)[etp_rank], up.chunk(etp)[etp_rank]]))
        w2.append(down.chunk(etp, 1)[etp_rank])
    out[p + "mlp.experts.w13_weight"], out[p + "mlp.experts.w2_weight"] = torch.stack(w13), torch.stack(w2)
    return out


def merged_qkv(full, shape, hf, p, tp, tp_rank):
    out = {}
    for kind in ["weight"] + ["bias"] * shape.qkv_bias:
        q, k, v = (full[f"{hf}{part}_proj.{kind}"] for part in "qkv")
        if tp > shape.num_kv_heads:  # each head is held by several neighbouring ranks
            k, v = (
                part.view(shape.num_kv_heads, shape.head_dim, *part.shape[1:])
                .repeat_interleave(tp // shape.num_kv_heads, 0)
                .flatten(0, 1)
                for part in (k, v)
            )
        out[f"{p}qkv_proj.{kind}"] = torch.cat([part.chunk(tp)[tp_rank] for part in (q, k, v)])
    return out


def merged_latent(full, shape, hf, p, tp, tp_rank):
    """sglang/srt/models/deepseek_v2.py, DeepseekV2AttentionMLA"""
    out = {p + "kv_a_layernorm.weight": full[hf + "kv_a_layernorm.weight"]}
    kv_a = full[hf + "kv_a_proj_with_mqa.weight"]
    if shape.latent.q_rank:
        out[p + "fused_qkv_a_proj_with_mqa.weight"] = torch.cat([full[hf + "q_a_proj.weight"], kv_a])
        out[p + "q_a_layernorm.weight"] = full[hf + "q_a_layernorm.weight"]
    else:
        out[p + "kv_a_proj_with_mqa.weight"] = kv_a
    for name in ("q_b_proj" if shape.latent.q_rank else "q_proj", "kv_b_proj"):
        out[f"{p}{name}.weight"] = full[f"{hf}{name}.weight"].chunk(tp)[tp_rank]
    return out


def huggingface_rank(full, shape, *, fused_experts):
    out = {name: weight for name, weight in full.items() if not (fused_experts and ".experts." in name)}
    for layer in range(shape.num_layers + shape.mtp_layers if fused_experts else 0):
        if shape.has_experts(layer):
            p = f"model.layers.{layer}.mlp.experts."
            gate, up, down = (
                torch.stack([full[f"{p}{expert}.{part}_proj.weight"] for expert in range(shape.num_experts)])
                for part in ("gate", "up", "down")
            )
            out[p + "gate_up_proj"], out[p + "down_proj"] = torch.cat([gate, up], dim=1), down
    return out
