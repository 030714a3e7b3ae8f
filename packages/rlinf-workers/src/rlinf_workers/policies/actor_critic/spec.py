"""The spec of the small actor-critic for states."""

from rlinf_workers.policies.spec import PolicySpec

SPEC = PolicySpec(
    name="actor_critic",
    implementation="rlinf_workers.policies.actor_critic.policy:ActorCritic",
    backbone=(),
    recipe_keys={
        "hidden_sizes": (128, 128, 128),
        "initial_log_std": -0.5,
        "normalize_observations": True,
        "chunk_size": 1,
    },
)
