"""What `rlinf data` prints for supervised recipes: the examples, and their tokens with a loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlinf.cli.data_tables import columns_table, histogram, is_model, labelled, spread
from rlinf.config.supervised import SupervisedConfig
from rlinf.errors import UserError
from rlinf.jobs.spec import job_spec


def example_lines(config: SupervisedConfig, num_examples: int) -> Iterator[str]:
    """Yields the examples of each source: columns, lengths, what is left out, some examples. Raises: UserError."""
    source = job_spec(config).load().source_class(config)
    has_model = is_model(config.model.path)
    if has_model:
        yield f"task.prompt_format={config.task.prompt_format}: {source.encoder.describe()}\n"
    for path in config.task.train_files:
        loaded = source.load(path)
        bad_rows = f", {loaded.num_bad:,} bad rows" if loaded.num_bad else ""
        yield f"{path}: {len(loaded.items):,} examples{bad_rows}"
        yield columns_table(loaded.first, source.columns_of(loaded.first))
        for note in loaded.notes:
            yield f"note: {note}"
        yield ""
        show = _token_lines if has_model else _text_lines
        yield from show(source, loaded.items, path, num_examples)
        yield ""
    if not has_model:
        yield "add --model.path MODEL to see the examples in its chat template, and their tokens"


def _text_lines(source: Any, rows: Sequence[Any], path: Path, num_examples: int) -> Iterator[str]:
    lengths = [row.num_characters for row in rows]
    yield f"examples have {min(lengths):,} to {max(lengths):,} characters:"
    yield from histogram(lengths)
    for row in spread(rows, num_examples):
        yield f"\n-- {row.place}: {row.num_characters:,} characters " + "-" * 10
        yield from labelled(row.parts)


def _token_lines(source: Any, rows: Sequence[Any], path: Path, num_examples: int) -> Iterator[str]:
    examples = source.tokenize(rows, str(path))
    lengths = [one.num_tokens for one in examples]
    num_learned = sum(one.num_learned for one in examples)
    yield f"examples have {min(lengths):,} to {max(lengths):,} tokens, and {num_learned:,} tokens have a loss:"
    yield from histogram(lengths)
    try:
        fitting, notes = source.fitted(examples, str(path))
        left_out = f"{len(fitting):,} of {len(examples):,} examples are used"
        yield from (*(f"note: {note}" for note in (*source.notes, *notes)), left_out)
    except UserError as error:
        yield f"a run would end with this error: {error}"
    source.notes.clear()
    for one in spread(examples, num_examples):
        yield f"\n-- {one.place}: {one.num_tokens:,} tokens, {one.num_learned:,} with a loss " + "-" * 10
        yield from labelled([(label, source.tokenizer.decode(ids)) for label, ids in one.parts])
