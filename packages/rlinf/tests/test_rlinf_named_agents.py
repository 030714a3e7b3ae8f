"""Partners: agents with a model of their own, checked before any process starts."""

from pathlib import Path

import pytest

from rlinf.config.evaluation import EvalConfig
from rlinf.config.reasoning import AgentConfig
from rlinf.errors import UserError
from rlinf.jobs.named_agents import check_partners, named_agents


def agent_with(path: Path, **changes: int) -> AgentConfig:
    agents = {"solver": {}, "judge": {"trains": False, "path": str(path)}}
    return AgentConfig.model_validate({"run": "a:b", "agents": agents, "max_context_tokens": 32} | changes)


def test_a_partner_that_can_be_loaded_and_continued_is_accepted(model_folder, tmp_path: Path) -> None:
    model_folder("abc", max_positions=64)
    agent = agent_with(tmp_path / "model")
    assert check_partners(agent, {}, (), "rollout.") == []
    folders = {name: one.folder for name, one in named_agents(agent).items()}
    assert folders == {"solver": None, "judge": str(tmp_path / "model")}


def test_a_partner_that_cannot_play_is_refused_with_its_key(model_folder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.agent\.agents\.judge\.path=.*/model: does not exist"):
        check_partners(agent_with(tmp_path / "model"), {}, (), "rollout.")
    model_folder("abc", max_positions=64)
    with pytest.raises(UserError, match=r"^agent\.max_context_tokens=65, but agent\.agents\.judge\.path=.* 64 "):
        check_partners(agent_with(tmp_path / "model", max_context_tokens=65), {}, (), "")


def test_an_evaluation_with_a_partner_shares_the_memory_of_its_engine(tmp_path: Path) -> None:
    agent = agent_with(tmp_path)
    config = EvalConfig.model_validate(
        {
            "model": str(tmp_path),
            "benchmarks": {"mine": {"file": "rows.jsonl"}},
            "agent": agent,
            "engine_options": {"refill": True, "cache_share": 0.5},
        }
    )
    assert agent.options_of_engines(config, on_gpu=False) == {"refill": True, "cache_share": 0.25}
