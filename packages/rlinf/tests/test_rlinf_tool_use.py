"""What the recipes of tool use bring along: the reward of answers, and the agent that repairs programs."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from rlinf.tasks import software
from rlinf.tasks.software import repair, texts_of
from rlinf.tasks.tool_use import answers_exactly
from rlinf_algos.rewards import run_python
from rlinf_workers.agents.records import EpisodeEnded
from rlinf_workers.agents.sessions import TurnsExhausted

IS_WEAK = bool(run_python({}, ["-c", "pass"]).weaknesses)


@pytest.mark.parametrize(
    ("completion", "row", "reward"),
    [
        ("I know. <answer> The  Eiffel-Tower. </answer>", {}, 1.0),
        ("<answer>Louvre</answer> no: <answer>an EIFFELTOWER</answer>", {}, 1.0),
        ("<answer>Eiffel Tower</answer> no: <answer>Louvre</answer>", {}, 0.0),
        ("Eiffel Tower", {}, 0.0),
        ("<answer>La dame de fer</answer>", {"golden_answers": ["Eiffel Tower", "la Dame de Fer"]}, 1.0),
        ("<answer>Eiffeltower</answer>", {"golden_answers": "another"}, 0.0),
    ],
)
def test_an_answer_is_compared_as_open_domain_question_answering_does(completion, row, reward):
    assert answers_exactly(completion, "the Eiffel-Tower", row) == reward


@dataclass
class Policy:
    """A session whose policy writes these turns."""

    turns: list
    id: str = "train-0-0-0-0"
    read: list = field(default_factory=list)

    async def chat(self, messages):
        self.read.append(messages[-1]["content"])
        turn = self.turns.pop(0)
        if isinstance(turn, BaseException):
            raise turn
        return [SimpleNamespace(content=turn, message=lambda: {"role": "assistant", "content": turn})]


ROW = {
    "files": {"solution.py": "from parts.sums import add\n", "parts/sums.py": "def add(a, b):\n    return a - b\n"},
    "tests": "assert add(2, 3) == 5",
}
DONE = f"That is all.\n```bash\n{software.SUBMIT}\n```"
REPAIR = "```bash\nsed -i 's/a - b/a + b/' parts/sums.py && cat parts/sums.py\n```"


def play(turns, **row):
    task = SimpleNamespace(messages=[{"role": "user", "content": "it subtracts"}], row=ROW | row)
    policy = Policy(turns)
    return asyncio.run(asyncio.wait_for(repair(policy, task), 120)), policy


@pytest.fixture
def _walls(monkeypatch):
    if IS_WEAK:
        pytest.skip("the sandbox is weak on this machine")


@pytest.mark.usefixtures("_walls")
def test_a_repaired_program_passes_and_the_policy_reads_what_its_commands_print():
    reward, policy = play(["I look first.\n```bash\nls\n```", "no command", REPAIR, DONE])
    assert reward == 1.0
    assert policy.read[1:3] == ["parts\nsolution.py\n", software.FORMAT.format(number=0)]
    assert "return a + b" in policy.read[3]


@pytest.mark.usefixtures("_walls")
@pytest.mark.parametrize(
    "turns",
    [
        [DONE],
        ["```bash\nrm -r *\n```", DONE],
        ["```bash\necho 'import os; os._exit(0)' > solution.py\n```", DONE],
        ["```bash\necho 'class P:\n  __eq__ = lambda s, o: True\nadd = lambda a, b: P()' > solution.py\n```", DONE],
    ],
    ids=["unchanged", "removed", "exits", "equals everything"],
)
def test_a_program_that_is_not_repaired_fails(turns):
    assert play(turns)[0] == 0.0


@pytest.mark.usefixtures("_walls")
def test_an_episode_without_a_turn_left_is_judged_and_a_lost_engine_is_not():
    assert play([REPAIR, TurnsExhausted(1)])[0] == 1.0
    with pytest.raises(EpisodeEnded) as error:
        play([REPAIR, EpisodeEnded("engine_lost")])
    assert error.value.cause == "engine_lost"


def test_files_of_a_row_may_be_json_or_a_struct_of_all_rows():
    assert texts_of('{"a.py": "x"}') == texts_of({"a.py": "x", "of_another_row.py": None}) == {"a.py": "x"}
