"""Which page of the docs explains a config key."""

from __future__ import annotations

PAGES = {
    "": "start.md",
    "task": "data.md",
    "benchmarks": "evaluation.md",
    "evaluation": "evaluation.md",
    "model": "models.md",
    "sft_warm_up": "start.md",
    "algorithm.max_staleness": "staleness.md",
    "rollout.sampler": "staleness.md#groups-that-outlive-a-step",
    "algorithm": "algorithms.md",
    "algorithm.advantage": "algorithms/custom.md",
    "algorithm.policy_loss": "algorithms/custom.md",
    "algorithm.options": "algorithms/custom.md",
    "algorithm.correction": "trust.md",
    "algorithm.rejection": "trust.md",
    "rollout.engine": "sglang.md",
    "rollout.engine_options.cuda_graphs": "plugins/engine.md",
    "rollout.engine_options.refill": "plugins/engine.md#continuous-batching",
    "rollout.engine_options.cache_share": "plugins/engine.md#continuous-batching",
    "rollout.quantization": "quantization.md",
    "rollout.on_new_weights": "plugins/engine.md#new-weights-while-completions-run",
    "rollout.stop_on_mismatch": "trust.md",
    "rollout": "batches.md",
    "reward": "rewards.md",
    "actor": "backends.md",
    "actor.micro_batch_groups": "batches.md",
    "actor.max_tokens_per_micro_batch": "batches.md",
    "actor.balance_shards": "batches.md",
    "actor.router_replay": "trust.md#router-replay",
    "actor.num_shards": "batches.md",
    "actor.group_order": "batches.md",
    "reference": "algorithms/parts.md",
    "critic": "algorithms/ppo.md",
    "cluster": "clusters.md",
    "cluster.weight_sync": "plugins/weight_sync.md",
    "cluster.attest_weights": "trust.md",
    "cluster.pass_env_vars": "security.md",
    "plan": "scheduling.md",
    "mode": "scheduling.md",
    "venvs": "venvs.md",
    "run": "start.md#stop-and-resume",
    "run.checkpoint_every": "checkpoints.md",
    "run.keep_checkpoints": "checkpoints.md",
    "run.step_timeout_s": "explain.md",
    "run.loggers": "loggers.md",
    "run.num_samples_logged": "metrics.md",
    "run.profile_steps": "profiles.md",
    "env": "environments.md",
    "env.num_eval_videos": "playing.md",
    "env.episodes_per_step": "environments.md#more-episodes-than-environments",
    "env.episodes_megabytes": "replay.md#any-training-episode",
    "policy": "plugins/policy.md#shipped-policies",
    "demonstrations": "demonstrations.md",
    "success_classifier": "success-classifiers.md",
    "checkpoint": "playing.md",
    "suite": "playing.md",
    "actor.batch_size": "sft.md",
    "actor.micro_batch_examples": "sft.md",
    "run.num_epochs": "sft.md",
    "task.loss_on": "sft.md",
    "task.max_tokens": "sft.md",
    "task.long_examples": "sft.md",
    "dpo": "dpo.md",
    "variants": "playing.md",
}
"""Key or section -> the page below docs/ that explains it; the longest match counts."""


def page_of(key: str) -> str:
    """Returns the page below docs/ that explains a dotted key."""
    parts = key.split(".")
    prefixes = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
    starts = [start for start in PAGES if start and "." in start and key.startswith(start)]
    return PAGES[max(starts, key=len)] if starts else next(PAGES[one] for one in prefixes if one in PAGES)
