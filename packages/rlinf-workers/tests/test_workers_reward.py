"""The reward role: a hand-over is scored at once, groups keep their own results, outcomes are counted."""

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from transformers import AddedToken

from rlinf_algos import RewardError
from rlinf_algos.rewards import OUTCOMES, RewardResult, RewardSpec, RewardTerm, exact_match
from rlinf_workers.metrics import merge
from rlinf_workers.models.language_model import load_tokenizer, silent_token_ids
from rlinf_workers.roles.language import reward as module
from rlinf_workers.roles.language.reward import Reward, RewardSettings
from rlinf_workers.roles.records.language import Prompt, SampleGroup, Segment

needs_math_verify = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is an extra")


def group(tokenizer, index: int, answer: str, completions: list[str]) -> SampleGroup:
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in completions]
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    return SampleGroup(
        prompt=Prompt(index=index, token_ids=torch.tensor(tokenizer("1=")["input_ids"]), reference_answer=answer),
        completion_ids=ids,
        loss_mask=mask,
        rollout_logprobs=torch.zeros_like(mask),
        policy_version=0,
    )


@pytest.fixture
def groups(model):
    tokenizer = load_tokenizer(model.folder)
    texts = [["12", "3", "12"], ["", "45"], ["6"], ["78", "7", "8", "78"]]
    return [group(tokenizer, i, answer, own) for i, (answer, own) in enumerate(zip("12 45 7 78".split(), texts))]  # noqa: B905, SIM905


def settings(model, rule, **changes) -> RewardSettings:
    return RewardSettings(rule=rule, tokenizer_folder=model.folder, **changes)


def metrics(worker) -> dict[str, float]:
    return merge([worker._host.metrics.drain()])


@pytest.mark.parametrize("sizes", [(4,), (1, 1, 1, 1), (3, 1)])
def test_every_group_gets_its_own_results_however_they_come(model, groups, make_worker, reader, writer, sizes):
    worker = make_worker(Reward, settings(model, "exact_match"))
    rest = list(groups)
    worker.score(reader([[rest.pop(0) for _ in range(size)] for size in sizes]), writer)
    assert [scored.samples.index for scored in writer.items] == [0, 1, 2, 3]
    assert [scored.rewards.tolist() for scored in writer.items] == [[1, 0, 1], [0, 1], [0], [1, 0, 0, 1]]
    assert [scored.outcomes for scored in writer.items][1] == ("unparseable", "right")
    assert all(scored.rewards.dtype == torch.float32 for scored in writer.items)
    recorded = metrics(worker)
    assert recorded == pytest.approx(
        {
            "reward/mean": (2 / 3 + 1 / 2 + 0 + 1 / 2) / 4,
            "reward/std_between_groups": float(np.std([2 / 3, 1 / 2, 0, 1 / 2], ddof=1)),
            "reward/std_within_group": float(np.mean([np.std(r, ddof=1) for r in ([1, 0, 1], [0, 1], [1, 0, 0, 1])])),
            **{f"reward/{outcome}": 0.0 for outcome in OUTCOMES},
            "reward/right": 5 / 10,
            "reward/wrong": 4 / 10,
            "reward/unparseable": 1 / 10,
            "reward/judge_failures": 0.0,
        }
    )


def test_the_first_groups_of_a_step_are_shown_whole(model, groups, make_worker, reader, writer):
    worker = make_worker(Reward, settings(model, "exact_match", num_shown=2))
    segments = (Segment(num_tokens=2, policy_version=0), Segment(num_tokens=1, policy_version=3))
    groups[1] = replace(groups[1], truncated=torch.tensor([True, False]), segments=(segments[:1], segments))
    worker.score(reader([groups]), writer)
    rows = worker._host.shown_rows
    assert [(row["prompt_index"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert rows[1] == {
        "prompt_index": 0,
        "sample": 1,
        "prompt": "1=",
        "completion": "3",
        "reference_answer": "12",
        "reward": 0.0,
        "num_completion_tokens": 2,
        "answer": "3",
        "outcome": "wrong",
    }
    assert "segments" not in rows[3] and rows[4]["segments"] == "2 of version 0, 1 of version 3"
    assert "answer" not in rows[3] and [row["truncated"] for row in rows[3:]] == [True, False]


class Batched:
    num_calls, is_closed = 0, False

    def __call__(self, completion, reference):
        raise AssertionError("the batch form is there")

    def score_batch(self, completions, references):
        self.num_calls += 1
        return tuple(RewardResult(value=0.0, outcome="timeout") for _ in completions)

    def close(self):
        self.is_closed = True


def test_a_hand_over_is_one_batch_and_closing_reaches_the_reward(
    model, groups, make_worker, reader, writer, monkeypatch
):
    reward = Batched()
    monkeypatch.setattr(module, "make_reward", lambda rule: reward)
    worker = make_worker(Reward, settings(model, "x"))
    worker.score(reader([groups[:3], groups[3:]]), writer)
    assert reward.num_calls == 2
    assert metrics(worker)["reward/timeout"] == 1.0
    worker.close()
    assert reward.is_closed
    make_worker(Reward, settings(model, "x")).close()


def test_outcomes_are_counted_where_answers_are_judged(model, groups, make_worker, reader, writer):
    worker = make_worker(Reward, settings(model, "exact_match", judges=False))
    worker.score(reader([groups]), writer)
    recorded = metrics(worker)
    assert "reward/mean" in recorded
    assert not {f"reward/{outcome}" for outcome in OUTCOMES} & recorded.keys()


class Failing(Batched):
    """Fails by itself on every completion that begins with 7."""

    def score_batch(self, completions, references):
        return tuple(
            RewardResult(value=0.0, outcome="crashed", judge_failed=text.startswith("7"), detail=f"boom on {text}")
            for text in completions
        )


def test_failures_of_the_reward_itself_are_counted_and_bounded(model, groups, make_worker, reader, writer, monkeypatch):
    """3 of 10 completions; programs that crash, the others here, are no failures of the reward."""
    monkeypatch.setattr(module, "make_reward", lambda rule: Failing())
    worker = make_worker(Reward, settings(model, "x", max_judge_failures=0.3))
    worker.score(reader([groups[:3], groups[3:]]), writer)
    recorded = metrics(worker)
    assert (recorded["reward/crashed"], recorded["reward/judge_failures"]) == (1.0, pytest.approx(0.3))
    worker.score(reader([groups[:3]]), writer)  # a step of its own
    worker = make_worker(Reward, settings(model, "x", max_judge_failures=0.29))
    with pytest.raises(
        RewardError, match=r"failed on 3 of the 10 completions .*max_judge_failures=0.29.*: boom on 78\."
    ):
        worker.score(reader([groups[:3], groups[3:]]), writer)


class Echo(Batched):
    def score_batch(self, completions, references):
        return tuple(RewardResult(value=0.0, outcome="right", answer=text) for text in completions)


def test_rewards_read_special_tokens_but_no_ends_and_what_the_template_began(
    model, make_worker, reader, writer, monkeypatch, tmp_path
):
    """Tags may be special tokens: without them an unfinished thought would look like an answer."""
    tokenizer = load_tokenizer(model.folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<stop>"]})
    tokenizer.save_pretrained(tmp_path)
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, tokenizer.eos_token_id]}))
    monkeypatch.setattr(module, "make_reward", lambda rule: Echo())
    worker = make_worker(Reward, RewardSettings(rule="x", tokenizer_folder=str(tmp_path)))
    thought = group(tokenizer, 0, "12", ["<think>12</think>3<stop>", "<think>12"])
    begun = group(tokenizer, 1, "12", ["1</think>2<stop>"])
    worker.score(reader([[thought, replace(begun, prompt=replace(begun.prompt, opening="<think>\n"))]]), writer)
    assert [scored.answers for scored in writer.items] == [
        ("<think>12</think>3", "<think>12"),
        ("<think>\n1</think>2",),
    ]
    assert writer.items[1].completions == ("1</think>2",), "people see what was generated"


def test_of_special_tokens_a_reward_reads_tags_alone(model):
    """A reward sees what `skip_special_tokens` leaves, and pairs of tags; an end that is a word of the text is text."""
    tokenizer = load_tokenizer(model.folder)
    tags = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|begin_of_thought|>", "<|end_of_thought|>"]
    others = ["<|im_start|>", "</s>", "<|tool|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*tags, *others]})
    tokenizer.add_tokens([AddedToken("<sep>", special=True)])  # special, and none of the tokenizer's named ones
    others.append("<sep>")
    silent = silent_token_ids(model.folder, tokenizer)
    assert silent == {*tokenizer.convert_tokens_to_ids(others), tokenizer.eos_token_id, tokenizer.pad_token_id}


UNITS = (
    " ",
    "\n",
    "\x00",
    "\ud800",
    "0",
    "9",
    "1,",
    "{",
    "(",
    "$",
    "\\boxed{",
    "^{9",
    "#### ",
    "```\n",
    "</think>",
)
PROGRAMS = (
    "def f(x): return 10**400",
    "def f(x):\n while True: pass",
    "import os\nwhile True: os.fork()",
    "import os; os.kill(os.getpid(), 9)",
    "while True: print('x' * 10**6)",
    "open('full', 'wb').write(bytes(1 << 30))",
    "x = '\x00'",
)
CODE = {"cpu_s": 1, "wall_s": 5, "allow_weak_isolation": True}


@pytest.mark.parametrize(
    ("spec", "reference", "right"),
    [
        (RewardSpec(rule="exact_match"), "4", "4"),
        (RewardSpec(rule="numeric_match"), "4", "#### 4"),
        (RewardSpec(rule="multiple_choice"), "B", "The answer is B."),
        (RewardSpec(rule="think_answer_format"), "4", "<think>2 + 2</think><answer>4</answer>"),
        (RewardSpec(rule="length_penalty", options={"free": 4, "limit": 10_000}), "4", "four"),
        pytest.param(RewardSpec(rule="math_answer"), "4", "\\boxed{2^2}", marks=needs_math_verify),
        (
            RewardSpec(rule="code_tests", options=CODE),
            '{"fn_name": "f", "inputs": [[1]], "outputs": [1.5]}',
            "```python\ndef f(x): return 1.5\n```",
        ),
    ],
    ids=lambda value: value.rule if isinstance(value, RewardSpec) else "",
)
def test_no_completion_ends_a_step_or_takes_the_reward_of_another(
    model, groups, make_worker, reader, writer, monkeypatch, spec, reference, right
):
    texts = [unit * (40_000 // len(unit)) for unit in UNITS]
    if spec.rule == "code_tests":
        texts = [f"```python\n{program}\n```" for program in PROGRAMS] + ["```\n" * 10_000]
    texts = (*texts, right)
    monkeypatch.setattr(Reward, "_completions", lambda self, group: texts)
    worker = make_worker(Reward, settings(model, spec))
    one = replace(groups[0], prompt=replace(groups[0].prompt, reference_answer=reference))
    worker.score(reader([[one]]), writer)
    worker.close()
    (scored,) = writer.items
    assert scored.outcomes[-1] == "right" and scored.rewards[-1] == scored.rewards.max()
    assert set(scored.outcomes[:-1]) <= {"wrong", "unparseable", "timeout", "memory", "crashed"}
    assert metrics(worker)["reward/judge_failures"] == 0.0


class SensitiveToItsBatch(Batched):
    depends_on_batch = True

    def score_batch(self, completions, references):
        return tuple(RewardResult(value=float(len(completions)), outcome="right") for _ in completions)


@pytest.mark.parametrize("sizes", [(4,), (1, 3)])
def test_rewards_that_depend_on_their_batch_do_not_depend_on_the_hand_over(
    model, groups, make_worker, reader, writer, monkeypatch, sizes
):
    monkeypatch.setattr(module, "make_reward", lambda rule: SensitiveToItsBatch())
    worker = make_worker(Reward, settings(model, "x"))
    rest = list(groups)
    worker.score(reader([[rest.pop(0) for _ in range(size)] for size in sizes]), writer)
    assert [scored.rewards.tolist() for scored in writer.items] == [[3.0] * 3, [2.0] * 2, [1.0], [4.0] * 4]


class OfPrompts(Batched):
    reads_prompts = True

    def score_batch(self, completions, references, prompts):
        values = [float(prompt == "1=") + 2.0 * (prompt == "one is") for prompt in prompts]
        return tuple(RewardResult(value=value, outcome="right") for value in values)


def test_a_reward_that_reads_prompts_gets_what_was_asked(model, groups, make_worker, reader, writer, monkeypatch):
    monkeypatch.setattr(module, "make_reward", lambda rule: OfPrompts())
    worker = make_worker(Reward, settings(model, "x"))
    in_words = replace(groups[1].prompt, text="one is")
    worker.score(reader([[groups[0], replace(groups[1], prompt=in_words)]]), writer)
    assert [scored.rewards.tolist() for scored in writer.items] == [[1.0, 1.0, 1.0], [2.0, 2.0]]


def test_a_reward_that_sees_gets_the_files_of_the_prompts_pictures(model, groups, make_worker, reader, writer):
    files = (torch.tensor([137, 80], dtype=torch.uint8), torch.tensor([1], dtype=torch.uint8))
    seeing = [replace(one, prompt=replace(one.prompt, picture_files=files[: one.index])) for one in groups[:3]]
    worker = make_worker(Reward, settings(model, f"{__name__}:number_of_bytes"))
    worker.score(reader([seeing]), writer)
    assert [set(scored.rewards.tolist()) for scored in writer.items] == [{0}, {2}, {3}]


def number_of_bytes(completion: str, answer: str, *, pictures: tuple[bytes, ...]) -> int:
    return sum(map(len, pictures))


def test_the_terms_of_a_sum_are_recorded(model, groups, make_worker, reader, writer):
    terms = (
        RewardTerm(name="answer", weight=0.75, reward=RewardSpec(rule="exact_match")),
        RewardTerm(
            name="length", weight=0.25, reward=RewardSpec(rule="length_target", options={"target": 2, "tolerance": 2})
        ),
    )
    worker = make_worker(Reward, settings(model, RewardSpec(rule="weighted", terms=terms)))
    worker.score(reader([groups[:1]]), writer)
    assert writer.items[0].rewards.tolist() == pytest.approx([1.0, 0.125, 1.0])
    recorded = metrics(worker)
    assert recorded["reward/part/answer"] == pytest.approx(2 / 3)
    assert recorded["reward/part/length"] == pytest.approx(2.5 / 3)
    parts, weights = writer.items[0].parts, writer.items[0].part_weights
    assert parts.tolist() == [[1.0, 1.0], [0.0, 0.5], [1.0, 1.0]]
    assert weights.tolist() == [0.75, 0.25]


def test_the_control_tosses_coins_in_training_alone(model, groups, make_worker, reader, writer):
    worker = make_worker(Reward, settings(model, "exact_match", random_in_training=True), step=3)
    worker.score(reader([groups]), writer)
    coins = [scored.rewards.tolist() for scored in writer.items]
    assert all(scored.outcomes == () for scored in writer.items)
    assert {value for own in coins for value in own} == {0.0, 1.0}
    writer.items.clear()
    worker = make_worker(Reward, settings(model, "exact_match", random_in_training=True), step=3, phase="evaluate")
    worker.score(reader([groups]), writer)
    assert writer.items[0].rewards.tolist() == [exact_match(text, "12").value for text in ("12", "3", "12")]
