"""The reward section: what each kind becomes, and what is refused before a run starts."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs import rewards as module
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.jobs.rewards import TriedReward, blind_judges, check_reward, reward_spec, try_rewards
from rlinf.machine import Machine
from rlinf.tasks import TaskProblem
from rlinf_algos.rewards import RewardSpec, SandboxRun, close_reward, make_reward, score_all


def config(tmp_path: Path, section: str):
    """The reward section of a recipe with these lines under `reward:`."""
    recipe = tmp_path / "mine.yaml"
    indented = "\n".join(f"  {line}" for line in section.strip().splitlines())
    recipe.write_text(f"extends: sort-grpo\nreward:\n{indented}\n")
    return load_config(str(recipe), parse_overrides([])).reward  # type: ignore[union-attr]


def refused(tmp_path: Path, section: str) -> str:
    with pytest.raises(UserError) as caught:
        config(tmp_path, section)
    return str(caught.value)


@pytest.mark.parametrize(
    ("section", "rule", "options"),
    [
        ("kind: exact", "exact_match", None),
        ("kind: numeric", "numeric_match", None),
        ("kind: random", "exact_match", None),
        ("kind: multiple_choice\nnum_choices: 4", "multiple_choice", {"num_choices": 4}),
        ("kind: format", "think_answer_format", None),
        ("kind: function\npath: my_package.rewards:mine", "my_package.rewards:mine", None),
        (
            "kind: math\nnum_processes: 3",
            "math_answer",
            {"num_processes": 3, "time_limit_s": 1.0, "wall_limit_s": 2.0, "memory_limit_bytes": 1 << 30},
        ),
        ("kind: length\nfree: 5\nlimit: 9", "length_penalty", {"free": 5, "limit": 9, "unit": "characters"}),
        (
            "kind: length_target\ntarget: 5\ntolerance: 9\nunit: words",
            "length_target",
            {"target": 5, "tolerance": 9, "unit": "words"},
        ),
        (
            "kind: model\npath: /some/folder",
            "reward_model",
            {"folder": "/some/folder", "batch_size": 16, "max_tokens": None},
        ),
        (
            "kind: judge\npath: /some/folder\nquestion: '{completion}?'\ngraded: true",
            "rlinf_workers.roles.language.model_judge:ModelJudge",
            {
                "folder": "/some/folder",
                "question": "{completion}?",
                "accepts": "Yes",
                "rejects": "No",
                "graded": True,
                "max_tokens": 16384,
                "max_pixels": None,
            },
        ),
    ],
)
def test_kinds(tmp_path, section, rule, options):
    spec = reward_spec(config(tmp_path, section), random_stands_for="exact")
    assert spec == RewardSpec(rule=rule, options=options)


def test_options_of_every_kind_fit_their_reward(tmp_path):
    pytest.importorskip("math_verify")
    for section in ("kind: math", "kind: code\nallow_weak_isolation: true", "kind: length\nfree: 5\nlimit: 9"):
        reward = make_reward(reward_spec(config(tmp_path, section), random_stands_for="exact"))
        getattr(reward, "close", lambda: None)()


WEIGHTED = """
kind: weighted
terms:
  answer: {weight: 0.9, reward: {kind: numeric}}
  form: {weight: 0.1, reward: {kind: format}}
"""


def test_a_weighted_sum(tmp_path):
    reward_config = config(tmp_path, WEIGHTED)
    spec = reward_spec(reward_config, random_stands_for="exact")
    assert [(term.name, term.weight, term.reward.rule) for term in spec.terms] == [
        ("answer", 0.9, "numeric_match"),
        ("form", 0.1, "think_answer_format"),
    ]
    assert make_reward(spec)("<think>1</think><answer>7</answer>", "7").value == pytest.approx(1.0)
    assert check_reward(reward_config) == ()


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("kind: maths", "mine.yaml:3: reward.kind='maths'; allowed: 'exact'"),
        ("kind: math\nnum_proceses: 2", "reward.num_proceses is not a key; did you mean reward.num_processes?"),
        ("kind: math\ntime_limit_s: 0", "reward.time_limit_s=0; allowed: 0.01 or more"),
        (
            "kind: function\npath: my_rewards",
            "reward.path='my_rewards'; allowed: package.module:name; here my_rewards:NAME",
        ),
        ("kind: function\npath: rw.py:ok", "reward.path='rw.py:ok'; allowed: package.module:name; here rw:ok"),
        ("kind: function\npath: a/rw.py:ok", "reward.path='a/rw.py:ok'; allowed: package.module:name; here rw:ok"),
        ("kind: model", "reward.path is not set; give --reward.path VALUE"),
        ("kind: judge\npath: /a\nquestion: Right?", "reward.question has no {completion}, so it is the same for all"),
        ("kind: length\nfree: 9\nlimit: 5", "reward.limit=5 is not more than reward.free=9; use at least 10"),
        (WEIGHTED.replace("0.1", "0"), "reward.terms.form.weight=0 has no effect; leave the term out"),
        (WEIGHTED.replace("numeric", "random"), "reward.terms.answer.reward.kind=random is a control for a whole run"),
        (WEIGHTED.replace("numeric", "numerc"), "reward.terms.answer.reward.kind='numerc'; allowed: 'exact'"),
        ("kind: weighted\nterms: {}", "reward.terms"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path, section, expected):
    assert expected in refused(tmp_path, section)


def test_what_is_missing_is_told_before_the_start(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"reward\.path=.*/none: does not exist"):
        check_reward(config(tmp_path, f"kind: model\npath: {tmp_path / 'none'}"))
    with pytest.raises(UserError, match=r"reward\.path=no_such:f: the reward 'no_such:f' cannot be imported"):
        check_reward(config(tmp_path, "kind: function\npath: no_such:f"))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"reward\.terms\.answer\.reward\.kind=math needs math-verify") as caught:
        check_reward(config(tmp_path, WEIGHTED.replace("numeric", "math")))
    assert caught.value.hint == "pip install 'rlinf[math]'"


def test_rewards_that_do_not_see_pictures_are_named(tmp_path):
    assert blind_judges(config(tmp_path, "kind: exact")) == []
    (note,) = blind_judges(config(tmp_path, "kind: function\npath: my:judge"))
    assert "reward.path=my:judge does not see the pictures" in note and "a parameter `pictures`" in note


def test_a_weak_sandbox_is_refused_or_noted(tmp_path, monkeypatch):
    weak = SandboxRun(ending="exited", exit_code=0, stdout="", stderr="", cpu_s=0.0, weaknesses=("no namespaces",))
    monkeypatch.setattr(module, "run_python", lambda *arguments: weak)
    with pytest.raises(UserError, match=r"reward\.kind=code: the sandbox is weak on this machine: no namespaces"):
        check_reward(config(tmp_path, "kind: code"))
    notes = check_reward(config(tmp_path, "kind: code\nallow_weak_isolation: true"))
    assert notes == ("reward: the sandbox for code is weak: no namespaces",)


# -- a function of one's own -------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[3] / "docs" / "rewards.md"


def test_the_example_in_the_docs(tmp_path, monkeypatch):
    if not DOCS.exists():
        pytest.skip("no docs beside the package")
    code = DOCS.read_text(encoding="utf-8").split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    reward_config = config(tmp_path, "kind: function\npath: my_rewards:close_and_short")
    problem = TaskProblem(prompt="2+2?", answer="#### 4", row={"max_factor": 2})
    assert try_rewards(reward_config, problem) == TriedReward(judges=False, reads_rows=True)
    reward = make_reward(reward_spec(reward_config, random_stands_for="exact"))
    values = [
        result.value
        for result in score_all(
            reward, ["4", "4.2", "5", "", "it is 4, I think"], ["#### 4"] * 5, ["2+2?"] * 5, [{"max_factor": 2}] * 5
        )
    ]
    assert values == pytest.approx([1.0, 0.5, 0.0, 0.0, 0.9])


class _Judge(BaseHTTPRequestHandler):
    """Gives a score to right completions, and fails on others."""

    def do_POST(self) -> None:
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_right = row["prompt"] == "2+2?" and row["completion"] == row["answer"]
        self.send_response(200 if is_right else 500)
        self.end_headers()
        self.wfile.write(json.dumps({"score": 0.8}).encode() if is_right else b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_judge_in_the_docs_reports_what_its_service_does_not_judge(tmp_path, monkeypatch):
    if not DOCS.exists():
        pytest.skip("no docs beside the package")
    (code,) = (block for block in DOCS.read_text(encoding="utf-8").split("```") if "class HttpJudge" in block)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = code.removeprefix("python\n").replace("localhost:8000", f"127.0.0.1:{server.server_port}")
        (tmp_path / "http_judge.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        judge = make_reward("http_judge:HttpJudge")
        results = score_all(judge, ["4", "5"], ["4", "4"], ["2+2?"] * 2)
        close_reward(judge)
        server.shutdown()
    assert [(one.value, one.outcome, one.judge_failed) for one in results] == [
        (0.8, "right", False),
        (0.0, "crashed", True),
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return row['levle']", "KeyError: 'levle'\n  "),
        ("return None", "returned NoneType None; return a number or a RewardResult"),
        ("import time; time.sleep(5)", "did not return within 0.5 s; it is at\n"),
    ],
)
def test_mistakes_of_ones_own_function_show_before_a_process_starts(tmp_path, monkeypatch, body, message):
    name = f"wrong_{len(body)}"
    (tmp_path / f"{name}.py").write_text(f"def f(completion, answer, row):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward_config = config(tmp_path, f"kind: function\npath: {name}:f\ntime_limit_s: 0.5")
    with pytest.raises(UserError) as caught:
        try_rewards(reward_config, TaskProblem(prompt="p", answer="a", place="rows.jsonl:1"))
    text = str(caught.value)
    assert text.startswith(f"reward.path={name}:f, called once about rows.jsonl:1 with the answer as completion: ")
    assert message in text
    assert "None" in body or f"{name}.py" in text
    assert caught.value.hint and "docs/rewards.md" in caught.value.hint


# -- what a run's evaluations measure ----------------------------------------------------------------------------------

REWARDS = """
from rlinf_algos.rewards import RewardResult

def scaled(completion, answer):
    return 7.5 if completion == answer else -0.25

def truth(completion, answer):
    return completion == answer

def judged(completion, answer):
    is_right = completion == answer
    return RewardResult(value=7.5 if is_right else 0.5, outcome="right" if is_right else "wrong")
"""
EXACT = "--reward.terms.exact={weight: 2.0, reward: {kind: exact}}"
LENGTH = "--reward.terms.length={weight: 0.5, reward: {kind: length, free: 1, limit: 9}}"


@pytest.mark.parametrize(
    ("flags", "score", "beside"),
    [
        ([], "accuracy", []),
        (["--reward.kind=random"], "accuracy", []),
        (["--reward.kind=function", "--reward.path=measured:scaled"], "reward", []),
        (["--reward.kind=function", "--reward.path=measured:truth"], "accuracy", ["reward"]),
        (["--reward.kind=function", "--reward.path=measured:judged"], "accuracy", ["reward"]),
        (["--reward.kind=length", "--reward.free=3", "--reward.limit=9"], "reward", []),
        (["--reward.kind=length_target", "--reward.target=3", "--reward.tolerance=9"], "reward", []),
        (["--reward.kind=format"], "reward", []),
        (["--reward.kind=weighted", EXACT, LENGTH], "accuracy", ["reward"]),
        (["--reward.kind=weighted", LENGTH, EXACT], "reward", []),
    ],
)
def test_accuracy_is_of_what_judges_answers_and_the_reward_stands_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], score: str, beside: list[str]
):
    (tmp_path / "measured.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    settings = load_config("sort-grpo", parse_overrides([*flags, "--task.num_held_out=2"]))
    job = ReasoningJob(settings, Machine(num_cpus=2, memory_bytes=8 << 30))  # pyright: ignore[reportArgumentType]
    assert (job.score.name, [other.name for other in job.other_scores]) == (score, beside)
    assert job.score.is_share == (score == "accuracy")
    groups = [_group([7.5, -0.25], ("right", "wrong")), _group([0.5, 0.25], ("wrong", "unparseable"))]
    run: Any = SimpleNamespace(collected={"scored": groups})
    metrics = job.evaluation_metrics(run)
    assert metrics["reward"] == pytest.approx((7.5 - 0.25 + 0.5 + 0.25) / 4)
    assert metrics["reward_error"] == pytest.approx((3.625 - 0.375) / 2)
    assert metrics.get("accuracy") == (0.25 if score == "accuracy" else None)


def _group(rewards: list[float], outcomes: tuple[str, ...]) -> Any:
    return SimpleNamespace(counted_rewards=torch.tensor(rewards), outcomes=outcomes)


def test_a_score_to_stop_at_is_one_that_can_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "stopped.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    machine = Machine(num_cpus=2, memory_bytes=8 << 30)
    with pytest.raises(UserError, match=r"run\.stop_at_score=5: the score of this run is its accuracy, a share"):
        jobs.prepare(load_config("sort-grpo", parse_overrides(["--run.stop_at_score=5"])), machine)
    flags = ["--run.stop_at_score=5", "--reward.kind=function", "--reward.path=stopped:scaled", "--mode=collocated"]
    job = jobs.prepare(load_config("sort-grpo", parse_overrides(flags)), machine)
    assert "run.stop_at_score=5 is compared with the mean reward, which is the score of this run" in job.notes


@pytest.mark.parametrize(
    ("section", "seconds"),
    [
        ("kind: numeric", 0.0),
        ("kind: math\nwall_limit_s: 4\nnum_processes: 2", 2.0),
        ("kind: code\nwall_limit_s: 10\nnum_processes: 5", 2.0),
        ("kind: code\nwall_limit_s: 10\nnum_processes: 5\npartial: true", 6.0),
        (
            "kind: weighted\nterms:\n  a: {weight: 1, reward: {kind: math, wall_limit_s: 4, num_processes: 2}}\n"
            "  b: {weight: 1, reward: {kind: code, wall_limit_s: 10, num_processes: 5}}",
            4.0,
        ),
    ],
)
def test_the_time_that_a_completion_may_take(tmp_path, section, seconds):
    assert module.judging_s(config(tmp_path, section)) == seconds
