"""Partners and further policies: agents with a model or a policy of their own, checked before any process starts."""

from pathlib import Path

import pytest

from rlinf.config.agents import AgentConfig
from rlinf.config.evaluation import EvalConfig
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
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


def test_agents_with_one_policy_share_its_trainer_and_the_model_that_it_begins_with(tmp_path: Path) -> None:
    path = str(tmp_path)
    agents = {
        "solver": {},
        "critic": {"path": path},
        "editor": {"policy": "critic", "trains": False},
        "planner": {"policy": "second"},
        "judge": {"path": path, "trains": False},
    }
    agent = AgentConfig.model_validate({"run": "a:b", "agents": agents, "max_context_tokens": 32})
    assert agent.further_policies == {"critic": tmp_path, "second": None}
    assert agent.partner_paths == {"judge": tmp_path}
    assert [agent.trained_agents(policy) for policy in (None, "critic", "second")] == [
        ("solver",),
        ("critic",),
        ("planner",),
    ]
    assert {name: (one.trainer, one.folder, one.trains) for name, one in named_agents(agent).items()} == {
        "solver": ("", None, True),
        "critic": ("actor-critic", path, True),
        "editor": ("actor-critic", path, False),
        "planner": ("actor-second", None, True),
        "judge": ("", path, False),
    }


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


def test_all_trainers_run_in_the_venv_of_the_actor() -> None:
    lines = ["--rollout.agent.agents.guesser.policy=second", "--venvs.actor=/venv/bin/python"]
    config = load_config("guess-team", parse_overrides(lines))
    assert config.group_venvs == {"actor": "/venv/bin/python", "actor-second": "/venv/bin/python"}
