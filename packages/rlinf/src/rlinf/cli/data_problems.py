"""What `rlinf data` prints for recipes that train from rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlinf.cli.data_tables import columns_table, histogram, is_model, shortened, spread
from rlinf.config.reasoning import ReasoningConfig
from rlinf.config.tasks import FilesTask


def problem_lines(config: ReasoningConfig, num_examples: int) -> Iterator[str]:
    """Yields the problems of each source: columns, lengths of prompts, some rendered prompts. Raises: UserError."""
    from rlinf.tasks.files import column_reader
    from rlinf.tasks.pictures import PictureReading
    from rlinf.tasks.prompts import template_of
    from rlinf.tasks.questions import load_problems

    task = config.task
    assert isinstance(task, FilesTask)
    encoder, settings = _encoder(config), task.row_settings()
    reader = column_reader(settings, needs_answer=False)
    to_prompt = template_of(settings.prompt_template, settings.placeholder)
    for source in task.train_files:
        loaded = load_problems(
            source, reader, to_prompt, on_bad_row=task.on_bad_row, reading=PictureReading.as_set(task)
        )
        problems = loaded.problems
        yield f"{source}: {len(problems):,} problems" + (f", {loaded.num_found:,} bad rows" if loaded.num_found else "")
        yield columns_table(problems[0].row, reader.columns_of(problems[0].row))
        for note in loaded.notes:
            yield f"note: {note}"
        if without := sum(not problem.answer for problem in problems):
            yield f"note: {without:,} rows have no answer; only a reward that compares with nothing can use them"
        yield ""
        if encoder is None:
            lengths, unit = [len(problem.prompt) for problem in problems], "characters"
        else:
            lengths, unit = encoder.num_tokens(problems), "tokens"
        yield f"prompts have {min(lengths):,} to {max(lengths):,} {unit}:"
        yield from histogram(lengths)
        limit = config.rollout.max_prompt_tokens
        if encoder is not None and (num_long := sum(length > limit for length in lengths)):
            rule = f"task.long_prompts={task.long_prompts}"
            yield f"{num_long:,} are longer than rollout.max_prompt_tokens={limit}: {rule}"
        for place in spread(range(len(problems)), num_examples):
            problem, length = problems[place], lengths[place]
            text = problem.prompt if encoder is None else encoder.text(problem)
            yield f"\n-- {problem.place}: {length:,} {unit}, answer {problem.answer[-80:]!r} " + "-" * 10
            yield shortened(text)
        yield ""
    if encoder is None:
        yield "add --model.path MODEL to see the prompts in its chat template, and their tokens"


def _encoder(config: ReasoningConfig) -> Any:
    """The model's encoder of prompts; None without a model."""
    assert config.model.path is not None and isinstance(config.task, FilesTask)
    if not is_model(config.model.path):
        return None
    from rlinf.tasks.language import load_checkpoint_tokenizer
    from rlinf.tasks.prompts import make_encoder

    tokenizer = load_checkpoint_tokenizer(config.model.path)
    return make_encoder(config.task, tokenizer, config.model.path, "task.")
