"""ModelJudge: a reward that asks a language model whether a completion is right. One that reads pictures sees those of
the problem.

The model reads a question about the completion, and the reward follows from how probable it finds one word as the
beginning of its answer and how probable another: a generative verifier without a chain of thought (arXiv:2408.15240).
So a completion takes a forward pass and no sampling. What the questions of a prompt have in common, the pictures
included, is computed once for all its completions.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf_algos import RewardError
from rlinf_algos.rewards import PICTURE_FILES, RewardResult, judge_failure
from rlinf_workers.agents.pictures import MARK, as_parts
from rlinf_workers.models.language_model import ModelSettings, build_model, load_tokenizer
from rlinf_workers.models.packed import pack_without_padding, packed_logits
from rlinf_workers.models.picture_files import PictureFile
from rlinf_workers.models.picture_processor import PictureProcessor, reads_pictures
from rlinf_workers.models.picture_texts import MARKER
from rlinf_workers.roles.language.micro_batches import split
from rlinf_workers.roles.records.language import Prompt, SampleGroup
from rlinf_workers.roles.records.pictures import Pictures

_LOG = logging.getLogger(__name__)
PLACEHOLDERS = re.compile(r"(\{prompt\}|\{completion\}|\{answer\})")
"""Of a question."""


class ModelJudge:
    """See the module. Outcome: "right" if the accepting word is the more probable one, else "wrong".

    Args:
        folder: of the model; of one that reads pictures with its image processor. Its code is never run.
        question: {prompt}, {completion} and {answer} stand for the texts.
        accepts, rejects: the words that the model may begin its answer with.
        graded: the value is the probability of the accepting word among both, in place of 1 or 0.
        max_tokens: of a packed forward pass.
        max_pixels: as for `PictureProcessor`.

    Raises: RewardError if the folder cannot be loaded, the words begin with the same token, or the model cannot judge
        an example.
    """

    reads_prompts = True
    depends_on_batch = True

    def __init__(
        self,
        folder: str,
        *,
        question: str,
        accepts: str = "Yes",
        rejects: str = "No",
        graded: bool = False,
        max_tokens: int = 16384,
        max_pixels: int | None = None,
    ) -> None:
        self._question, self._graded, self._max_tokens = question, graded, max_tokens
        try:
            self._tokenizer = load_tokenizer(folder)
            self.reads_pictures = self.reads_rows = reads_pictures(folder)
            self._processor: PictureProcessor | None = None
            if self.reads_pictures:
                self._processor = PictureProcessor(folder, self._tokenizer, max_pixels=max_pixels)
            elif max_pixels is not None:
                raise ValueError(f"max_pixels={max_pixels} is not used, as it reads text alone; leave it out")
            settings = ModelSettings(folder=folder, has_weights=True, dtype=_dtype_of(folder))
            self._model = build_model(settings, torch.device("cpu")).requires_grad_(False)
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            raise RewardError(f"the judge in {folder} cannot be loaded: {error}") from error
        self._words = torch.tensor(word_tokens(self._tokenizer, accepts, rejects))
        self._markers = [one.content for one in self._tokenizer.added_tokens_decoder.values() if one.special]
        try:
            self._probabilities("2+2?", (), ["4", "It is 4."], "4")
        except Exception as error:
            raise RewardError(f"the judge in {folder} cannot judge a text: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Does nothing: the memory is released with the object."""

    def __call__(self, completion: str, reference: str) -> RewardResult:
        return self.score_batch([completion], [reference])[0]

    def score_batch(
        self,
        completions: Sequence[str],
        references: Sequence[str],
        prompts: Sequence[str] | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[RewardResult, ...]:
        """One result for each completion, in order."""
        prompts = [""] * len(completions) if prompts is None else prompts
        files = [()] * len(completions) if rows is None else [row.get(PICTURE_FILES, ()) for row in rows]
        results: list[RewardResult] = []
        problems = zip(prompts, references, files, completions, strict=True)
        for (prompt, reference, pictures), same in itertools.groupby(problems, lambda one: one[:3]):
            texts = [completion for *_, completion in same]
            try:
                probabilities = self._probabilities(prompt, pictures, texts, reference).tolist()
            except (RuntimeError, ValueError) as error:
                _LOG.warning("the judge failed on a prompt, whose completions count as crashed", exc_info=error)
                results += [judge_failure(error)] * len(texts)
                continue
            results += map(self._result, probabilities)
        return tuple(results)

    def _result(self, probability: float) -> RewardResult:
        is_right = probability > 0.5
        value = probability if self._graded else float(is_right)
        return RewardResult(value=value, outcome="right" if is_right else "wrong", detail=f"p={probability:.3f}")

    @torch.no_grad()
    def _probabilities(self, prompt: str, files: Sequence[bytes], completions: Sequence[str], reference: str) -> Tensor:
        """[G] float32, of the accepting word among both words."""
        pictures = [PictureFile(file) for file in files]
        questions = [self._tokens(prompt, completion, reference, len(files)) for completion in completions]
        logits = [
            packed_logits(self._model, pack_without_padding([group.subset(rows)]))[:, self._words]
            for group in self._groups(questions, pictures)
            for rows in split(group, self._max_tokens)
        ]
        return torch.cat(logits).float().softmax(-1)[:, 0]

    def _groups(self, questions: Sequence[list[int]], pictures: Sequence[PictureFile]) -> Iterator[SampleGroup]:
        """The questions in one group, whose prompt they have in common; each in one of its own if that lacks pictures
        or is empty."""
        common = _num_common(questions)
        placeholder = self._processor.placeholder_id if self._processor is not None else -1
        if len(questions) > 1 and (not common or questions[0][:common].count(placeholder) < len(pictures)):
            for one in questions:
                yield from self._groups([one], pictures)
            return
        token_ids, processed = questions[0][:common], None
        if self._processor is not None:
            token_ids, processed = self._processor.insert(token_ids, pictures)
        yield _group(token_ids, processed, [one[common:] for one in questions], int(self._words[0]))

    def _tokens(self, prompt: str, completion: str, reference: str, num_pictures: int) -> list[int]:
        """The tokens of a question, with a placeholder for each picture."""
        if not self.reads_pictures or not num_pictures:
            num_pictures = 0
        elif prompt.count(MARKER) == num_pictures:
            prompt = prompt.replace(MARKER, MARK)
        else:
            prompt = MARK * num_pictures + prompt
        texts = {"{prompt}": prompt, "{completion}": completion, "{answer}": reference}
        content = "".join(texts.get(part, part) for part in PLACEHOLDERS.split(self._question))
        for marker in self._markers:  # texts cannot end the question or begin an answer
            content = content.replace(marker, f"{marker[0]} {marker[1:]}")
        if self._tokenizer.chat_template:
            parts = as_parts(content) if num_pictures else content
            turns = [{"role": "user", "content": parts}]
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._processor is not None:
            content = content.replace(MARK, self._processor.picture_text)
        return self._tokenizer(content)["input_ids"]


def word_tokens(tokenizer: Any, accepts: str, rejects: str) -> list[int]:
    """The first tokens of both words. Raises: RewardError if they are the same, or none."""
    first = [tokenizer(word, add_special_tokens=False)["input_ids"][:1] for word in (accepts, rejects)]
    if not all(first) or first[0] == first[1]:
        raise RewardError(f"the words {accepts!r} and {rejects!r} do not begin with different tokens; use others")
    return [token for (token,) in first]


def _dtype_of(folder: str) -> str:
    """The type that the weights of a folder have."""
    config = json.loads(Path(folder, "config.json").read_bytes())
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _num_common(rows: Sequence[Sequence[int]]) -> int:
    """Tokens with which all rows begin; each keeps at least one of its own."""
    shortest = min(map(len, rows)) - 1
    return next((i for i in range(shortest) if len({row[i] for row in rows}) > 1), shortest)


def _group(
    token_ids: Sequence[int], pictures: Pictures | None, rests: Sequence[Sequence[int]], word: int
) -> SampleGroup:
    """A group whose rows end with a word, which alone has a loss."""
    rows = [torch.tensor([*rest, word]) for rest in rests]
    masks = [torch.tensor([0.0] * len(rest) + [1.0]) for rest in rests]
    loss_mask = pad_sequence(masks, batch_first=True)
    return SampleGroup(
        prompt=Prompt(index=0, token_ids=torch.tensor(token_ids), reference_answer="", pictures=pictures),
        completion_ids=pad_sequence(rows, batch_first=True),
        loss_mask=loss_mask,
        rollout_logprobs=torch.zeros_like(loss_mask),
        policy_version=0,
        lengths=torch.tensor([len(row) for row in rows]),
    )
