"""Settings of rollouts that tests run."""

from rlinf_workers.agents.settings import EpisodeSettings
from rlinf_workers.roles.language.rollout import RolloutSettings


def rollout_of_agents(model, sampling, **episodes) -> RolloutSettings:
    """A rollout of episodes with room for eight turns at once; `episodes` are further settings of them."""
    agent = EpisodeSettings(
        max_turns=4,
        max_new_tokens=sampling.max_new_tokens,
        max_episodes=4,
        max_idle_s=60.0,
        tokenizer_folder=model.folder,
        **episodes,
    )
    return RolloutSettings(
        model=model,
        train=sampling,
        evaluate=sampling,
        max_prompt_tokens=agent.max_prompt_tokens,
        max_batch_sequences=8,
        engine_options={"refill": True},
        agent=agent,
    )
