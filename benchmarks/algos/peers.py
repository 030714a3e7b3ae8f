"""Advantages, losses, estimates of the KL and masks against the functions of verl and TRL themselves, in float64.

    python -m benchmarks.algos.peers [--output FILE]

Both have to be importable, unmodified, in the interpreter that runs this: a folder made by `pip install --no-deps
--target FOLDER verl==0.9.1 trl==1.16.0`, with what they import, on PYTHONPATH is enough. TRL's losses live inside its
trainer: its method is called with a stand-in that gives it the log-probabilities.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from benchmarks.harness import report
from torch import Tensor

import rlinf_algos as ours
from rlinf_algos.presets import REJECTIONS

B, G, T, K = 32, 4, 24, 3
PLAIN: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Random samples: B completions in groups of G, of 1 to T tokens."""

    policy: Tensor
    proximal: Tensor
    rollout: Tensor
    ref: Tensor
    mask: Tensor
    """[B, T]"""
    advantages: Tensor
    """[B]"""
    rewards: Tensor
    """[B / G, G]"""
    parts: Tensor
    """[B / G, G, K]"""
    gaps: Tensor
    """[B, T], a mask with gaps in it, as tools leave them."""
    logits: Tensor
    """[B, T, 5]"""
    entropies: Tensor
    """[B, T]"""

    @staticmethod
    def draw(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        policy = np.minimum(rng.normal(-2.0, 1.0, (B, T)), -0.01)
        near = [torch.tensor(np.minimum(policy + rng.normal(0.0, 0.3, (B, T)), -1e-3)) for _ in range(3)]
        mask = np.arange(T) < rng.integers(1, T + 1, (B, 1))
        return Batch(
            policy=torch.tensor(policy, requires_grad=True),
            proximal=near[0],
            rollout=near[1],
            ref=near[2],
            mask=torch.tensor(mask),
            advantages=torch.tensor(rng.normal(size=B)),
            rewards=torch.tensor(rng.integers(0, 3, (B // G, G)) / 2),
            parts=torch.tensor(rng.integers(0, 3, (B // G, G, K)) * np.array([1.0, 0.1, 5.0])),
            gaps=torch.tensor(mask & (rng.random((B, T)) < 0.8)),
            logits=torch.tensor(rng.normal(0.0, 2.0, (B, T, 5))),
            entropies=torch.tensor(rng.uniform(0.0, 3.0, (B, T))).float().double(),  # TRL ranks them in float32
        )

    @property
    def by_token(self) -> Tensor:
        return self.advantages[:, None].expand(B, T)

    @property
    def groups(self) -> np.ndarray:
        return np.repeat(np.arange(B // G), G)

    @property
    def last_token_rewards(self) -> Tensor:
        return ours.rewards_at_last_token(self.rewards.flatten(), self.mask)


Case = Callable[[Batch], tuple[Tensor, Tensor]]
"""Ours and theirs; where it is a scalar with a gradient, gradients are compared too."""


# -- verl --------------------------------------------------------------------------------------------------------------


def verl_cases() -> Iterator[tuple[str, Case]]:
    from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
    from verl.workers.config import ActorConfig, PolicyLossConfig  # pyright: ignore[reportMissingImports]

    def loss(name: str, our: Callable[..., Any], options: dict[str, Any], aggregation: str, **config: Any) -> Case:
        actor_config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio=0.2,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=3.0,
            policy_loss=PolicyLossConfig(loss_mode=name, **config),
        )

        def compare(batch: Batch) -> tuple[Tensor, Tensor]:
            terms = our(batch.policy, batch.proximal, batch.by_token, batch.mask, **options).loss_terms
            our_loss = aggregated(terms, batch.mask, aggregation)
            theirs, _ = core_algos.get_policy_loss_fn(name)(
                old_log_prob=batch.proximal,
                log_prob=batch.policy,
                advantages=batch.by_token,
                response_mask=batch.mask.double(),
                loss_agg_mode=aggregation,
                config=actor_config,
            )
            return our_loss, theirs

        return compare

    covariance = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.5, "clip_cov_ub": 5.0}
    yield "ppo_clip, dual clip", loss("vanilla", ours.ppo_clip_loss, {**PLAIN, "dual_clip": 3.0}, "token-mean")
    yield "gspo", loss("gspo", ours.gspo_loss, PLAIN, "seq-mean-token-mean")
    yield "gmpo", loss("geo_mean", ours.gmpo_loss, PLAIN, "seq-mean-token-mean")
    yield "cispo", loss("cispo", ours.cispo_loss, PLAIN, "token-mean")
    sapo = {"tau_positive": 1.0, "tau_negative": 1.05}
    yield "sapo", loss("sapo", ours.sapo_loss, sapo, "seq-mean-token-mean")
    every = {**PLAIN, "cov_fraction": 1.0, "cov_low": 0.5, "cov_high": 5.0}
    yield "clip_cov, all candidates", loss("clip_cov", ours.clip_cov_loss, every, "token-mean", **covariance)
    penalty = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}
    options = {"cov_fraction": 0.1, "cov_kl_coef": 0.7}
    yield "kl_cov", loss("kl_cov", ours.kl_cov_loss, options, "token-mean", **penalty)
    for name, our in (("dppo_tv", ours.dppo_tv_loss), ("dppo_kl", ours.dppo_kl_loss)):
        yield name, loss(name, our, {"clip_low": 0.2, "clip_high": 0.28, "ratio_cap": 3.0}, "token-mean")
    for name in AGGREGATIONS:

        def aggregate(batch: Batch, name: str = name) -> tuple[Tensor, Tensor]:
            more = {"loss_scale_factor": T} if name.endswith("norm") else {}
            theirs = core_algos.agg_loss(batch.policy, batch.mask.double(), name, **more)
            return aggregated(batch.policy, batch.mask, name), theirs

        yield name, aggregate
    for name, our in (("k1", ours.kl_k1), ("k2", ours.kl_k2), ("abs", ours.kl_abs), ("k3+", ours.kl_k3_plus)):
        yield (
            name,
            lambda b, name=name, our=our: (
                our(b.policy, b.ref).sum(),
                core_algos.kl_penalty(b.policy, b.ref, name).sum(),
            ),
        )
    yield (
        "k3 with clamp 10",
        lambda b: (
            ours.kl_k3(4 * b.policy, b.ref, clamp=10.0).sum(),
            core_algos.kl_penalty(4 * b.policy, b.ref, "k3").sum(),
        ),
    )
    yield from verl_advantages(core_algos)
    yield from verl_corrections(core_algos, loss)


def verl_advantages(core_algos: Any) -> Iterator[tuple[str, Case]]:
    def groups(our: Callable[[Batch], Tensor], name: str, **more: Any) -> Case:
        def compare(batch: Batch) -> tuple[Tensor, Tensor]:
            theirs, _ = core_algos.get_adv_estimator_fn(name)(
                token_level_rewards=batch.last_token_rewards,
                response_mask=batch.mask.double(),
                index=batch.groups,
                **more,
            )
            return our(batch).flatten()[:, None] * batch.mask, theirs

        return compare

    yield "grpo", groups(lambda b: ours.grpo_advantages(b.rewards, epsilon=1e-6), "grpo")
    config = {"norm_adv_by_std_in_grpo": True}
    yield (
        "grpo_passk",
        groups(lambda b: ours.pass_at_k_advantages(b.rewards, epsilon=1e-6), "grpo_passk", config=config),
    )
    yield "rloo", groups(lambda b: ours.rloo_advantages(b.rewards), "rloo")
    yield "opo", groups(lambda b: ours.opo_advantages(b.rewards, b.mask.sum(1).view(-1, G)), "opo")

    def gdpo(batch: Batch) -> tuple[Tensor, Tensor]:
        """verl reads the parts from its batch, and puts them at the last token of the response."""
        weights = [0.75, 0.25, 1.0]
        theirs, _ = core_algos.compute_gdpo_outcome_advantage(
            token_level_rewards=batch.last_token_rewards,
            response_mask=batch.mask.double(),
            index=batch.groups,
            config={"gdpo_reward_keys": ["a", "b", "c"], "gdpo_reward_weights": weights},
            non_tensor_batch={key: batch.parts.view(B, K)[:, k].numpy() for k, key in enumerate("abc")},
            batch={"prompts": torch.zeros(B, 1), "attention_mask": torch.cat([torch.ones(B, 1), batch.mask], 1).long()},
        )
        sums = ours.gdpo_advantages(batch.parts, torch.tensor(weights).double(), epsilon=1e-6)
        by_token = sums.flatten()[:, None].expand(B, T)
        moments = ours.Moments.of_parts([by_token[batch.mask]], lambda rows: rows.sum(0))
        return moments.whiten(by_token, batch.mask), theirs

    yield "gdpo, whitened", gdpo
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):

        def optimal(batch: Batch, name: str = name) -> tuple[Tensor, Tensor]:
            """Where a group's rewards differ: without, verl leaves the tail of its longest completion its reward."""
            mask = batch.gaps if name.startswith("tir") else batch.mask
            rewards = ours.rewards_at_last_token(batch.rewards.flatten(), mask)
            logits = batch.logits.log_softmax(-1)
            norms = ours.logit_norms(logits, torch.zeros(B, T).long(), loss_mask=mask)
            theirs, _ = core_algos.get_adv_estimator_fn(name)(
                token_level_rewards=rewards,
                response_mask=mask.double(),
                index=batch.groups,
                old_log_probs=logits[..., 0],
                sum_pi_squared=logits.exp().square().sum(-1),
            )
            rows = [slice(p * G, (p + 1) * G) for p in range(B // G)]
            advantages = [ours.optimal_token_advantages(rewards[row], mask[row], norms[row]) for row in rows]
            differs = [bool((batch.rewards[p] != batch.rewards[p, 0]).any()) for p in range(B // G)]
            return torch.cat(advantages), theirs * torch.tensor(differs).repeat_interleave(G)[:, None]

        yield name, optimal


def verl_corrections(core_algos: Any, loss: Callable[..., Case]) -> Iterator[tuple[str, Case]]:
    """Weights and rejections, alone and together, and its losses that are anchored at the engine."""
    from verl.trainer.ppo import rollout_corr_helper as helper  # pyright: ignore[reportMissingImports]

    limits = {"k1": 0.4, "k2": 0.05, "k3": 0.05}

    def reject(batch: Batch, statistic: str, actor: Tensor) -> ours.Correction:
        limit = limits[statistic[-2:]] * (4 if "sum" in statistic else 0.5 if "mean" in statistic else 1)
        return ours.reject_by_divergence(actor, batch.rollout, batch.mask, statistic=statistic, limit=limit)

    def verl_options(statistic: str) -> dict[str, Any]:
        limit = limits[statistic[-2:]] * (4 if "sum" in statistic else 0.5 if "mean" in statistic else 1)
        threshold = str(float(np.exp(limit))) if statistic.endswith("k1") else str(limit)
        return {"rollout_rs": statistic.replace("sequence", "seq"), "rollout_rs_threshold": threshold}

    for statistic in REJECTIONS:

        def rejected(batch: Batch, statistic: str = statistic) -> tuple[Tensor, Tensor]:
            mask, _ = helper.compute_rollout_rejection_mask(
                batch.proximal - batch.rollout, batch.mask.double(), **verl_options(statistic)
            )
            return reject(batch, statistic, batch.proximal).weights, mask

        yield f"rejection by {statistic}", rejected

    def together(batch: Batch) -> tuple[Tensor, Tensor]:
        weights, mask, _ = helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=batch.proximal,
            rollout_log_prob=batch.rollout,
            response_mask=batch.mask.double(),
            rollout_is="token",
            rollout_is_threshold=1.2,
            **verl_options("sequence_sum_k1"),
        )
        assert weights is not None
        truncated = ours.truncated_importance_sampling(batch.proximal, batch.rollout, batch.mask, cap=1.2)
        rejected = reject(batch, "sequence_sum_k1", batch.proximal)
        return truncated.weights * rejected.weights, weights.batch["rollout_is_weights"] * mask

    yield "token truncation and sequence rejection together", together
    for kind in ("ppo_clip", "reinforce"):
        yield f"bypass_mode, {kind}", bypassed(core_algos, kind, verl_options("token_k3"), reject)


def bypassed(core_algos: Any, kind: str, rejection: dict[str, Any], reject: Callable[..., Any]) -> Case:
    """`proximal_policy: rollout`: PPO's clip with a rejection, REINFORCE with truncated weights too. What is rejected
    is no part of verl's divisor and is of ours, so sums are compared."""

    def compare(batch: Batch) -> tuple[Tensor, Tensor]:
        config = MagicMock()
        config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high = 0.2, 0.2, 0.28
        config.get = lambda key, default=None: {"clip_ratio_c": 1e9}.get(key, default)
        config.global_batch_info = {}
        is_options = {"rollout_is": "token", "rollout_is_threshold": 1.2} if kind == "reinforce" else {}
        config.policy_loss = {"rollout_correction": {"loss_type": kind, **is_options, **rejection}}
        theirs, _ = core_algos.get_policy_loss_fn("bypass_mode")(
            old_log_prob=batch.rollout,
            log_prob=batch.policy,
            advantages=batch.by_token,
            response_mask=batch.mask.double(),
            loss_agg_mode="token-sum",
            config=config,
        )
        actor = batch.policy.detach()
        if kind == "ppo_clip":
            terms = ours.ppo_clip_loss(batch.policy, batch.rollout, batch.by_token, batch.mask, **PLAIN).loss_terms
        else:
            terms = ours.policy_gradient_loss(batch.policy, batch.rollout, batch.by_token, batch.mask).loss_terms
            terms = terms * ours.truncated_importance_sampling(actor, batch.rollout, batch.mask, cap=1.2).weights
        return ours.token_sum(terms * reject(batch, "token_k3", actor).weights, batch.mask), theirs

    return compare


AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def aggregated(terms: Tensor, mask: Tensor, name: str) -> Tensor:
    """The terms aggregated by our function that corresponds to verl's name."""
    if name == "token-mean":
        return ours.token_mean(terms, mask, int(mask.sum()))
    if name == "token-sum":
        return ours.token_sum(terms, mask)
    if name == "seq-mean-token-mean":
        return ours.sequence_mean_token_mean(terms, mask, B)
    if name == "seq-mean-token-sum":
        return ours.sequence_mean_token_sum(terms, mask, B)
    return ours.constant_length_mean(terms, mask, B, T)


# -- TRL ---------------------------------------------------------------------------------------------------------------


def trl_cases() -> Iterator[tuple[str, Case]]:
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    def loss(loss_type: str, our: Callable[[Batch], Tensor], **changes: Any) -> Case:
        def compare(batch: Batch) -> tuple[Tensor, Tensor]:
            trainer = stand_in(GRPOTrainer, batch, loss_type, changes)
            inputs = {
                "prompt_ids": torch.zeros(B, 1).long(),
                "prompt_mask": torch.ones(B, 1).long(),
                "completion_ids": torch.zeros(B, T).long(),
                "completion_mask": batch.mask.long(),
                "advantages": batch.advantages,
                "old_per_token_logps": batch.proximal,
                "sampling_per_token_logps": batch.rollout,
                "ref_per_token_logps": batch.ref,
                "num_items_in_batch": batch.mask.sum(),
            }
            return our(batch), GRPOTrainer._compute_loss(trainer, trainer.model, inputs)

        return compare

    def clipped(batch: Batch, aggregation: str, terms_of: Callable[..., Tensor] = lambda terms, _: terms) -> Tensor:
        loss = ours.ppo_clip_loss(batch.policy, batch.proximal, batch.advantages, batch.mask, **PLAIN)
        return aggregated(terms_of(loss.loss_terms, batch), batch.mask, aggregation)

    def with_kl(terms: Tensor, batch: Batch) -> Tensor:
        return terms + 0.1 * ours.kl_k3(batch.policy, batch.ref, batch.mask)

    def on_policy(terms: Tensor, batch: Batch) -> Tensor:
        return terms * ours.off_policy_sequence_mask(
            batch.policy, batch.rollout, batch.advantages, batch.mask, threshold=0.02
        )

    def with_corrected_kl(terms: Tensor, batch: Batch) -> Tensor:
        kl = ours.kl_k3(batch.policy, batch.ref, batch.mask)
        return terms + 0.1 * ours.ratio_weighted_kl(kl, batch.policy, batch.proximal, batch.mask)

    def uncertain(terms: Tensor, batch: Batch) -> Tensor:
        entropies = batch.entropies[batch.mask]
        (largest,) = ours.choose_largest([entropies], math.ceil(0.2 * len(entropies)), lambda rows: rows.sum(0))
        return terms * torch.zeros_like(batch.mask).masked_scatter(batch.mask, largest)

    yield (
        "dapo with a KL whose bias is corrected",
        loss("dapo", lambda b: clipped(b, "token-mean", with_corrected_kl), beta=0.1, use_bias_correction_kl=True),
    )
    yield (
        "tokens of the highest entropies",
        loss("dapo", lambda b: clipped(b, "token-mean", uncertain), top_entropy_quantile=0.2),
    )
    yield "dapo", loss("dapo", lambda b: clipped(b, "token-mean"))
    yield "grpo", loss("grpo", lambda b: clipped(b, "seq-mean-token-mean"))
    yield "dr_grpo", loss("dr_grpo", lambda b: clipped(b, "seq-mean-token-sum-norm"))
    yield "dapo with KL", loss("dapo", lambda b: clipped(b, "token-mean", with_kl), beta=0.1)
    yield "off-policy mask", loss("dapo", lambda b: clipped(b, "token-mean", on_policy), off_policy_mask_threshold=0.02)
    yield (
        "gspo",
        loss(
            "grpo",
            lambda b: aggregated(
                ours.gspo_loss(b.policy, b.proximal, b.advantages, b.mask, **PLAIN).loss_terms,
                b.mask,
                "seq-mean-token-mean",
            ),
            importance_sampling_level="sequence",
        ),
    )
    yield (
        "dual clip (delta)",
        loss(
            "dapo",
            lambda b: aggregated(
                ours.ppo_clip_loss(b.policy, b.proximal, b.advantages, b.mask, **PLAIN, dual_clip=1.5).loss_terms,
                b.mask,
                "token-mean",
            ),
            delta=1.5,
        ),
    )
    yield (
        "sapo",
        loss(
            "sapo",
            lambda b: aggregated(
                ours.sapo_loss(b.policy, b.proximal, b.advantages, b.mask).loss_terms, b.mask, "seq-mean-token-mean"
            ),
        ),
    )


def trl_rloo_cases() -> Iterator[tuple[str, Case]]:
    from trl.trainer.rloo_trainer import RLOOTrainer  # pyright: ignore[reportMissingImports]

    def compare(batch: Batch) -> tuple[Tensor, Tensor]:
        trainer = stand_in(RLOOTrainer, batch, "rloo", {})
        proximal = batch.policy.detach() + (batch.proximal - batch.policy.detach()) / 8
        inputs = {
            "prompt_ids": torch.zeros(B, 1).long(),
            "prompt_mask": torch.ones(B, 1).long(),
            "completion_ids": torch.zeros(B, T).long(),
            "completion_mask": batch.mask.long(),
            "advantages": batch.advantages,
            "old_logps": (proximal * batch.mask).sum(1),
        }
        loss = ours.sequence_clip_loss(batch.policy, proximal, batch.advantages, batch.mask, **PLAIN)
        our_loss = aggregated(loss.loss_terms, batch.mask, "seq-mean-token-mean")
        return our_loss, RLOOTrainer._compute_loss(trainer, trainer.model, inputs)

    yield "rloo, clipped", compare


def trl_controller_cases() -> Iterator[tuple[str, Case]]:
    from trl.trainer.callbacks import SyncRefModelCallback  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    def entropy(batch: Batch) -> tuple[Tensor, Tensor]:
        """The weights of 12 steps, and whether they apply; the entropy wanders about its target."""
        trainer = stand_in(GRPOTrainer, batch, "dapo", {"use_adaptive_entropy": True, "entropy_coef": 0.01})
        trainer._entropy_bonus_enabled, trainer._entropy_window_stats = True, None
        trainer._last_world_entropy, trainer.accelerator.sync_gradients = float("inf"), True
        trainer.args.entropy_target, trainer.args.entropy_coef_delta = 1.5, 0.02
        trainer.args.entropy_coef_min, trainer.args.entropy_coef_max = 0.0, 1.0
        coef, weights, theirs = 0.01, [], []
        for step in range(12):
            entropies = batch.entropies + 0.4 * np.sin(step)
            trainer._get_per_token_logps_and_entropies = lambda *_, e=entropies, **__: (batch.policy, e, None)
            inputs = {
                "prompt_ids": torch.zeros(B, 1).long(),
                "prompt_mask": torch.ones(B, 1).long(),
                "completion_ids": torch.zeros(B, T).long(),
                "completion_mask": batch.mask.long(),
                "advantages": batch.advantages,
                "old_per_token_logps": batch.proximal,
                "num_items_in_batch": batch.mask.sum(),
            }
            GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
            theirs.append(trainer.entropy_coef)
            measured = float(entropies[batch.mask].mean())
            coef = ours.adapted_entropy_coef(coef, measured, target=1.5, step=0.02)
            weights.append(coef)
        return torch.tensor(weights), torch.tensor(theirs)

    def reference(batch: Batch) -> tuple[Tensor, Tensor]:
        """A model's tensors after its second change; a tensor of the batch stands for them."""
        policy, theirs, ref = batch.proximal, torch.nn.Linear(T, B, bias=False).double(), batch.ref
        theirs.weight.data = batch.ref.clone()
        for _ in range(2):
            trained = torch.nn.Linear(T, B, bias=False).double()
            trained.weight.data = policy
            SyncRefModelCallback._sync_target_model(trained, theirs, 0.6)
            ref, policy = ours.mixed_reference(ref, policy, 0.6), batch.rollout
        return ref, theirs.weight.data

    yield "reference that follows the policy", reference
    yield "adapted entropy_coef over 12 steps", entropy


def stand_in(trainer_class: Any, batch: Batch, loss_type: str, changes: dict[str, Any]) -> Any:
    """What the trainer's method reads of itself."""
    trainer = MagicMock()
    trainer.args = SimpleNamespace(
        delta=changes.get("delta"),
        use_bias_correction_kl=changes.get("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
    )
    fields = {
        "loss_type": loss_type,
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "max_completion_length": T,
        "current_gradient_accumulation_steps": 1,
        "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
    }
    for name, value in {**fields, **changes}.items():
        setattr(trainer, name, value)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.policy, batch.entropies, None)
    trainer._entropy_bonus_enabled = False
    trainer.get_high_entropy_mask = lambda *inputs: trainer_class.get_high_entropy_mask(trainer, *inputs)
    trainer.accelerator.pad_across_processes = lambda tensor, **_: tensor
    trainer.get_off_policy_mask = getattr(trainer_class, "get_off_policy_mask", None)
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather = trainer.accelerator.reduce = lambda tensor, *_, **__: tensor
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.model.training = True
    return trainer


# -- both --------------------------------------------------------------------------------------------------------------


def differences(case: Case, num_seeds: int) -> dict[str, float]:
    """Largest difference of values, and of gradients for the log-probabilities, over the largest number compared."""
    worst = {"value": 0.0}
    for seed in range(num_seeds):
        batch = Batch.draw(seed)
        own, theirs = case(batch)
        worst["value"] = max(worst["value"], relative(own, theirs))
        if own.ndim == 0 and theirs.requires_grad:
            one, other = (torch.autograd.grad(x, batch.policy, retain_graph=True)[0] for x in (own, theirs))
            worst["gradient"] = max(worst.get("gradient", 0.0), relative(one, other))
    return worst


def relative(own: Tensor, theirs: Tensor) -> float:
    own, theirs = own.detach().double(), theirs.detach().double()
    return float((own - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/results/algos-peers.json)")
    parser.add_argument("--seeds", type=int, default=20, help="batches for each case")
    arguments = parser.parse_args()
    versions = {peer: importlib.metadata.version(peer) for peer in ("verl", "trl")}
    cases = []
    peers = (("verl", verl_cases()), ("trl", trl_cases()), ("trl", trl_rloo_cases()), ("trl", trl_controller_cases()))
    for peer, peer_cases in peers:
        for name, case in peer_cases:
            cases.append({"peer": peer, "case": name, **differences(case, arguments.seeds)})
            print(cases[-1], flush=True)
    report(
        "algos-peers",
        settings={"peers": versions, "num_batches": arguments.seeds, "completions": B, "group_size": G, "tokens": T},
        samples_s={},
        comparisons=(),
        findings={"cases": cases},
        output=arguments.output,
    )


if __name__ == "__main__":
    main()
