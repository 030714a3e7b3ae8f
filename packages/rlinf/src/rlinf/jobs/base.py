"""What a job brings to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlinf.machine import Machine
from rlinf_sched import Plan
from rlinf_workers import Flow, FlowRun
from rlinf_workers.launchers import Interpreter

if TYPE_CHECKING:
    from rlinf.jobs.agreement import MismatchVerdict
    from rlinf.loop.session import Session
    from rlinf.planning.memory import PlanMemory
    from rlinf_sched.derive import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The number that a job's evaluation is about."""

    name: str
    """Key in the evaluation's metrics."""
    text: str
    """What it is, for people."""
    is_share: bool = True
    """Between 0 and 1, shown in per cent."""
    lower_is_better: bool = False
    """A loss: the best checkpoint has the smallest, and `run.stop_at_score` is reached from above."""

    def show(self, value: float) -> str:
        """The value as people read it."""
        return f"{value:.1%}" if self.is_share else f"{value:.4f}" if self.lower_is_better else f"{value:.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flows:
    """The flows of a job; all use worker groups that `train` declares."""

    train: Flow
    evaluate: Flow
    others: Sequence[Flow] = ()

    def __iter__(self) -> Iterator[Flow]:
        return iter((self.train, self.evaluate, *self.others))


class Job:
    """One kind of training; the training loop does the rest. `rlinf.jobs.checks` checks its inputs; nothing is written
    and no process started before `write_inputs`. A subclass sets the attributes in its constructor."""

    config: Any
    """Its config, which its spec's model validated."""
    machine: Machine
    """Where it runs."""
    trainers: Mapping[str, str] = MappingProxyType({"actor": ""})
    """Worker groups that hold training state -> their folders in a checkpoint; empty: the checkpoint's own."""
    num_items: int
    """Items of a training step: prompts, environment groups."""
    score: Score
    other_scores: Sequence[Score] = ()
    """Shown beside the score; metrics of every evaluation."""
    notes: Sequence[str] = ()
    """Fall-backs in effect, for the manifest."""
    inputs: Mapping[str, str] = MappingProxyType({})
    """Config key and path of what the run reads -> its fingerprint; a resumed run compares them."""
    venvs: Mapping[str, Interpreter] = MappingProxyType({})
    """Role -> the interpreter that its workers run under, where it has an environment of its own."""
    checks: Sequence[Callable[[Any], Sequence[str] | None]] = ()
    """Checks of the inputs, in order. Each takes the job, and returns notes or raises UserError."""
    memory: PlanMemory | None = None
    """Predicts the memory of its ranks; None: it cannot be predicted."""
    shapes: Mapping[str, ModelShape] = MappingProxyType({})
    """Stage -> shape of its language model, where its parts can be counted."""
    stops_on_mismatch = False
    """A run ends where those who sample and those who train disagree."""

    @property
    def judging_s(self) -> float:
        """Seconds that rewards may take in a step or an evaluation where every completion comes to their limits."""
        return 0.0

    def chunks(self, plan: Plan) -> Mapping[str, int]:
        """Stage -> granularity where the user has not chosen and the mode's rule is not the best for this job."""
        return {}

    def build(self, folder: Path) -> Flows:
        """The flows; `folder` is the run's, which need not exist yet."""
        raise NotImplementedError

    def write_inputs(self, folder: Path) -> None:
        """Writes what the workers load from the run's folder."""

    def prepare(self, session: Session) -> None:
        """Runs once in a run's life, before the first step: an SFT warm-up, say."""

    def save(self, checkpoint: Path) -> None:
        """Writes what the job itself needs to go on into the folder of a checkpoint."""

    def load(self, checkpoint: Path) -> None:
        """Reads what `save` has written, before `restore`."""

    def restore(self, session: Session, step: int) -> None:
        """Runs in place of `prepare` when a run is resumed, after the trainer's checkpoint was loaded, and when lost
        processes were replaced; `step` counts the training steps done."""

    def stepped(self, session: Session, step: int) -> None:
        """Runs after each training step, before its evaluation and its checkpoint; `step` counts the steps done."""

    def feeds(self, step: int) -> dict[str, list[Any]]:
        """Channel -> items of a training step; a function of the seed and the step alone."""
        return {}

    def trained(self, run: FlowRun) -> None:
        """Runs after each training step, with what its flow gave."""

    def agreement(self, metrics: Mapping[str, float]) -> MismatchVerdict | None:
        """Whether those who sample and those who train agree, by the metrics of a training step; None: nothing is known
        of it."""
        return None

    def evaluation_feeds(self) -> dict[str, list[Any]]:
        """Channel -> items of an evaluation."""
        return {}

    def evaluated(self, session: Session, step: int) -> None:
        """Runs after each evaluation; `step` counts the training steps done."""

    def before_training(self, session: Session, score: float) -> None:
        """Runs after the evaluation that comes before the first training step, with its score."""

    def evaluation_metrics(self, run: FlowRun) -> dict[str, float]:
        """Has the score under its name."""
        raise NotImplementedError
