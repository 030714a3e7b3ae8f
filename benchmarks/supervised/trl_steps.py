"""Supervised steps against TRL's trainers: loss and gradient norm of each, and the time, in one run that takes turns.

    python -m benchmarks.supervised.trl_steps [--steps 10] [--output FILE]

TRL has to be importable, unmodified: a folder made by `pip install --no-deps --target FOLDER trl==1.16.0
accelerate==1.15.0` on PYTHONPATH is enough. Both sides train the same Qwen2, which this script makes, on the rows of
the same file: TRL's trainer with its own tokenization and collator, ours as a recipe's job does. Float32, AdamW, one
thread; after each of TRL's steps ours takes its own. Both times are of forward, backward, clipping and the optimizer's
step; ours includes making the batch.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, report

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.spec import job_spec
from rlinf.machine import this_machine
from rlinf.tasks.language import character_tokenizer
from rlinf_workers import InProcessWorkers, StepContext

WORDS = [
    "add",
    "count",
    "find",
    "keep",
    "list",
    "make",
    "move",
    "name",
    "pick",
    "read",
    "sort",
    "take",
    "tell",
    "turn",
    "walk",
    "write",
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BATCH_SIZE, VOCAB_SIZE, WARMUP = 16, 256, 2
LEARNING_RATE = 1e-4


def sentence(rng: random.Random, longest: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, longest)))


def pair_rows(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        yield {"prompt": sentence(rng, 20) + "?", "completion": " " + sentence(rng, 30)}


def chat_rows(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        turns = range(rng.randint(1, 3))
        pairs = [(("user", sentence(rng, 12)), ("assistant", sentence(rng, 16))) for _ in turns]
        yield {"messages": [{"role": role, "content": text} for pair in pairs for role, text in pair]}


def preference_rows(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        answers = {name: " " + sentence(rng, 12) for name in ("chosen", "rejected")}
        yield {"prompt": sentence(rng, 20) + "?", **answers}


def chat_pair_rows(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    for row in preference_rows(rng, count):
        prompt = {"role": "user", "content": row["prompt"]}
        yield {key: [prompt, {"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One comparison."""

    recipe: str
    rows: Callable[[random.Random, int], Iterator[dict[str, Any]]]
    has_template: bool = False
    theirs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of TRL's config."""
    ours: dict[str, Any] = field(default_factory=dict)
    """Overrides of the recipe."""


CASES = {
    "sft, packed": Case(recipe="sft", rows=pair_rows, ours={"actor.max_tokens_per_micro_batch": 8192}),
    "sft, padded": Case(recipe="sft", rows=pair_rows, ours={"actor.max_tokens_per_micro_batch": "null"}),
    "sft, chats": Case(
        recipe="sft",
        rows=chat_rows,
        has_template=True,
        theirs={"assistant_only_loss": True},
        ours={"actor.max_tokens_per_micro_batch": 8192},
    ),
    "dpo": Case(recipe="dpo", rows=preference_rows, theirs={"beta": 0.1, "precompute_ref_log_probs": True}),
    "dpo, ipo": Case(
        recipe="dpo",
        rows=preference_rows,
        theirs={"beta": 0.1, "precompute_ref_log_probs": True, "loss_type": "ipo"},
        ours={"dpo.loss": "ipo"},
    ),
    "reward model": Case(recipe="reward-model", rows=chat_pair_rows, has_template=True),
}
REWARDS: dict[str, dict[str, str]] = {
    "dpo": {
        "rewards/chosen": "rewards/chosen",
        "rewards/rejected": "rewards/rejected",
        "rewards/margin": "rewards/margins",
    }
}
"""Recipe -> our metrics of pairs, and TRL's."""


def make_inputs(folder: Path, case: Case, num_steps: int) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz <>;?")
    if case.has_template:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if case.recipe == "reward-model":
        config.num_labels = 1
    kind: Any = AutoModelForSequenceClassification if case.recipe == "reward-model" else AutoModelForCausalLM
    kind.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    rng = random.Random(0)
    for name, count in (("train", num_steps * BATCH_SIZE), ("eval", 4)):
        text = "".join(json.dumps(row) + "\n" for row in case.rows(rng, count))
        (folder / f"{name}.jsonl").write_text(text)


@dataclass(kw_only=True, slots=True)
class Side:
    """What one side did in each step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    further: dict[str, list[float]] = field(default_factory=dict)
    """Metrics of preferences."""


class Collected(list[Any]):
    """Stands for the channel of a stage."""

    def put(self, item: Any, key: int) -> None:
        self.append(item)


class Ours:
    """The job of a recipe, and its trainer in this process."""

    def __init__(self, case: Case, folder: Path) -> None:
        overrides = {
            "model.path": folder / "model",
            "task.train_files": folder / "train.jsonl",
            "task.eval_files": folder / "eval.jsonl",
            "task.max_tokens": 1024,
            "actor.batch_size": BATCH_SIZE,
            "actor.micro_batch_examples": BATCH_SIZE,
            "actor.num_shards": 1,
            "actor.learning_rate": LEARNING_RATE,
            "actor.lr_warmup_steps": 0,
            "run.num_epochs": 1,
            **case.ours,
        }
        config = load_config(case.recipe, parse_overrides([f"--{key}={value}" for key, value in overrides.items()]))
        self.job: Any = job_spec(config).make(config, this_machine(), {})
        self.side, self._recipe = Side(), case.recipe
        self._workers = InProcessWorkers(self.job.build(folder).train)
        source = self.job.source
        self.order = [source.place(index) for index in range(len(source.training_set))]
        if config.job == "dpo":
            self._score_pairs()

    def _score_pairs(self) -> None:
        """The reference's log-probabilities, ahead of the steps as in a run."""
        source, measured = self.job.source, Collected()
        places = range(len(source.training_set))
        self._workers["actor"].score([source.items(places, is_held_out=False)], measured)
        rows = torch.zeros(len(places), 2, dtype=torch.float64)
        order = source.order(places, is_held_out=False)
        for one in measured:
            rows[order[one.index]] = one.values
        source.reference = {"train": rows}

    def step(self, number: int) -> None:
        context = StepContext(step=number, phase="train", seed=0, num_items=BATCH_SIZE)
        self._workers.begin(context)
        items = self.job.feeds(number)["examples"]
        began_s = time.perf_counter()
        self._workers["actor"].train([items])
        self.side.seconds.append(time.perf_counter() - began_s)
        metrics = self._workers.metrics()
        name = self.job.config.job
        self.side.losses.append(metrics[f"{name}/loss"])
        self.side.grad_norms.append(metrics["actor/grad_norm"])
        for key in REWARDS.get(self._recipe, ()):
            self.side.further.setdefault(key, []).append(metrics[key])


def run_theirs(case: Case, folder: Path, order: list[int], num_steps: int, step_ours: Callable[[int], None]) -> Side:
    """TRL's trainer on the rows in the order of ours; after each of its steps ours takes one."""
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
        TrainerCallback,
    )

    side = Side()
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    trainer_class, config_class = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "reward-model": (trl.RewardTrainer, trl.RewardConfig),
    }[case.recipe]

    class Recording(trainer_class):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            side.losses.append(float(loss))
            for key, name in REWARDS.get(case.recipe, {}).items():
                side.further.setdefault(key, []).append(self._metrics["train"][name][-1])
            return loss

        def _clip_grad_norm(self, model: Any) -> Any:
            norm = super()._clip_grad_norm(model)
            side.grad_norms.append(float(norm))
            return norm

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began_s = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            side.seconds.append(time.perf_counter() - self.began_s)
            step_ours(state.global_step - 1)

    config = config_class(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=num_steps,
        max_grad_norm=1.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        optim="adamw_torch",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        max_length=1024,
        seed=0,
        disable_tqdm=True,
        **case.theirs,
    )
    kind: Any = AutoModelForSequenceClassification if case.recipe == "reward-model" else AutoModelForCausalLM
    trainer = Recording(
        model=kind.from_pretrained(folder / "model", dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([rows[place] for place in order]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "model"),
        callbacks=[Turns()],
    )
    trainer.train()
    return side


def distance(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def distance_to_scale(ours: list[float], theirs: list[float]) -> float:
    """The largest difference, relative to the largest value: rewards begin at 0."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(map(abs, theirs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", help="a part of the cases' names")
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples_s, findings, comparisons = {}, {}, []
    for name, case in CASES.items():
        if args.only and args.only not in name:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            make_inputs(folder, case, args.steps)
            ours = Ours(case, folder)
            theirs = run_theirs(case, folder, ours.order, args.steps, ours.step)
        mine = ours.side
        samples_s |= {f"{name}: rlinf": mine.seconds[WARMUP:], f"{name}: TRL": theirs.seconds[WARMUP:]}
        comparisons.append(compare(samples_s, f"{name}: TRL", f"{name}: rlinf"))
        findings[name] = {
            "largest relative difference": {
                "loss": distance(mine.losses, theirs.losses),
                "gradient norm": distance(mine.grad_norms, theirs.grad_norms),
                **{key: distance_to_scale(values, theirs.further[key]) for key, values in mine.further.items()},
            },
            "loss": {"rlinf": mine.losses, "TRL": theirs.losses},
            "gradient norm": {"rlinf": mine.grad_norms, "TRL": theirs.grad_norms},
        }
        print(name, json.dumps(findings[name]["largest relative difference"]), flush=True)
    report(
        "supervised-trl",
        settings={"steps": args.steps, "batch size": BATCH_SIZE, "learning rate": LEARNING_RATE, "threads": 1},
        samples_s=samples_s,
        comparisons=comparisons,
        findings=findings,
        output=args.output,
    )


if __name__ == "__main__":
    main()
