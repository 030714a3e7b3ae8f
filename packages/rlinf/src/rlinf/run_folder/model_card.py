"""The README.md of an exported model: a model card as the Hugging Face Hub reads it.

It states the recipe, the base model, the data, the versions, the scores of the checkpoint with their intervals, and how
to load the model. Folders of this machine are named by their last part alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinf.config.inputs import is_adapter
from rlinf.glossary import SHARE, find
from rlinf.hub import CARD, HubName, hub_name
from rlinf.run_folder.checkpoints import CHECKPOINTS, read_state
from rlinf.run_folder.plain_files import read_plain, read_plain_json
from rlinf.run_folder.rows import read_rows

Z_95 = 1.96
"""Standard errors from the score to each end of its 95 % interval."""
WAYS = {
    "reasoning": "reinforcement learning on text",
    "embodied": "reinforcement learning in environments",
    "sft": "supervised fine-tuning on demonstrations",
    "dpo": "direct preference optimization on pairs of answers",
    "reward_model": "learning to score answers from pairs, of which one is preferred",
}
"""Job -> what it does."""
SHOWN_PACKAGES = ("rlinf", "torch", "transformers", "peft")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedBy:
    """What a run's folder says about a checkpoint. Parts that are missing are empty."""

    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    step: int
    metrics: Mapping[str, float]
    """Of the evaluation of the checkpoint; empty if there was none."""
    policy: str | None = None
    """A further policy; None: the policy of model.path."""

    @classmethod
    def read(cls, checkpoint: Path, policy: str | None = None) -> TrainedBy:
        """Reads the folder of the run that a checkpoint lies in. Raises: UserError for links."""
        run = checkpoint.parent.parent
        step = int(read_state(checkpoint).get("step", 0))
        config = yaml.safe_load(read_plain(run / "config.yaml")) if (run / "config.yaml").is_file() else None
        manifest = read_plain_json(run / "manifest.json") if (run / "manifest.json").is_file() else {}
        rows = [row for row in read_rows(run / "evaluations.jsonl") if row.get("step") == step]
        return cls(
            config=config if isinstance(config, dict) else {},
            manifest=manifest if isinstance(manifest, dict) else {},
            step=step,
            metrics=rows[-1].get("metrics", {}) if rows else {},
            policy=policy,
        )

    def at(self, *keys: str) -> Any:
        """Returns a value of the config; None where it is not set."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def job(self) -> str:
        return str(self.config.get("job", ""))

    @property
    def base(self) -> str | None:
        """The model that it started from; None for a model with random weights."""
        path = self._path_of_policy or self.at("model", "path") or self.at("policy", "options", "folder")
        return str(path) if path else None

    @property
    def _path_of_policy(self) -> str | None:
        """The path that an agent gives the further policy."""
        agents = self.at("rollout", "agent", "agents") or {}
        of_policy = [one for name, one in agents.items() if (one.get("policy") or name) == self.policy]
        return next((one["path"] for one in of_policy if one.get("path")), None)

    @property
    def sources(self) -> list[str]:
        """The files and data sets that it was trained on."""
        task = self.config.get("task")
        if not isinstance(task, Mapping):
            return []
        mixture = task.get("mixture") or {}
        paths = [*(task.get("train_files") or ()), *(path for one in mixture.values() for path in one["files"])]
        return [str(path) for path in paths]


def write_card(folder: Path, checkpoint: Path, *, name: str | None = None, policy: str | None = None) -> None:
    """Writes the card of an exported model, unless the folder has one.

    Args:
        name: of the model on the Hub; None: the folder's.
        policy: a further policy; None: the policy of model.path.
    Raises: UserError.
    """
    if not (folder / CARD).exists():
        text = card_text(TrainedBy.read(checkpoint, policy), folder, name=name or folder.name)
        (folder / CARD).write_text(text, encoding="utf-8")


def card_text(run: TrainedBy, folder: Path, *, name: str) -> str:
    """Returns the card of the model in a folder."""
    head = yaml.safe_dump(_head(run, folder), sort_keys=False, allow_unicode=True)
    recipe = f" with the recipe `{run.config['name']}`" if run.config.get("name") else ""
    way = WAYS.get(run.job, f"the job `{run.job}`" if run.job else "a run")
    start = "" if run.base is None else f", starting from {_linked(run.base)}"
    parts = [
        f"---\n{head}---\n\n# {name.rpartition('/')[2]}\n",
        f"This model was trained by RLinf{recipe}: {way}{start}. It is the checkpoint after {run.step:,} training "
        "steps.\n",
        "## Scores\n",
        *(_scores(run) or ["The run did not evaluate this checkpoint.\n"]),
        "## How to load it\n",
        _loading(run, folder, name),
        "## How it was made\n",
        _table(("", ""), list(_facts(run))),
        "The license of the base model and of the data also applies to this model.\n",
    ]
    return "\n".join(parts)


def _head(run: TrainedBy, folder: Path) -> dict[str, Any]:
    """The part that the Hub reads."""
    names = [name for source in run.sources if (name := hub_name(Path(source)))]
    base = _public(run.base)
    is_text = run.job in ("reasoning", "sft", "dpo")
    from rlinf_workers.models import reads_pictures  # imports torch

    task = "image-text-to-text" if reads_pictures(folder) else "text-generation"
    library = "peft" if is_adapter(folder) else "transformers" if (folder / "config.json").is_file() else None
    algorithm = run.at("algorithm", "name")
    head = {
        "library_name": library,
        "pipeline_tag": task if is_text else "robotics" if run.job == "embodied" else None,
        "base_model": base.repo if base else None,
        "datasets": list(dict.fromkeys(name.repo for name in names)),
        "tags": ["rlinf", *([run.job] if run.job else []), *([algorithm] if algorithm else [])],
    }
    return {key: value for key, value in head.items() if value}


def _scores(run: TrainedBy) -> list[str]:
    """The metrics of the checkpoint's evaluation that are scores: those with an error, and the one it is chosen by."""
    rows = []
    for name, value in run.metrics.items():
        metric, slash, held_out = name.partition("/")
        error = run.metrics.get(f"{metric}_error{slash}{held_out}")
        entry = find(name, evaluation=True)
        if not isinstance(value, int | float) or (error is None and metric not in ("loss", "success_at_end")):
            continue
        is_share = entry is not None and entry.unit == SHARE
        interval = "-" if error is None else _interval(value, error, is_share=is_share)
        meaning = entry.meaning.partition(". ")[0].rstrip(".") if entry else ""
        rows.append((f"`{name}`", _number(value, is_share=is_share), interval, meaning))
    if not rows:
        return []
    count = run.metrics.get("num_problems") or run.metrics.get("num_examples") or run.metrics.get("num_pairs")
    of = f" on {count:,.0f} held-out problems or examples" if count else ""
    parts = [
        f"The run's own evaluation of this checkpoint{of}.\n",
        _table(("metric", "value", "95 % interval", "meaning"), rows),
    ]
    if any(interval != "-" for _, _, interval, _ in rows):
        parts.append("An interval is the value ± 1.96 standard errors over the problems.\n")
    return parts


def _number(value: float, *, is_share: bool) -> str:
    return f"{100 * value:.1f} %" if is_share else f"{value:.4g}"


def _interval(value: float, error: float, *, is_share: bool) -> str:
    low, high = value - Z_95 * error, value + Z_95 * error
    if is_share:
        low, high = max(low, 0.0), min(high, 1.0)
    return f"{_number(low, is_share=is_share)} to {_number(high, is_share=is_share)}"


def _loading(run: TrainedBy, folder: Path, name: str) -> str:
    if run.job == "reward_model":
        return f"```bash\nrlinf train RECIPE --reward.kind model --reward.path {name}\n```\n"
    from rlinf_workers.models import reads_pictures  # imports torch

    tokenizer, adapted = "AutoTokenizer", is_adapter(folder)
    if reads_pictures(folder) and not adapted:
        model, package, tokenizer = "AutoModelForImageTextToText", "transformers", "AutoProcessor"
    elif adapted:
        model, package = "AutoPeftModelForCausalLM", "peft"
    elif (folder / "config.json").is_file() and run.job != "embodied":
        model, package = "AutoModelForCausalLM", "transformers"
    else:
        return "The files have the format of the model that the run started from, and load as that one does.\n"
    more = f", {tokenizer}" if package == "transformers" else f"\nfrom transformers import {tokenizer}"
    variable = tokenizer.removeprefix("Auto").lower()
    return (
        f"```python\nfrom {package} import {model}{more}\n\n"
        f'model = {model}.from_pretrained("{name}")\n{variable} = {tokenizer}.from_pretrained("{name}")\n```\n'
    )


def _facts(run: TrainedBy) -> Iterator[tuple[str, str]]:
    if run.base is not None:
        yield "base model", _linked(run.base)
    if run.sources:
        yield "training data", ", ".join(map(_linked_data, run.sources))
    if environment := run.at("env", "id"):
        yield "environment", f"`{environment}`"
    for label, keys in (("algorithm", ("algorithm", "name")), ("reward", ("reward", "kind"))):
        if value := run.at(*keys):
            yield label, f"`{value}`"
    if run.policy is not None:
        yield "policy", f"`{run.policy}`, one of several that were trained together"
    yield "training steps", f"{run.step:,}"
    if "seed" in run.config:
        yield "seed", str(run.config["seed"])
    if (rate := run.at("actor", "learning_rate")) is not None:
        yield "learning rate", f"{rate:g}" if isinstance(rate, int | float) else str(rate)
    if rank := run.at("actor", "lora", "rank"):
        yield "LoRA rank", str(rank)
    packages = run.manifest.get("packages") or {}
    yield from ((name, str(packages[name])) for name in SHOWN_PACKAGES if packages.get(name))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in cells)


def _public(path: str | None) -> HubName | None:
    return hub_name(Path(path)) if path else None


def _linked(path: str) -> str:
    """A model's name on the Hub with its page; for a folder its name, or that of the run it was trained in."""
    name = _public(path)
    if name is None:
        parts = Path(path).parts
        own = parts[parts.index(CHECKPOINTS) - 1] if CHECKPOINTS in parts[1:] else Path(path).name
        return f"a local model, `{own}`"
    revision = f" at revision `{name.revision}`" if name.revision else ""
    return f"[{name.repo}](https://huggingface.co/{name.repo}){revision}"


def _linked_data(path: str) -> str:
    name = _public(path)
    return f"`{Path(path).name}`" if name is None else f"[`{path}`](https://huggingface.co/datasets/{name.repo})"
