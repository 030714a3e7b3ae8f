"""Models, batches and ranks for the tests of the backend `megatron`."""

import dataclasses
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from test_workers_device_reads import Reads
from torch import Tensor
from transformers import DeepseekV3Config, Glm4MoeConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rlinf_algos import ppo_clip_loss
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.models.language_model import ModelSettings, build_model
from rlinf_workers.models.lora import LoraModel, LoraSettings, find_targets
from rlinf_workers.models.packed import PackedBatch, pack_without_padding
from rlinf_workers.models.placement import tensors_of
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.plugins import TRAINERS
from rlinf_workers.roles import Prompt
from rlinf_workers.roles.records.language import ExampleBatch, SampleGroup
from rlinf_workers.testing.backends import check_backend, trial_worker
from rlinf_workers.testing.engines import tiny_model
from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.checkpoint import CheckpointFiles
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend
from rlinf_workers.trainers.statistics import totals_of
from rlinf_workers.worker import Worker

VOCAB, TEMPERATURE, NUM_SHARDS = 14, 0.8, 2
PLAIN = OptimizerSettings(learning_rate=1e-2, epsilon=1.0, max_grad_norm=1e9)
"""AdamW's first average is the gradient, but for a factor, and nothing is clipped."""
ADAMW = OptimizerSettings(learning_rate=3e-3, epsilon=1e-4, weight_decay=0.1, max_grad_norm=0.5, lr_warmup_steps=3)
LORA = LoraSettings(rank=3, alpha=6.0, targets=(), base_digest="0123456789abcdef")
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 8,
}

GLM = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "use_qk_norm": True,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


DEEPSEEK = {
    **COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 24,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}
"""Queries and values of different lengths, positions by YaRN, and two groups of experts of which one is chosen."""
LITE = {
    **DEEPSEEK,
    **{"q_lora_rank": None, "n_group": 1, "rope_interleave": False, "rope_parameters": None, "rms_norm_eps": 1e-5},
}
"""As small models have it: queries without a latent vector, one group, plain positions."""


def write_models(folder: Path) -> dict[str, ModelSettings]:
    """Model type -> a tiny model of it, with weights that no initialisation would give and a tokenizer.

    Two stages divide the layers of all but two: `qwen2_tied`, and four chunks those of all but `qwen3_moe_deep`.
    """
    configs = {
        "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=False),
        "qwen2_tied": Qwen2Config(**{**COMMON, "num_hidden_layers": 3}, tie_word_embeddings=True),
        "qwen3_deep": Qwen3Config(**{**COMMON, "num_hidden_layers": 4}, head_dim=16, tie_word_embeddings=False),
        "qwen2_tied_deep": Qwen2Config(**{**COMMON, "num_hidden_layers": 4}, tie_word_embeddings=True),
        "qwen3_moe_deep": Qwen3MoeConfig(**{**COMMON, "num_hidden_layers": 5}, **EXPERTS, tie_word_embeddings=False),
        "qwen3": Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=False),
        "qwen3_moe": Qwen3MoeConfig(**COMMON, **EXPERTS, tie_word_embeddings=False),
        "glm4_moe": Glm4MoeConfig(**COMMON, **GLM),
        "deepseek_v3": DeepseekV3Config(**DEEPSEEK),
        "deepseek_v3_lite": DeepseekV3Config(**LITE),
    }
    models = {}
    for name, config in configs.items():
        tiny_model(folder / name)
        config.save_pretrained(folder / name)
        settings = ModelSettings(folder=str(folder / name), has_weights=False, seed=3)
        model = build_model(settings, torch.device("cpu"))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for key, weight in tensors_of(model).items():
                drawn = 0.1 * torch.randn(weight.shape, generator=generator)
                weight.copy_(drawn + (1.0 if "norm" in key else 0.0))
        model.save_pretrained(folder / name)
        models[name] = dataclasses.replace(settings, has_weights=True)
    return models


def write_critic(model: ModelSettings, folder: Path) -> str:
    """A critic whose head is not 0, as `replicated` writes it; returns its folder."""
    critic = ValueModel(model).build(torch.device("cpu"))
    generator = torch.Generator().manual_seed(9)
    tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(critic).items()}
    for name in ("lm_head.weight", "lm_head.bias"):
        tensors[name] = 0.1 * torch.randn(tensors[name].shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def adapted(kind: TokenModel) -> LoraModel:
    """With an adapter of all its linear layers; beside experts, of those of attention."""
    targets = find_targets(kind.settings.folder, ["all-linear"])[0]
    if any(name in kind.settings.folder for name in ("moe", "deepseek")):
        targets = tuple(target for target in targets if target not in ("down_proj", "gate_proj", "up_proj"))
    return LoraModel(kind, kind.settings, dataclasses.replace(LORA, targets=targets))


def write_adapter(model: ModelSettings, folder: Path) -> str:
    """An adapter whose B is not 0, as `replicated` writes it; returns its folder."""
    kind = adapted(TokenModel(model, TEMPERATURE))
    backend = ReplicatedBackend(kind, trial_worker(), optimizer=PLAIN, num_shards=NUM_SHARDS)
    generator = torch.Generator().manual_seed(11)
    for parameter in backend.on_model(lambda whole: list(whole.parameters())):
        if parameter.requires_grad:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    write(backend, trial_worker(), str(folder), optimizer=False)
    return str(folder)


def batch_of(seed: int, num_prompts: int = 2, size: int = 3, widths: tuple[int, int] = (5, 7)) -> SequenceBatch:
    """Prompts and completions of several lengths; a policy samples padding (0) and the end (1) in the middle, too."""
    generator = torch.Generator().manual_seed(seed)
    width, length = widths

    def tokens(rows: int, columns: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (rows, columns), generator=generator)

    prompts, prompt_mask = tokens(num_prompts, width), torch.ones(num_prompts, width, dtype=torch.int64)
    mask = torch.ones(num_prompts * size, length)
    for row in range(num_prompts):
        prompt_mask[row, : row % width] = 0
    for row in range(len(mask)):
        mask[row, length - row % length :] = 0
    return SequenceBatch(
        prompt_ids=prompts * prompt_mask,
        prompt_mask=prompt_mask,
        completion_ids=tokens(len(mask), length) * mask.long(),
        loss_mask=mask,
    )


def examples() -> ExampleBatch:
    ids = torch.arange(18).view(3, 6) % (VOCAB - 2) + 2
    return ExampleBatch(shard=0, token_ids=ids, loss_mask=torch.ones(3, 6))


def packed_of(batch: SequenceBatch, num_routers: int = COMMON["num_hidden_layers"]) -> PackedBatch:
    """The same prompts and completions without padding; with experts that no router would choose."""
    generator = torch.Generator().manual_seed(int(batch.completion_ids.sum()))

    def experts(*shape: int) -> torch.Tensor:
        scores = torch.rand(*shape, num_routers, EXPERTS["num_experts"], generator=generator)
        return scores.topk(EXPERTS["num_experts_per_tok"]).indices.to(torch.uint8)

    size = len(batch.completion_ids) // len(batch.prompt_ids)
    groups = [
        SampleGroup(
            prompt=Prompt(index=row, token_ids=ids[mask != 0], reference_answer=""),
            completion_ids=batch.completion_ids[row * size : (row + 1) * size],
            loss_mask=batch.loss_mask[row * size : (row + 1) * size],
            rollout_logprobs=torch.zeros(size, batch.completion_ids.shape[1]),
            policy_version=0,
            prompt_experts=experts(int(mask.sum())),
            experts=experts(size, batch.completion_ids.shape[1] - 1),
        )
        for row, (ids, mask) in enumerate(zip(batch.prompt_ids, batch.prompt_mask, strict=True))
    ]
    return pack_without_padding(groups)


def loss_on(batch: SequenceBatch):
    """A loss of all answers, with statistics."""

    def loss_of(answers):
        is_critic = bool(answers.values.numel())
        outputs = answers.values if is_critic else answers.logprobs
        terms = (outputs - batch.completion_ids).square() if is_critic else outputs.exp() - 0.3 * answers.entropies
        agreement = float(answers.router_agreement.sum())
        return (terms * batch.loss_mask).sum(), [float(batch.loss_mask.sum()), float(outputs.detach()[0, 0]), agreement]

    return loss_of


def update(
    backend, number: int, *, packs: bool = False, num_routers: int = COMMON["num_hidden_layers"]
) -> tuple[list[float], float]:
    """Micro-batches of different sizes, whichever replica has their shard."""
    backend.begin(3)
    for shard in backend.shards:
        for part in range(2):
            batch = batch_of(100 * number + 10 * shard + part, 1 + part, 3 - part, (4 + part, 6 - part + shard))
            backend.backward(shard, packed_of(batch, num_routers) if packs else batch, loss_on(batch), entropies=True)
        backend.count(shard, [0.0, 1.0, 0.0])
    statistics = backend.finish_backward()
    return statistics, backend.step(statistics[0])


def write(backend, worker: Worker, folder: str, *, model: bool = True, optimizer: bool = True) -> None:
    files = CheckpointFiles(worker, folder)
    if model:
        files.add_model(backend)
    if optimizer:
        files.add_optimizer(backend)
    files.start().wait()
    worker.ranks.barrier()


def go_on(make, worker: Worker, model: ModelSettings, before: str, after: str, number: int, **options):
    """One update from a checkpoint to the next."""
    backend = make(TokenModel(model, TEMPERATURE), worker, optimizer=ADAMW, num_shards=NUM_SHARDS, **options)
    backend.load_model(before)
    backend.load_optimizer(before)
    sums_and_norm = update(backend, number)
    write(backend, worker, after)
    return sums_and_norm


def study(
    make,
    worker: Worker,
    model: ModelSettings,
    folder: str,
    *,
    num_steps: int,
    critic: str | None = None,
    packs: bool = False,
    replays: bool = False,
    adapter: str | None = None,
    **options,
) -> dict:
    """Answers, the gradient of an update and what so many steps give; files go to the folder.

    Args:
        critic: the folder of one, which is studied in place of the model.
        packs: without padding.
        replays: with the experts of the batches.
        adapter: the folder of one that is trained, instead of the model.
    """

    def new_backend(optimizer):
        kind = ValueModel(model) if critic else TokenModel(model, TEMPERATURE, replays_routers=replays)
        if adapter:
            assert isinstance(kind, TokenModel), "critics have no adapters"
            kind = adapted(kind)
        backend = make(kind, worker, optimizer=optimizer, num_shards=NUM_SHARDS, **options)
        if critic or adapter:
            backend.load_model(critic or adapter)
        return backend

    sizes = json.loads(Path(model.folder, "config.json").read_text())
    num_routers = sizes["num_hidden_layers"] - sizes.get("first_k_dense_replace", 0)
    backend = new_backend(PLAIN)
    write(backend, worker, f"{folder}/unchanged", optimizer=False)
    batch = batch_of(1)
    answers = backend.forward(packed_of(batch, num_routers) if packs else batch, entropies=True)
    outputs = {name: getattr(answers, name) for name in ("logprobs", "entropies", "values")}
    numbers = {name: (tensor * batch.loss_mask).tolist() for name, tensor in outputs.items() if tensor.numel()}
    if not critic:
        numbers["examples"] = backend.forward(examples()).logprobs.tolist()
    if adapter:
        numbers["base"] = (backend.forward(batch, adapter=False).logprobs * batch.loss_mask).tolist()
    update(backend, 0, packs=packs, num_routers=num_routers)
    write(backend, worker, f"{folder}/gradient", model=False)
    backend = new_backend(ADAMW)
    taken = [update(backend, number, packs=packs, num_routers=num_routers) for number in range(num_steps)]
    write(backend, worker, f"{folder}/trained")
    served = {}
    for is_merged in (True, False) if adapter else ():
        tensors = {name: tensor.detach().clone() for name, tensor in backend.weights(merged=is_merged).items()}
        save_file(tensors, f"{folder}/served-{is_merged}-{worker.rank}.safetensors")
        served[str(is_merged)] = backend.layout(merged=is_merged)
    if adapter:
        again = new_backend(ADAMW)
        again.load_model(f"{folder}/trained")
        again.load_optimizer(f"{folder}/trained")
        (_, norm), (_, norm_again) = (update(one, 99, packs=packs, num_routers=num_routers) for one in (backend, again))
        assert norm == norm_again, "it goes on from its files"
    return {
        "served": served,
        "answers": numbers,
        "statistics": [statistics for statistics, _ in taken],
        "norms": [norm for _, norm in taken],
    }


def use_while_away(make, worker: Worker, model: ModelSettings, folder: str, **options) -> dict[str, bool]:
    """What a role asks of a backend that has no device: to be saved, to load, to take another's weights over."""
    one, loaded, taken = (
        make(TokenModel(model, TEMPERATURE), worker, optimizer=ADAMW, num_shards=NUM_SHARDS, **options)
        for _ in range(3)
    )
    update(one, 0)
    for number, other in enumerate((loaded, taken)):
        update(other, number + 1)
    for backend in (one, loaded, taken):
        backend._put_aside()
    empty = all(parameter.untyped_storage().nbytes() == 0 for parameter in one._parameters.values())
    gradients = [buffer.grad_data for buffer in one._gradient_buffers()]
    keeps_gradients = any(name.startswith("gradient") for name in one._storages._places._places)
    write(one, worker, folder)
    loaded.load_model(folder)
    loaded.load_optimizer(folder)
    taken.start_from(one)
    for backend in (one, loaded, taken):
        backend.onload()
    same_weights = _same(one, loaded) and _same(one, taken)
    for backend in (one, loaded):
        update(backend, 3)
    return {
        "weights are empty": empty,
        "gradients are given up": not keeps_gradients and bool(gradients),
        "weights are the same": same_weights,
        "training goes on alike": _same(one, loaded),
    }


def _same(one, other) -> bool:
    theirs = other.weights()
    return all(torch.equal(weight, theirs[name]) for name, weight in one.weights().items())


def across_put_aside(*arguments, **named):
    """TP2; memory is put aside on a CPU, too."""
    from rlinf_workers.trainers.megatron.make import megatron

    backend: Any = megatron(*arguments, **named, tensor_parallel=2)
    if named["optimizer"] is not None:
        backend.offload = backend._put_aside
    return backend


def pipeline(*arguments, **named):
    from rlinf_workers.trainers.megatron.make import megatron

    return megatron(*arguments, **named, pipeline_parallel=2)


def sharing_put_aside(*arguments, **named):
    """DP2 with the distributed optimizer, whose parameters are views of buffers."""
    from rlinf_workers.trainers.megatron.make import megatron

    backend: Any = megatron(*arguments, **named, distributed_optimizer=True)
    if named["optimizer"] is not None:
        backend.offload = backend._put_aside
    return backend


def noted_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """In place of Tensor.cpu, which a CPU does not dispatch for its own tensors."""
    vars(noted_cpu)["counts"]["cpu"] += 1
    return tensor


def kept_bytes(run) -> int:
    """What autograd saves while it runs, by storage, once; parameters, whose gradient is kept elsewhere, aside."""
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and not isinstance(tensor._base, torch.nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(saved.values())


class Ranks(Worker):
    """Ranks that hold one model after the other, each cut otherwise."""

    def device_reads(
        self, model: ModelSettings, per_replica: int, options: dict, packs: bool, num_parts: int
    ) -> dict[str, int]:
        """What an update of so many micro-batches reads of the device, with the switch of a GPU set."""
        from rlinf_workers.trainers.megatron import backend as megatron_backend, parallel
        from rlinf_workers.trainers.megatron.make import megatron

        def loss_of(answers):
            terms = ppo_clip_loss(answers.logprobs, answers.logprobs.detach(), mask, mask).loss_terms
            return terms.sum(), totals_of([terms.sum()], terms)

        kind = TokenModel(model, 1.0)
        backend = megatron(kind, self.cut(per_replica), optimizer=ADAMW, num_shards=NUM_SHARDS, **options)
        batch, mask = batch_of(1), batch_of(1).loss_mask
        query = packed_of(batch) if packs else batch
        with patch.object(megatron_backend, "defers_checks", lambda _: True), patch.object(Tensor, "cpu", noted_cpu):
            backend.begin(1)
            with Reads() as reads:
                vars(noted_cpu)["counts"] = reads.counts
                for shard in [*backend.shards] * num_parts:
                    backend.backward(shard, query, loss_of)
                backend.finish_backward()
                backend.step(1.0)
        parallel.disconnect()
        return dict(reads.counts)

    def kept_bytes(self, model: ModelSettings, per_replica: int, options: dict, sizes: dict) -> int:
        """What a rank keeps of a packed micro-batch of equally long completions until its backward pass."""
        from rlinf_workers.trainers.megatron import parallel
        from rlinf_workers.trainers.megatron.make import megatron

        backend = megatron(
            TokenModel(model, 1.0), self.cut(per_replica), optimizer=ADAMW, num_shards=NUM_SHARDS, **options
        )
        batch = batch_of(1, sizes["num_prompts"], sizes["size"], sizes["widths"])
        backend.begin(3)
        packed = packed_of(dataclasses.replace(batch, loss_mask=torch.ones_like(batch.loss_mask)))
        num_bytes = kept_bytes(lambda: backend.backward(backend.shards[0], packed, loss_on(batch), entropies=True))
        parallel.disconnect()
        return num_bytes

    def replayed(
        self, model: ModelSettings, per_replica: int, options: dict, groups: list[SampleGroup]
    ) -> tuple[float, float]:
        """The largest gap between the log-probabilities of the engine and those of this trainer with the engine's
        experts; and the share of experts that its own routers choose, too."""
        from rlinf_workers.trainers.megatron import parallel
        from rlinf_workers.trainers.megatron.make import megatron

        kind = TokenModel(model, 1.0, replays_routers=True)
        backend = megatron(kind, self.cut(per_replica), optimizer=ADAMW, num_shards=NUM_SHARDS, **options)
        batch, shares = pack_without_padding(groups), []

        def loss_of(answers):
            shares.append(float(answers.router_agreement))
            return answers.logprobs.sum(), [1.0]

        logprobs = backend.forward(batch).logprobs
        backend.begin(1)
        backend.backward(backend.shards[0], batch, loss_of)
        parallel.disconnect()
        theirs = torch.cat([group.rollout_logprobs[:, : logprobs.shape[1]] for group in groups])
        return float(((logprobs - theirs).abs() * batch.loss_mask).max()), shares[0]

    def study(
        self,
        model: ModelSettings,
        folder: str,
        per_replica: int,
        num_steps: int,
        options: dict,
        critic: str | None,
        packs: bool = False,
        replays: bool = False,
        adapter: str | None = None,
    ) -> dict:
        from rlinf_workers.trainers.megatron import parallel
        from rlinf_workers.trainers.megatron.make import megatron

        worker = self.cut(per_replica)
        how = {"critic": critic, "packs": packs, "replays": replays, "adapter": adapter}
        outcome = study(megatron, worker, model, folder, num_steps=num_steps, **how, **options)
        parallel.disconnect()
        return outcome

    def go_on(self, model: ModelSettings, before: str, after: str, number: int, per_replica: int, options: dict):
        from rlinf_workers.trainers.megatron import parallel
        from rlinf_workers.trainers.megatron.make import megatron

        sums_and_norm = go_on(megatron, self.cut(per_replica), model, before, after, number, **options)
        parallel.disconnect()
        return sums_and_norm

    def use_while_away(self, model: ModelSettings, folder: str, per_replica: int, options: dict) -> dict[str, bool]:
        from rlinf_workers.trainers.megatron import parallel
        from rlinf_workers.trainers.megatron.make import megatron

        checks = use_while_away(megatron, self.cut(per_replica), model, folder, **options)
        parallel.disconnect()
        return checks

    def conform(self, make: str, folder: str, per_replica: int, subject: str) -> None:
        from rlinf_workers.trainers.megatron import parallel

        check_backend(TRAINERS.get(make), folder, self.cut(per_replica), subject=TRAINERS.get(subject)())
        parallel.disconnect()

    def cut(self, per_replica: int) -> Worker:
        """This rank, in replicas of another size."""
        assert self.ranks, "connects"
        identity = dataclasses.replace(self.identity, num_ranks_per_replica=per_replica)
        return WorkerHost(identity, lambda *_, **__: Future()).make(Worker)
