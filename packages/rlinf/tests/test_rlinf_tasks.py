"""Problems from files: bad rows, templates, prompts that are too long, and a stream that resumes exactly."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlinf.config.tasks import ColumnsConfig, FilesTask, MixtureSource
from rlinf.errors import UserError
from rlinf.tasks import TaskProblem, make_task
from rlinf.tasks.files import FileProblems
from rlinf.tasks.language import END, character_tokenizer
from rlinf.tasks.prompts import PromptEncoder, fit_prompts, template_of
from rlinf.tasks.questions import MAX_CHARACTERS, Columns, load_problems
from rlinf.tasks.spooled import SpooledRows

GOOD = [{"question": f"{i} + 1?", "answer": f"so #### {i + 1}"} for i in range(12)]
BAD = [
    '{"question": "torn',
    '{"question": "a"}',
    '{"question": "", "answer": "#### 1"}',
    '{"question": "b", "answer": 1}',
]

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'no' %}{{ raise_exception('no system') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if short %}!{% endif %}"
)
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture
def files(tmp_path: Path):
    """Writes rows (or lines as they are) and gives the config of a task on them."""

    def write(name: str, rows: Sequence[dict[str, Any] | str]) -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


def task(train: Path, evaluate: Path, **options: Any) -> FileProblems:
    file_problems = make_task(FilesTask(kind="files", train_files=(train,), eval_files=(evaluate,), **options), seed=3)
    assert isinstance(file_problems, FileProblems)
    return file_problems


# -- bad rows ------------------------------------------------------------------------------------------------------


def test_bad_rows_stop_with_file_and_line(files):
    path = files("train.jsonl", [*GOOD[:2], *BAD, *BAD])
    read = Columns(question=None, answer=None)
    with pytest.raises(UserError) as caught:
        load_problems(path, read, str, on_bad_row="stop")
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines[:4]] == [f"{path}:{n}" for n in (3, 4, 5, 7)]
    assert "not a JSON object" in lines[0]
    assert "no field 'answer' or another usual name of it; the row has 'question'" in lines[1]
    assert "field 'question' is empty" in lines[2]
    assert lines[5:] == [
        "and 1 more bad rows in that file",
        "hint: fix the file, or leave bad rows out and count them with --task.on_bad_row skip",
    ]


def test_a_problem_that_no_tokenizer_can_read_is_a_bad_row(files):
    long = {"question": "x" * (MAX_CHARACTERS + 1), "answer": "1"}
    path = files("train.jsonl", [long, {"question": "a \ud800", "answer": "1"}, GOOD[0]])
    loaded = load_problems(path, Columns(question=None, answer=None), str, on_bad_row="skip")
    assert [problem.number for problem in loaded.problems] == [3] and loaded.num_found == 2
    assert f"{path}:1: the problem has 4,194,305 characters; at most 4,194,304 are read" in loaded.notes[0]
    with pytest.raises(
        UserError, match=r"train\.jsonl:2: field 'question' holds '.ud800', which is half of a character"
    ):
        load_problems(path, Columns(question=None, answer=None), str, on_bad_row="stop")


def test_bad_rows_are_skipped_and_counted(files):
    path = files("train.jsonl", [BAD[0], GOOD[0], *BAD[1:3], GOOD[1]])
    file_problems = task(path, files("test.jsonl", GOOD[2:]), answer_format="gsm8k", on_bad_row="skip")
    assert {file_problems.train_problem(i).number for i in range(2)} == {2, 5}
    (note,) = file_problems.notes
    assert note.startswith(f"{path}: 3 bad rows were skipped, the first is {path}:1: not a JSON object")


def test_a_file_without_a_good_row_is_refused(files):
    path = files("train.jsonl", BAD[:2])
    with pytest.raises(UserError, match=f"{path}: holds no problem; all 2 rows are bad, the first: {path}:1: "):
        task(path, path, on_bad_row="skip")
    with pytest.raises(UserError, match=f"{files('empty.jsonl', [])}: the file is empty\nhint"):
        task(files("empty.jsonl", []), path)


@pytest.mark.parametrize(
    ("row", "flags"),
    [
        ({"prompt": "p", "completion": "c"}, "--task.columns.answer completion"),
        ({"Problem": "p", "id": 1, "Label": "c"}, "--task.columns.answer Label"),
        ({"answer": "p", "q": "c"}, "--task.columns.prompt q"),
        ({"answer": "p", "question ": "c"}, "--task.columns.prompt 'question '"),
        ({"a": "p", "b": "c", "c": "d"}, "--task.columns.prompt COLUMN --task.columns.answer COLUMN"),
        ({"data": [{"question": "p", "answer": "c"}]}, None),
    ],
)
def test_columns_with_other_names_are_named_in_the_hint(files, row: dict[str, Any], flags: str | None):
    path = files("train.jsonl", [row, row])
    with pytest.raises(UserError) as caught:
        load_problems(path, Columns(question=None, answer=None), str, on_bad_row="stop")
    hint = f"say which columns of the file hold problem and answer: {flags}" if flags else "fix the file, or leave"
    assert caught.value.hint is not None and caught.value.hint.startswith(hint)


def test_a_template_takes_question_for_a_column_of_any_name(files):
    train = files("train.jsonl", [{"my problem": "1+1", "answer": "2"}])
    test = files("test.jsonl", [{"my problem": "1+2", "answer": "3"}])
    file_problems = task(train, test, columns=ColumnsConfig(prompt="my problem"), prompt_template="Q: {question} {{}}")
    assert file_problems.train_problem(0).prompt == "Q: 1+1 {}"


# -- the shapes of rows --------------------------------------------------------------------------------------------


def test_a_chat_has_a_text_of_its_turns_and_a_problem_its_whole_row(files):
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    row = {"prompt": turns, "answer": 2, "level": [1]}
    loaded = load_problems(files("train.jsonl", [row]), Columns(question=None, answer=None), str, on_bad_row="stop")
    (problem,) = loaded.problems
    assert (problem.prompt, problem.row) == ("system: be brief\n\nuser: 1+1", row)


def test_rewards_that_compare_with_nothing_need_no_answer(files):
    path = files("train.jsonl", [{"prompt": "p", "topic": "t"}])
    read = Columns(question=None, answer=None, needs_answer=False)
    assert load_problems(path, read, str, on_bad_row="stop").problems[0].answer == ""
    with pytest.raises(UserError, match="no field 'answer' or another"):
        load_problems(path, Columns(question=None, answer=None), str, on_bad_row="stop")


def test_duplicates_are_dropped_where_the_task_says_so(files):
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "1"}, {"question": "a", "answer": "1"}]
    train, test = files("train.jsonl", [*rows, {"question": "a", "answer": "2"}]), files("test.jsonl", GOOD[:1])
    assert task(train, test).num_train_problems == 4
    unique = task(train, test, drop_duplicates=True)
    assert sorted(unique.train_problem(i).number for i in range(3)) == [1, 2, 4]
    assert unique.notes == ["1 of 4 problems occur again and were dropped"]


def test_a_source_of_a_mixture_has_the_placeholder_of_its_own_column(files):
    path = files("two.jsonl", [{"problem": "1+1", "answer": "2"}])
    test = files("test.jsonl", [{"question": "t", "answer": "1"}])

    def mixture(template: str) -> FilesTask:
        source = MixtureSource(files=(path,), columns=ColumnsConfig(prompt="problem"), prompt_template=template)
        return FilesTask(kind="files", train_files=(), mixture={"two": source}, eval_files=(test,))

    assert FileProblems(mixture("P: {problem}"), 3).train_problem(0).prompt == "P: 1+1"
    with pytest.raises(ValueError, match=r"task\.mixture\.two\.prompt_template='P: \{text\}' must hold \{problem\}"):
        mixture("P: {text}")


def test_a_mixture_has_its_shares_and_names_its_sources(files):
    one = files("one.jsonl", [{"question": f"a{i}", "answer": f"#### {i}"} for i in range(3)])
    two = files("two.jsonl", [{"problem": f"b{i}", "answer": "x"} for i in range(5)])
    test = files("test.jsonl", [{"question": "t", "answer": "1"}])
    sources = {
        "one": MixtureSource(files=(one,), weight=3.0, answer_format="gsm8k"),
        "two": MixtureSource(files=(two,), prompt_template="Q: {question}"),
    }
    config = FilesTask(
        kind="files",
        train_files=(),
        mixture=sources,
        eval_files=(test,),
        eval_source="one",
        eval_sets={"two": test},
    )
    mixed = FileProblems(config, 3)
    stream = [mixed.train_problem(i) for i in range(1000)]
    names = [problem.row["data_source"] for problem in stream]
    assert (names.count("one"), names.count("two")) == (750, 250)
    assert names[:500].count("one") not in (500, 0), "they are shuffled"
    assert {problem.prompt for problem in stream if problem.row["data_source"] == "two"} == {
        f"Q: b{i}" for i in range(5)
    }
    assert len({problem.prompt for problem in stream if problem.row["data_source"] == "one"}) == 3
    later = FileProblems(config, 3)
    assert [later.train_problem(i) for i in (2500, 17, 999)] == [
        FileProblems(config, 3).train_problem(2500), stream[17], stream[999]
    ]  # fmt: skip
    held_out = later.held_out()
    assert held_out[""][0].row["data_source"] == "one" and held_out["two"][0].row["data_source"] == "two"
    rare = sources | {"two": MixtureSource(files=(two,), weight=1e-5)}
    with pytest.raises(UserError, match=r"task\.mixture\.two\.weight=1e-05 is less than a thousandth"):
        FileProblems(config.model_copy(update={"mixture": rare}), 3)


def test_without_files_to_evaluate_on_problems_are_held_out(files):
    rows = [{"question": f"{i // 2}+1", "answer": f"{i // 2 + 1}"} for i in range(60)]  # each problem twice

    def of(num_held_out: int, seed: int = 0, some_rows: list[dict[str, str]] = rows) -> FileProblems:
        config = FilesTask(kind="files", train_files=(files("rows.jsonl", some_rows),), num_held_out=num_held_out)
        return FileProblems(config, seed)

    problems = of(500)
    held_out = [problem.prompt for problem in problems.held_out()[""]]
    trained = [problems.train_problem(i).prompt for i in range(problems.num_train_problems)]
    assert len(held_out) == 3 and len(trained) == 54 and set(held_out).isdisjoint(trained)
    assert problems.notes == ["task.eval_files is empty: 3 of 30 training problems are held out to evaluate on"]
    assert len(of(2).held_out()[""]) == 2
    assert [problem.prompt for problem in of(500, seed=1).held_out()[""]] != held_out
    with pytest.raises(UserError, match=r"task\.train_files has too few problems to hold some out"):
        of(500, some_rows=rows[:2])


def test_an_evaluation_that_uses_the_first_rows_alone_is_noted(files):
    train, evaluate = files("train.jsonl", GOOD), files("test.jsonl", [{"question": "x", "answer": "1"}] * 2)
    assert task(train, evaluate, num_held_out=2).notes == []
    first = task(train, evaluate, num_held_out=1)
    assert first.notes == ["task.eval_files: the first 1 of 2 problems are used (task.num_held_out)"]


# -- the stream ----------------------------------------------------------------------------------------------------


def test_the_stream_can_be_entered_anywhere(files):
    train, evaluate = files("train.jsonl", GOOD), files("test.jsonl", [{"question": "x", "answer": "1"}])
    through = task(train, evaluate)
    stream = [through.train_problem(i) for i in range(40)]
    for start in (0, 7, 12, 25):
        assert [task(train, evaluate).train_problem(i) for i in range(start, 40)] == stream[start:]
    for epoch in range(3):
        assert {problem.number for problem in stream[epoch * 12 : epoch * 12 + 12]} == set(range(1, 13))
    assert stream[:12] != stream[12:24]


def test_further_sets_have_their_published_columns_or_the_task_s(files):
    train, evaluate = files("train.jsonl", GOOD), files("test.jsonl", [{"question": "x", "answer": "1"}])
    sets = {
        "AIME-24": files("aime.jsonl", [{"problem": "p", "answer": "033"}]),
        "mine": files("mine.jsonl", [{"question": "y", "answer": "2"}] * 2),
    }
    file_problems = task(train, evaluate, eval_sets=sets, num_held_out=1, prompt_template="Q: {question}")
    held_out = file_problems.held_out()
    assert {name: [(p.prompt, p.answer) for p in problems] for name, problems in held_out.items()} == {
        "": [("Q: x", "1")],
        "AIME-24": [("Q: p", "33")],
        "mine": [("Q: y", "2"), ("Q: y", "2")],
    }
    with pytest.raises(
        UserError, match=r"task.eval_sets.again: of its evaluation problems 12 are in the training files too"
    ):
        task(train, evaluate, eval_sets={"again": train})


# -- prompts -------------------------------------------------------------------------------------------------------


def tokenizer(chat_template: str | None = None) -> Any:
    characters = character_tokenizer(ALPHABET)
    characters.chat_template = chat_template
    return characters


def plain_problem(prompt: str) -> TaskProblem:
    return TaskProblem(prompt=prompt, answer="1")


def test_a_plain_prompt_is_taken_as_it_is():
    encoder = PromptEncoder(tokenizer())
    assert encoder.text("a{b}") == "a{b}"
    assert tokenizer().decode(encoder.encode("a b\n")) == "a b\n"
    assert encoder.num_tokens(map(plain_problem, ["", "abc"])) == [0, 3]
    assert template_of("{{Q}} {q}\n", "q")("1{2}") == "{Q} 1{2}\n"


def beginning(token: str, *, behind: str | None = None) -> Any:
    """A tokenizer that writes a token before every text, and maybe one behind it."""
    from tokenizers import processors

    wrapped = tokenizer()
    wrapped.add_special_tokens({"bos_token": token})
    used = [name for name in (token, behind) if name is not None]
    wrapped.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A {behind or ''}".strip(),
        special_tokens=[(name, wrapped.convert_tokens_to_ids(name)) for name in used],
    )
    return wrapped


def test_a_plain_prompt_begins_as_the_tokenizer_begins_every_text():
    """Gemma, Llama and Mistral write garbage without their first token; a chat template writes it itself."""
    bos_tokenizer = beginning("<bos>")
    encoder, first = PromptEncoder(bos_tokenizer), bos_tokenizer.convert_tokens_to_ids("<bos>")
    assert encoder.encode("12") == bos_tokenizer("12")["input_ids"] and encoder.encode("12")[0] == first
    assert encoder.num_tokens(map(plain_problem, ["12", ""])) == [3, 1]
    assert encoder.encode("<bos>12") == encoder.encode("12")
    assert "each begins with <bos>" in encoder.describe()
    bos_tokenizer.chat_template = CHAT_TEMPLATE
    assert PromptEncoder(bos_tokenizer, chat=True).encode("12")[0] != first


def test_no_end_token_is_put_behind_a_plain_prompt():
    bos_tokenizer = beginning("<bos>", behind=END)
    assert bos_tokenizer("12")["input_ids"][-1] == bos_tokenizer.eos_token_id
    assert PromptEncoder(bos_tokenizer).encode("12") == bos_tokenizer("12")["input_ids"][:-1]


def test_a_prompt_that_is_cut_keeps_its_first_token():
    encoder = PromptEncoder(beginning("<bos>"))
    assert encoder.encode("1234", 3) == [*encoder.encode("")[:1], *encoder.encode("34")[1:]]
    assert PromptEncoder(tokenizer()).encode("1234", 3) == PromptEncoder(tokenizer()).encode("234")


def test_a_chat_prompt_ends_where_the_assistant_begins():
    encoder = PromptEncoder(tokenizer(CHAT_TEMPLATE), chat=True, system_prompt="be brief")
    assert encoder.text("2 + 2?") == "<system>be brief<user>2 + 2?<assistant>"
    assert tokenizer().decode(encoder.encode("2 + 2?")) == encoder.text("2 + 2?")
    assert (
        PromptEncoder(tokenizer(CHAT_TEMPLATE), chat=True, options={"short": True}).text("x") == "<user>x<assistant>!"
    )


def test_turns_keep_their_own_system_prompt_and_need_a_template():
    encoder = PromptEncoder(tokenizer(CHAT_TEMPLATE), chat=True, system_prompt="be brief")
    assert encoder.text((("user", "2 + 2?"),)) == encoder.text("2 + 2?")
    assert encoder.text((("system", "sums"), ("user", "1"))) == "<system>sums<user>1<assistant>"
    with pytest.raises(UserError, match=r"the data hold the turns of chats, and prompts are plain\nhint: use a model"):
        PromptEncoder(tokenizer()).encode((("user", "1"),))


@pytest.mark.parametrize(
    ("ending", "opening"),
    [
        ("<assistant>", ""),
        ("<assistant><think>\n", "<think>\n"),
        ("<assistant>\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("<assistant><think>\nOkay, ", "<think>\nOkay, "),
    ],
)
def test_what_a_chat_template_begins_belongs_to_the_completion(ending, opening):
    template = CHAT_TEMPLATE.replace("<assistant>{% endif %}", f"{ending}{{% endif %}}")
    encoder = PromptEncoder(tokenizer(template), chat=True)
    assert encoder.text("What is <think>?").endswith(ending)
    assert encoder.opening("What is <think>?") == opening


def test_what_a_plain_prompt_begins_belongs_to_the_completion():
    encoder = PromptEncoder(tokenizer())
    assert encoder.opening("2 + 2?\n<think>\n") == "<think>\n"
    assert encoder.opening("Use <think> and </think>. 2 + 2?") == ""


def test_a_tokenizer_without_chat_template_is_refused():
    with pytest.raises(UserError) as caught:
        PromptEncoder(tokenizer(), chat=True, key="task.prompt_format")
    assert str(caught.value).startswith(
        "task.prompt_format=chat: the tokenizer of the model has no chat template\n"
        "hint: use --task.prompt_format plain, or put a chat_template into"
    )
    with pytest.raises(UserError, match=r"the tokenizer's chat template refuses a system prompt: .*no system"):
        PromptEncoder(tokenizer(CHAT_TEMPLATE), chat=True, system_prompt="no")


def fitted(long_prompts: Any, limit: int = 4):
    problems = [
        TaskProblem(prompt="x" * length, answer="1", place=f"f:{length}", number=length) for length in (3, 5, 4, 6)
    ]
    encoder = PromptEncoder(tokenizer())
    return fit_prompts(
        SpooledRows(problems), encoder, max_prompt_tokens=limit, long_prompts=long_prompts, what="the set"
    )


def test_long_prompts_are_kept_dropped_or_an_error():
    cut, dropped = fitted("keep_end"), fitted("drop")
    assert [problem.number for problem in cut.problems] == [3, 5, 4, 6]
    assert [problem.number for problem in dropped.problems] == [3, 4]
    assert (cut.num_found, dropped.num_found) == (2, 2)
    text = "the set: 2 of 4 prompts are longer than 4 tokens (up to 6)"
    assert cut.notes == (f"{text}; their beginnings were cut off",)
    assert dropped.notes == (f"{text}; these problems were dropped",)
    with pytest.raises(UserError, match=r"\(up to 6\), the first at f:5\nhint: allow .*\.max_prompt_tokens 6,"):
        fitted("stop")
    with pytest.raises(UserError, match=r"so none is left with task\.long_prompts=drop"):
        fitted("drop", limit=2)
    assert fitted("stop", limit=6).notes == ()


def test_a_tokenizer_gets_texts_of_bounded_length_together(monkeypatch):
    monkeypatch.setattr("rlinf.tasks.prompts.BATCH", 3)
    monkeypatch.setattr("rlinf.tasks.prompts.BATCH_CHARACTERS", 10)
    lengths = [4, 4, 4, 1, 1, 1, 1, 30, 2]
    batches, whole = [], tokenizer()

    def tokenize(texts, **arguments):
        if isinstance(texts, list):
            batches.append([len(text) for text in texts])
        return whole(texts, **arguments)

    assert PromptEncoder(tokenize).num_tokens(plain_problem("x" * length) for length in lengths) == lengths
    assert batches == [[4, 4], [4, 1, 1], [1, 1], [30], [2]]


def test_the_task_drops_long_prompts_everywhere_and_says_so(files):
    train = files("train.jsonl", [{"question": "q" * n, "answer": "1"} for n in range(1, 9)])
    evaluate = files("test.jsonl", [{"question": "r" * n, "answer": "1"} for n in (2, 9)])
    file_problems = task(train, evaluate, long_prompts="drop", prompt_template="{question}")
    file_problems.fit(PromptEncoder(tokenizer()), 4)
    assert {file_problems.train_problem(i).number for i in range(8)} == {1, 2, 3, 4}
    assert [problem.number for problem in file_problems.held_out()[""]] == [1]
    assert [note.partition(":")[0] for note in file_problems.notes] == ["task.train_files", "task.eval_files"]
