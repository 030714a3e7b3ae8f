"""The public names and their defaults: changing one is a decision, and a line in the changelog."""

import inspect

import rlinf_algos
from rlinf_algos import flow_matching


def signatures(module):
    by_name = {}
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isfunction(thing):
            by_name[name] = ", ".join(
                ("*" if p.kind is p.KEYWORD_ONLY else "") + p.name + ("" if p.default is p.empty else f"={p.default}")
                for p in inspect.signature(thing).parameters.values()
            )
    return by_name


def test_flow_matching():
    assert signatures(flow_matching) == {
        "sample_flow_chain": "predict, noise, times, *noise_level, *indices=None, *generator=None, *step_noise=None",
        "flow_chain_logprobs": "predict, states, times, *noise_level, *indices=None",
        "flow_ode_transition": "states, velocities, times, next_times",
        "flow_sde_transition": "states, velocities, times, next_times, *noise_level",
        "flow_noise_transition": "states, velocities, stds, times, next_times",
        "bounded_std": "raw, *low, *high",
        "transition_logprobs": "next_states, transition",
        "transition_entropy": "transition",
        "denoising_times": "num_steps, *device=None, *dtype=torch.float32",
        "training_times": "uniform, *concentration=1.5, *least=0.001",
        "flow_interpolation": "actions, noise, times",
        "flow_matching_loss": "velocities, target_velocities, mask=None",
        "real_time_weights": "num_actions, num_left, delay",
        "guided_velocities": "predict, target, weights, *largest_gain=5.0",
    }


def test_signatures_with_defaults():
    assert signatures(rlinf_algos) == {
        "dpo_loss": "policy_logprobs, ref_logprobs, *beta=0.1, *label_smoothing=0.0, *kind=sigmoid, *num_tokens=None",
        "bradley_terry_loss": "scores, margins=None",
        "grpo_advantages": "rewards, group_ids=None, mask=None, *normalize_std=True, *epsilon=0.0001",
        "rloo_advantages": "rewards",
        "opo_advantages": "rewards, lengths",
        "pass_at_k_advantages": "rewards, *normalize_std=True, *epsilon=0.0001",
        "optimal_token_advantages": "rewards, loss_mask, logit_norms",
        "gdpo_advantages": "parts, part_weights, *epsilon=0.0001",
        "gae": "rewards, values, next_values, terminated, truncated, gamma, lam, *bootstrap_at_termination=False, "
        "*bootstrap_at_truncation=True",
        "token_gae": "rewards, values, loss_mask, gamma, lam",
        "rewards_to_go": "rewards, mask, gamma, *dim=1",
        "first_episode_mask": "terminated, truncated",
        "step_group_advantages": "rewards, terminated, truncated, gamma, *normalize_std=True, *epsilon=0.0001",
        "turn_return_advantages": "rewards, terminated, truncated, gamma, *normalize_std=True, *epsilon=0.0001",
        "gigpo_advantages": (
            "rewards, terminated, truncated, state_ids, gamma, *step_weight=1.0, *normalize_std=True, *epsilon=0.0001"
        ),
        "ppo_clip_loss": (
            "policy_logprobs, proximal_logprobs, advantages, loss_mask, *clip_low=0.2, *clip_high=0.2, *dual_clip=None"
        ),
        "check_inputs": "policy_logprobs, proximal_logprobs, advantages, loss_mask",
        "measured_loss": "terms, inputs, *is_clipped=None",
        "dppo_tv_loss": (
            "policy_logprobs, proximal_logprobs, advantages, loss_mask, *clip_low=0.15, *clip_high=0.15, "
            "*ratio_cap=20.0"
        ),
        "dppo_kl_loss": (
            "policy_logprobs, proximal_logprobs, advantages, loss_mask, *clip_low=0.05, *clip_high=0.05, "
            "*ratio_cap=20.0"
        ),
        "sequence_clip_loss": (
            "policy_logprobs, proximal_logprobs, advantages, loss_mask, *clip_low=0.2, *clip_high=0.2"
        ),
        "gspo_loss": (
            "policy_logprobs, proximal_logprobs, advantages, loss_mask, *clip_low=0.0003, *clip_high=0.0004, "
            "*dual_clip=None"
        ),
        "gmpo_loss": "policy_logprobs, proximal_logprobs, advantages, loss_mask, *clip_low=0.4, *clip_high=0.4",
        "clip_cov_loss": (
            "policy_logprobs, proximal_logprobs, advantages, loss_mask, *clip_low=0.2, *clip_high=0.2, "
            "*cov_fraction=0.0002, *cov_low=1.0, *cov_high=5.0, *chosen=None"
        ),
        "kl_cov_loss": (
            "policy_logprobs, proximal_logprobs, advantages, loss_mask, *cov_fraction=0.0002, *cov_kl_coef=1.0, "
            "*chosen=None"
        ),
        "cispo_loss": "policy_logprobs, proximal_logprobs, advantages, loss_mask, *clip_low=1.0, *clip_high=4.0",
        "decoupled_ppo_loss": (
            "policy_logprobs, proximal_logprobs, advantages, loss_mask, *rollout_logprobs, *clip_low=0.2, "
            "*clip_high=0.2, *dual_clip=None, *weight_cap=5.0"
        ),
        "policy_gradient_loss": "policy_logprobs, proximal_logprobs, advantages, loss_mask",
        "sapo_loss": "policy_logprobs, proximal_logprobs, advantages, loss_mask, *tau_positive=1.0, *tau_negative=1.05",
        "at_level": "level, policy_logprobs, proximal_logprobs, advantages, loss_mask=None",
        "logprobs_at_level": "level, logprobs, loss_mask=None",
        "entropy_bonus": "entropies, mask=None, *coef",
        "adapted_entropy_coef": "entropy_coef, measured_entropy, *target, *step=0.005, *most=1.0",
        "router_balance_loss": "router_logits, *top_k, *mask=None",
        "clipped_value_loss": "values, old_values, returns, mask, *clip=0.2",
        "huber_value_loss": "values, old_values, returns, mask, *delta=10.0, *clip=None",
        "truncated_importance_sampling": "proximal_logprobs, rollout_logprobs, loss_mask, *level=token, *cap=2.0",
        "masked_importance_sampling": (
            "proximal_logprobs, rollout_logprobs, loss_mask, *level=token, *low=0.0, *high=2.0, *weigh=True"
        ),
        "icepop": "proximal_logprobs, rollout_logprobs, loss_mask, *low=0.5, *high=5.0",
        "off_policy_sequence_mask": "policy_logprobs, rollout_logprobs, advantages, loss_mask, *threshold",
        "reject_by_divergence": "proximal_logprobs, rollout_logprobs, loss_mask, *statistic, *limit",
        "has_signal": "rewards",
        "overlong_penalty": "lengths, *max_tokens, *buffer_tokens, *penalty=1.0",
        "overlong_filter": "loss_mask, truncated",
        "kl_k1": "policy_logprobs, ref_logprobs, mask=None",
        "kl_k2": "policy_logprobs, ref_logprobs, mask=None",
        "kl_k3": "policy_logprobs, ref_logprobs, mask=None, *clamp=None",
        "kl_abs": "policy_logprobs, ref_logprobs, mask=None",
        "kl_k1_plus": "policy_logprobs, ref_logprobs, mask=None",
        "kl_k3_plus": "policy_logprobs, ref_logprobs, mask=None, *clamp=None",
        "mixed_reference": "reference, policy, weight",
        "ratio_weighted_kl": "kl, policy_logprobs, proximal_logprobs, mask=None",
        "rewards_at_last_token": "scores, loss_mask",
        "adapted_kl_coef": "kl_coef, measured_kl, *target_kl, *num_samples, *horizon",
        "token_mean": "terms, mask, total_tokens",
        "token_sum": "terms, mask",
        "sequence_mean_token_mean": "terms, mask, total_sequences",
        "sequence_mean_token_sum": "terms, mask, total_sequences",
        "constant_length_mean": "terms, mask, total_sequences, max_completion_tokens",
        "token_logprobs": "logits, token_ids, temperature=1.0, *loss_mask=None",
        "entropy_of_logits": "logits, temperature=1.0, *loss_mask=None",
        "logit_norms": "logits, token_ids, temperature=1.0, *loss_mask=None",
        "logprobs_and_entropy": "logits, token_ids, temperature=1.0, *loss_mask=None",
        "head_logprobs": (
            "hidden, weight, token_ids, temperature=1.0, *bias=None, *softcap=None, *loss_mask=None, *kept_bytes=0"
        ),
        "head_logprobs_and_entropy": (
            "hidden, weight, token_ids, temperature=1.0, *bias=None, *softcap=None, *loss_mask=None, *kept_bytes=0"
        ),
        "gaussian_log_prob": "actions, mean, log_std",
        "gaussian_entropy": "mean, log_std",
        "preset": "name, changes",
        "register_advantage": "name",
        "register_policy_loss": "name",
        "make_reward": "spec",
        "register_reward": "name",
        "reward_names": "",
        "get_reward": "name",
        "score": "reward, completion, reference",
        "score_all": "reward, completions, references, prompts=None, rows=None",
        "avg_at_k": "is_right",
        "pass_at_k": "num_right, num_samples, k",
        "maj_at_k": "answers, is_right, k",
        "mean_over_problems": "scores",
        "check_finite": "name, tensor, mask=None",
        "advantage_takes": "name",
        "aggregated_sum": "aggregation, terms, mask",
        "aggregation_divisor": "aggregation, mask, *max_completion_tokens",
        "choose_largest": "parts, num_chosen, sum_over_parts",
        "did_you_mean": "name, names",
        "filled": "name, changes, *engine_differs=False",
        "path_of": "function",
        "policy_loss_takes": "name",
        "sequence_hash": "ids",
        "kept_logprobs_and_entropy": "logits, token_ids, kept_ids, num_kept, temperature=1.0",
        "kept_head_logprobs_and_entropy": (
            "hidden, weight, token_ids, kept_ids, num_kept, temperature=1.0, *bias=None, *softcap=None"
        ),
        "squashed_sample": "mean, log_std, noise",
        "soft_targets": "rewards, terminated, next_values, next_logprobs, *temperature, *gamma, *backup_entropy=True",
        "critic_loss": "values, targets",
        "soft_policy_loss": "logprobs, values, *temperature, *policy_value=min",
        "policy_values": "values, policy_value=min",
        "temperature_loss": "log_temperature, logprobs, *target_entropy",
        "follow_": "targets, sources, *rate",
        "random_shift": "pictures, offsets, *pad=4",
        "off_policy_preset": "name, changes",
        "filled_off_policy": "name, changes",
    }
