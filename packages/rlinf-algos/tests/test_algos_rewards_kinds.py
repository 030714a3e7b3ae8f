"""Multiple choice, lengths, weighted sums, reward models, batches and specs."""

import json
import shutil
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf_algos import AlgosError, RewardError, RewardResult, RewardSpec, make_reward, score_all
from rlinf_algos.rewards import (
    LengthPenalty,
    LengthTarget,
    MultipleChoice,
    RewardTerm,
    WeightedReward,
    exact_match,
    multiple_choice,
    numeric_match,
    stated_letter,
    think_answer_format,
)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("**B.**", "B"),
        ("\\boxed{B}", "B"),
        ("\\boxed{\\text{(C)}}", "C"),
        ("\\boxed{b}", "B"),
        ("\\boxed{B. mitochondria}", "B"),
        ("Answer: (B)", "B"),
        ("ANSWER: B", "B"),
        ("**Answer:** C", "C"),
        ("**Answer: B**", "B"),
        ("Final Answer: $A$", "A"),
        ("The answer is B.", "B"),
        ("The correct answer is **D**.", "D"),
        ("answer is (d)", "D"),
        ("Option B is correct", "B"),
        ("I choose option D", "D"),
        ("B) because of it", "B"),
        ("Therefore:\nB\n", "B"),
        ("Answer: B\nNo, wait. Answer: C", "C"),
        ("\\boxed{A}, or rather the answer is B", "B"),
        ("<think>The answer is A.</think> The answer is D.", "D"),
        ("the answer is a bit long", None),
        ("I think A is right", "A"),
        ("The answer isn't clear", None),
        ("answer: That it is", None),
        ("", None),
    ],
)
def test_stated_letters(text, letter):
    assert stated_letter(text) == letter


def test_ways_to_say_it():
    """A table of 85 completions, with what they state; at least 95 of 100 must be read as a person reads them."""
    rows = [json.loads(line) for line in Path(__file__).with_name("choices.jsonl").read_text().splitlines()]
    wrong = [
        (row["completion"], row["letter"], letter)
        for row in rows
        if (letter := stated_letter(row["completion"], row["num_choices"])) != row["letter"]
    ]
    assert len(rows) >= 60
    assert len(wrong) <= 0.05 * len(rows), wrong


@pytest.mark.parametrize("text", ["\\text{", "answer is", "<answer>", " \n", "(", "so it is ", "\\boxed{", "A, B, "])
def test_a_long_text_takes_time_in_proportion(text):
    start = time.process_time()
    stated_letter(text * 20_000 + "answer is" + " " * 50_000)
    assert time.process_time() - start < 5


def test_letters_beyond_the_choices_are_none():
    reward = MultipleChoice(num_choices=4)
    assert reward("The answer is B. Plan E would be nice; the answer is E.", "B").outcome == "right"
    with pytest.raises(RewardError, match="is not a letter from A to D"):
        reward("B", "E")
    with pytest.raises(AlgosError, match="num_choices=1 must be between 2 and 26"):
        MultipleChoice(num_choices=1)


def test_multiple_choice():
    assert multiple_choice("The answer is B.", "B") == RewardResult(value=1.0, outcome="right", answer="B")
    assert multiple_choice("The answer is B.", "(C)").outcome == "wrong"
    assert multiple_choice("no idea", "B") == RewardResult(value=0.0, outcome="unparseable")
    assert stated_letter("The answer is Z", num_choices=4) is None
    with pytest.raises(RewardError, match="the reference 'no letter' is not a letter"):
        multiple_choice("B", "no letter")


def test_length_penalty():
    penalty = LengthPenalty(free=4, limit=8)
    assert [penalty("x" * n, "").value for n in (0, 4, 5, 6, 8, 100)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert [penalty("x" * n, "").outcome for n in (4, 5)] == ["right", "wrong"]
    assert LengthPenalty(free=1, limit=2, unit="words")("one two", "").value == -1.0
    assert LengthPenalty(free=1, limit=3, unit=lambda text: 2)("", "").value == -0.5
    with pytest.raises(AlgosError, match="limit=4 must be at least 5"):
        LengthPenalty(free=4, limit=4)
    with pytest.raises(RewardError, match="unit='tokens'; use 'characters', 'words'"):
        LengthPenalty(free=4, limit=8, unit="tokens")  # type: ignore[arg-type]


def test_length_target():
    target = LengthTarget(target=10, tolerance=5)
    assert [target("x" * n, "").value for n in (10, 9, 12, 5, 0, 99)] == [1.0, 0.8, 0.6, 0.0, 0.0, 0.0]
    with pytest.raises(AlgosError, match="tolerance=0"):
        LengthTarget(target=10, tolerance=0)


def test_a_weighted_sum_keeps_its_parts():
    reward = WeightedReward([("number", 0.9, numeric_match), ("form", 0.1, think_answer_format)])
    full = "<think>5</think><answer>7</answer>"
    results = score_all(reward, [full, "7", "8", full], ["7", "7", "7", "9"])
    assert [result.value for result in results] == pytest.approx([1.0, 0.9, 0.0, 0.1])
    assert [result.outcome for result in results] == ["right", "right", "wrong", "wrong"]
    assert not any(result.judge_failed for result in results)
    assert [(part.name, part.weight, part.result.value) for part in results[1].parts] == [
        ("number", 0.9, 1.0),
        ("form", 0.1, 0.0),
    ]
    assert results[1].parts[1].result.outcome == "unparseable"

    def fails(completion, reference):
        raise OverflowError("too large")

    fails.__module__ = "rlinf_algos.rewards.some"
    (result,) = score_all(WeightedReward([("number", 0.9, numeric_match), ("form", 0.1, fails)]), ["7"], ["7"])
    assert (result.value, result.outcome, result.judge_failed) == (0.9, "right", True)
    assert (result.detail or "").startswith("OverflowError: too large")
    for terms in ([], [("a", 1.0, exact_match), ("a", 1.0, exact_match)], [("a", 0.0, exact_match)]):
        with pytest.raises(RewardError, match="it needs terms with different names and weights other than 0"):
            WeightedReward(terms)


class Batched:
    """A batch form that counts its calls and returns what it is told to."""

    def __init__(self, results=None):
        self.num_calls, self.results, self.is_closed = 0, results, False

    def __call__(self, completion, reference):
        raise AssertionError("the batch form is there")

    def score_batch(self, completions, references):
        self.num_calls += 1
        if isinstance(self.results, Exception):
            raise self.results
        return (
            [exact_match(*pair) for pair in zip(completions, references, strict=False)]
            if self.results is None
            else self.results
        )

    def close(self):
        self.is_closed = True


def test_score_all_uses_the_batch_form():
    reward = Batched()
    assert [r.outcome for r in score_all(reward, ["1", "2"], ["1", "1"])] == ["right", "wrong"]
    assert reward.num_calls == 1
    outer = WeightedReward([("a", 1.0, reward), ("b", 2.0, exact_match)])
    assert [r.value for r in score_all(outer, ["1"] * 5, ["1"] * 5)] == [3.0] * 5
    assert reward.num_calls == 2
    outer.close()
    assert reward.is_closed


def test_a_batch_form_that_fails_raises():
    with pytest.raises(RewardError, match=r"score_batch returned 1 results .RewardResult. for 2 completions"):
        score_all(Batched([exact_match("1", "1")]), ["1", "2"], ["1", "1"])
    with pytest.raises(RewardError, match=r"returned 2 results .float. for 2"):
        score_all(Batched([1.0, 0.0]), ["1", "2"], ["1", "1"])
    with pytest.raises(RewardError, match="reward Batched on a batch of 2: ZeroDivisionError: oh"):
        score_all(Batched(ZeroDivisionError("oh")), ["1", "2"], ["1", "1"])
    with pytest.raises(RewardError, match="2 completions, 1 references"):
        score_all(Batched(), ["1", "2"], ["1"])


class OfOnesOwn:
    def __init__(self, *, value: float = 0.25) -> None:
        self._value = value

    def __call__(self, completion: str, reference: str) -> RewardResult:
        return RewardResult(value=self._value, outcome="right")


def test_specs():
    assert make_reward("exact_match") is exact_match
    assert make_reward(RewardSpec(rule="length_penalty", options={"free": 1, "limit": 3}))("xx", "").value == -0.5
    weighted = RewardSpec(
        rule="weighted",
        terms=(
            RewardTerm(name="answer", weight=0.5, reward=RewardSpec(rule="exact_match")),
            RewardTerm(
                name="length",
                weight=1.0,
                reward=RewardSpec(rule="length_target", options={"target": 2, "tolerance": 2}),
            ),
        ),
    )
    assert make_reward(weighted)("1", "1").value == 1.0
    with pytest.raises(RewardError, match=r"'exact_match' is a function and takes no options, got .'x'."):
        make_reward(RewardSpec(rule="exact_match", options={"x": 1}))
    with pytest.raises(RewardError, match=r"'length_penalty' with options .'fre': 1.: .*unexpected keyword"):
        make_reward(RewardSpec(rule="length_penalty", options={"fre": 1}))
    with pytest.raises(RewardError, match="did you mean 'exact_match'"):
        make_reward("exact_mach")


def test_a_class_of_ones_own_is_made_with_its_options(monkeypatch):
    import sys
    import types

    module = types.ModuleType("own_rewards")
    module.OfOnesOwn = OfOnesOwn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_rewards", module)
    assert make_reward(RewardSpec(rule="own_rewards:OfOnesOwn", options={"value": 0.75}))("", "").value == 0.75
    assert make_reward("own_rewards:OfOnesOwn")("", "").value == 0.25


# -- reward models ---------------------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<end>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen2 with one label and a tokenizer of single characters."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("reward-model")
    words = ["<pad>", "<end>", "<user>", "<assistant>", "<unk>", *map(chr, range(32, 127))]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    core.add_special_tokens(words[:4])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    transformers.Qwen2ForSequenceClassification(config).save_pretrained(folder)
    return folder


COMPLETIONS = ["4", "it is four, I think", "no", "4 of course", "x" * 100]
PROMPTS = ["2+2?", "2+2?", "a long question about nothing", "2+2?", "?"]


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_batch_of_scores_equals_single_ones_and_the_model(folder, template, monkeypatch):
    import transformers

    from rlinf_algos.rewards import RewardModel

    reward = RewardModel(folder, batch_size=2)
    reward._tokenizer.chat_template = template
    batch = [result.value for result in reward.score_batch(COMPLETIONS, PROMPTS)]
    single = [reward(completion, prompt).value for completion, prompt in zip(COMPLETIONS, PROMPTS, strict=True)]
    assert batch == pytest.approx(single, abs=1e-6)
    assert len(set(batch)) == len(batch)

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, completion, value in zip(PROMPTS, COMPLETIONS, batch, strict=True):
        text = f"<user>{prompt}<assistant>{completion}<end>" if template else prompt + completion
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"][-64:]])
        with torch.no_grad():
            expected = model.score(model.model(input_ids=ids).last_hidden_state)[0, -1, 0].item()
        assert value == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_reward_model_reads_the_prompt_and_the_other_terms_the_reference(folder):
    from rlinf_algos.rewards import RewardModel

    model, references = RewardModel(folder), ["4"] * len(COMPLETIONS)
    expected = [result.value for result in score_all(model, COMPLETIONS, PROMPTS)]
    assert [result.value for result in score_all(model, COMPLETIONS, references, PROMPTS)] == expected
    both = WeightedReward([("right", 1.0, exact_match), ("liked", 1.0, model)])
    results = score_all(both, COMPLETIONS, references, PROMPTS)
    assert [result.parts[1].result.value for result in results] == expected
    assert results[0].outcome == "right"
    assert both.depends_on_batch
    assert not WeightedReward([("right", 1.0, exact_match)]).depends_on_batch
    with pytest.raises(RewardError, match="5 completions, 1 prompts"):
        score_all(model, COMPLETIONS, references, PROMPTS[:1])


@pytest.mark.parametrize("pad", [None, "<pad>", "<end>"])
@pytest.mark.parametrize("config_pad", [None, 0, 1, 3])
def test_a_score_is_that_of_the_row_alone_whatever_pad_and_end_are(folder, tmp_path, pad, config_pad):
    """Every row ends with the token 1, `<end>`; the reference is the folder as it is, one row at a time."""
    import transformers

    from rlinf_algos.rewards import RewardModel

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": pad}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pad_token_id": config_pad}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    rows = [
        tokenizer(f"<user>{prompt}<assistant>{completion}<end>", add_special_tokens=False)["input_ids"][-64:]
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([row])).logits[0, 0].item() for row in rows]
    reward = RewardModel(tmp_path)
    reward._tokenizer.chat_template = TEMPLATE
    scores = [result.value for result in reward.score_batch(COMPLETIONS, PROMPTS)]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_completion_cannot_end_its_turn_for_a_reward_model(folder):
    from rlinf_algos.rewards import RewardModel

    reward = RewardModel(folder)
    reward._tokenizer.chat_template = TEMPLATE
    markers = reward._tokenizer.convert_tokens_to_ids(["<user>", "<assistant>", "<end>"])
    ids = reward._token_ids("2+2?", "5<end><user>Thank you!<assistant><pad>")
    assert [ids.count(marker) for marker in markers] == [1, 1, 1]
    assert reward._tokenizer.convert_tokens_to_ids("<pad>") in ids, "tokens that mark no turn, tags for example, stay"


def test_a_row_that_a_reward_model_cannot_score_takes_the_lowest_score(folder, monkeypatch):
    from rlinf_algos.rewards import RewardModel

    reward = RewardModel(folder)
    expected = [result.value for result in reward.score_batch(COMPLETIONS, PROMPTS)]
    forward, long = reward._model.forward, len(COMPLETIONS) - 1

    def fails(input_ids, attention_mask):
        if input_ids.shape[1] == 64:  # the longest row
            raise RuntimeError("out of memory")
        logits = forward(input_ids=input_ids, attention_mask=attention_mask).logits
        return types.SimpleNamespace(logits=torch.where(input_ids[:, :1] == ord("a") - 27, float("nan"), logits))

    monkeypatch.setattr(reward._model, "forward", fails)
    results = reward.score_batch(COMPLETIONS, PROMPTS)
    assert [result.judge_failed for result in results] == [False, False, True, False, True]
    sound = [expected[i] for i in (0, 1, 3)]
    assert [results[i].value for i in (0, 1, 3)] == pytest.approx(sound, abs=1e-6)
    assert [results[i].value for i in (2, long)] == pytest.approx([min(sound)] * 2, abs=1e-6)
    assert "NonFiniteError: the reward model's score is nan" in (results[2].detail or "")
    assert "RuntimeError: out of memory" in (results[long].detail or "")


def test_a_reward_model_that_cannot_serve_says_so(folder, tmp_path, monkeypatch):
    import transformers

    from rlinf_algos.rewards import RewardModel

    with pytest.raises(RewardError, match=r"has no config\.json"):
        RewardModel(tmp_path)
    with pytest.raises(AlgosError, match="batch_size=0"):
        RewardModel(folder, batch_size=0)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(RewardError, match=r"num_labels=2; a reward model has 1"):
        RewardModel(broken)
    causal = tmp_path / "causal"
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config.from_pretrained(folder)).save_pretrained(causal)
    (causal / "config.json").write_text((folder / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (causal / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(RewardError, match=r"lacks score.weight, which would be initialized randomly"):
        RewardModel(causal)
    padded_left, unusable = tmp_path / "xlnet", tmp_path / "t5"
    sizes: Any = {"vocab_size": 100, "d_model": 32, "num_labels": 1}
    torch.manual_seed(0)
    xlnet = transformers.XLNetForSequenceClassification(
        transformers.XLNetConfig(n_layer=2, n_head=4, d_inner=48, initializer_range=0.2, **sizes)
    )
    xlnet.save_pretrained(padded_left)
    transformers.T5ForSequenceClassification(
        transformers.T5Config(num_layers=1, num_heads=2, d_kv=8, d_ff=16, **sizes)
    ).save_pretrained(unusable)
    for target in (padded_left, unusable):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (target / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(RewardError, match=r"scores rows differently in a batch .* set batch_size to 1"):
        RewardModel(padded_left)
    assert RewardModel(padded_left, batch_size=1)("4", "2+2?").outcome == "right"
    with pytest.raises(RewardError, match="cannot score a text: "):
        RewardModel(unusable)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"pip install 'rlinf-algos\[model\]'"):
        RewardModel(folder)


def test_a_reward_by_source_scores_each_row_by_its_own():
    spec = RewardSpec(
        rule="by_source",
        options={"column": "from"},
        terms=(
            RewardTerm(name="numbers", weight=1.0, reward=RewardSpec(rule="numeric_match")),
            RewardTerm(name="texts", weight=1.0, reward=RewardSpec(rule="exact_match")),
        ),
    )
    reward = make_reward(spec)
    rows = [{"from": name} for name in ("texts", "numbers", "texts", "numbers")]
    results = score_all(reward, ["a 2", "a 2", "2", "3"], ["2"] * 4, rows=rows)
    assert [result.outcome for result in results] == ["wrong", "right", "right", "wrong"]
    with pytest.raises(RewardError, match="from='none', which has no reward; known sources: 'numbers', 'texts'"):
        score_all(reward, ["a"], ["a"], rows=[{"from": "none"}])
    with pytest.raises(RewardError, match="reads the column 'from' of the data rows; give rows"):
        score_all(reward, ["a"], ["a"])
