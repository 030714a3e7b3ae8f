"""What a plan expects of the turns of episodes."""

from typing import Any

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.reasoning.flow import expected_lengths, training_flow
from rlinf.jobs.reasoning.planning import reasoning_problem, turn_notes

CALCULATOR = "--model.path Qwen/Qwen2.5-0.5B --model.architecture null --sft_warm_up null --rollout.agent.max_turns 4"


def config_of(line: str = "") -> Any:
    return load_config("tool-calculator", parse_overrides(f"{CALCULATOR} {line}".split()))


def test_turns_are_half_of_the_most_unless_they_are_expected():
    lengths = expected_lengths(config_of())
    assert (lengths.num_turns, lengths.outside_s, lengths.reads_cache) == (2, 0, False)
    assert lengths.sampled_share == 2 * 4 / 12  # turns of a quarter of 16 tokens, in a quarter of 56 - 8
    note, _ = turn_notes(config_of())
    assert note.startswith("episodes have 2 turns (half of max_turns=4), and 0 s outside the engine")
    assert note.endswith("of 12 tokens 67% are sampled; conversations are computed again at each turn")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "up to eight ranks of the rollout share a router"),
        ("--rollout.agent.router false", "rollout.agent.router=false: no router"),
        ("--run.record true", "run.record=true: no router"),
        ("--algorithm.max_staleness 2 --rollout.sampler as_finished", "rollout.sampler=as_finished: no router"),
        ("--algorithm.max_staleness 1 --rollout.on_new_weights keep", "rollout.on_new_weights=keep: no router"),
    ],
)
def test_a_plan_says_whether_ranks_share_a_router(flags, words):
    config = config_of(flags)
    assert turn_notes(config)[1].startswith(words)
    assert ("router" in training_flow(config).workers) == (not flags)


def test_expected_turns_and_tools_are_planned():
    config = config_of("--rollout.agent.expected_turns 3 --rollout.agent.expected_tool_s 0.5")
    assert expected_lengths(config).num_turns == 3 and expected_lengths(config).outside_s == 1
    plans = [reasoning_problem(one, 2, gpu="H100", env_step_s=None) for one in (config_of(), config)]
    seconds = [plan.profiles.stages["rollout"].instances[0].points[-1].seconds for plan in plans]
    assert seconds[1] - seconds[0] > 1


def test_an_engine_that_keeps_turns_reads_no_conversation_twice():
    lengths = expected_lengths(config_of("--rollout.engine_options.keep_turns true"))
    assert lengths.reads_cache and lengths.read_tokens < expected_lengths(config_of()).read_tokens


def test_more_turns_than_there_may_be_are_refused():
    with pytest.raises(UserError, match=r"expected_turns=5 is more than rollout.agent.max_turns=4"):
        config_of("--rollout.agent.expected_turns 5")


def test_completions_have_no_turns():
    config: Any = load_config("sort-grpo", [])
    assert expected_lengths(config).num_turns == 1 and turn_notes(config) == []
