"""The public names and their defaults: changing one is a decision, and a line in the changelog."""

import inspect

import rlinf_algos


def test_signatures_with_defaults():
    found = {}
    for name in rlinf_algos.__all__:
        thing = getattr(rlinf_algos, name)
        if inspect.isfunction(thing):
            found[name] = ", ".join(
                ("*" if p.kind is p.KEYWORD_ONLY else "") + p.name + ("" if p.default is p.empty else f"={p.default}")
                for p in inspect.signature(thing).parameters.values()
            )
    assert found == {
        "grpo_advantages": "rewards, *normalize_std=True, *epsilon=0.0001",
        "gae": "rewards, values, next_values, terminated, truncated, gamma, lam, *bootstrap_at_termination=False",
        "token_gae": "rewards, values, loss_mask, gamma, lam",
        "masked_mean": "values, mask=None",
        "masked_whiten": "values, mask=None, *epsilon=1e-08",
        "normalize_advantages": "advantages, mask=None, *epsilon=1e-08",
        "explained_variance": "values, returns, mask=None",
        "ppo_clip_loss": (
            "policy_logprobs, proximal_logprobs, advantages, loss_mask, *clip_low=0.2, *clip_high=0.2, *dual_clip=None"
        ),
        "clipped_value_loss": "values, old_values, returns, mask, *clip=0.2",
        "kl_k1": "policy_logprobs, ref_logprobs, mask=None",
        "kl_k2": "policy_logprobs, ref_logprobs, mask=None",
        "kl_k3": "policy_logprobs, ref_logprobs, mask=None",
        "token_mean": "terms, mask, total_tokens",
        "sequence_mean_token_mean": "terms, mask, total_sequences",
        "sequence_mean_token_sum": "terms, mask, total_sequences",
        "constant_length_mean": "terms, mask, total_sequences, max_completion_tokens",
        "token_logprobs": "logits, token_ids, temperature=1.0, *loss_mask=None",
        "entropy_of_logits": "logits, temperature=1.0, *loss_mask=None",
        "gaussian_log_prob": "actions, mean, log_std",
        "gaussian_entropy": "mean, log_std",
        "gaussian_sample": "mean, log_std, generator=None",
        "make_reward": "spec",
        "register_reward": "name",
        "reward_names": "",
        "get_reward": "name",
        "score": "reward, completion, reference",
        "score_all": "reward, completions, references",
        "avg_at_k": "is_right",
        "pass_at_k": "num_right, num_samples, k",
        "maj_at_k": "answers, is_right, k",
        "canonical_answer": "answer",
        "mean_over_problems": "scores, *confidence=0.95",
        "bootstrap_interval": "scores, *confidence=0.95, *num_resamples=10000, *seed=0",
        "check_finite": "name, tensor, mask=None",
    }
