"""The success classifier of an embodied run: trained on pictures before the first step, it gives the reward.

Successes are the last pictures of demonstrations. Failures are their earlier pictures, and those of episodes whose
actions are random: from the reset on, or in place of the end of a demonstration. A quarter of the episodes is held out,
and measures how often the classifier is right. The env workers load it from the run's folder, by its digest.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rlinf.config.embodied import EmbodiedConfig, SuccessClassifierConfig
from rlinf.errors import UserError
from rlinf.jobs.demonstrations import DemonstrationReader, counted
from rlinf.run_folder.checkpoints import writing_with_checksums
from rlinf.run_folder.checksums import damage, file_digest
from rlinf_envs import ActionSpec, Demonstration, ExecutedEpisode, SuccessClassifier
from rlinf_workers.policies import CLASSIFIER_LOADER, Needs, PictureClassifier, PolicyError, encoded_cameras
from rlinf_workers.roles import TRAIN_SEED_BIT, EnvInterface

if TYPE_CHECKING:
    from rlinf.loop.session import Session

FOLDER = "success_classifier"
"""In the run's folder."""
FILE = "classifier.safetensors"
HELD_OUT = 4
"""One of so many episodes is held out."""
MAX_HOLD = 8
"""Actions for which a random action is repeated at most, so that the robot gets somewhere."""
EPISODES_AT_ONCE = 20
SEED_STREAM = (1 << 40) + 1
"""Draws the random actions; training steps, whose numbers stand in its place, do not come so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """N pictures of each camera, and whether they show success."""

    pictures: dict[str, Tensor]
    """[N, H, W, C] uint8"""
    is_success: Tensor
    """[N] bool"""

    @classmethod
    def of(cls, episodes: Sequence[ExecutedEpisode]) -> Labelled:
        """All pictures of episodes, of which the last one shows success if the episode succeeded."""
        names = episodes[0].pictures
        pictures = {name: torch.cat([one.pictures[name] for one in episodes]) for name in names}
        is_success = []
        for one in episodes:
            num_pictures = len(next(iter(one.pictures.values())))
            is_success.append(
                torch.arange(num_pictures) == num_pictures - 1 if one.success else torch.zeros(num_pictures)
            )
        return cls(pictures=pictures, is_success=torch.cat([labels.bool() for labels in is_success]))

    @property
    def counts(self) -> str:
        num_successes = int(self.is_success.sum())
        return f"{num_successes} of success and {len(self.is_success) - num_successes} of failure"


class RewardFromPictures:
    """The success classifier of one run. Raises: UserError for an environment that cannot be classified, and as
    `DemonstrationReader`."""

    def __init__(self, settings: SuccessClassifierConfig, config: EmbodiedConfig, interface: EnvInterface) -> None:
        self._settings, self._actions = settings, interface.actions
        self._seed, self._limit = config.seed, config.env.max_episode_steps
        if not interface.observes_rows:
            raise UserError(
                f"success_classifier looks at each row after every action, and env.kind={config.env.kind} steps all "
                "rows at once or in another process",
                hint="use an environment that is simulated row by row in this package's processes",
            )
        try:
            self._cameras = encoded_cameras(interface.fields, settings.cameras)
        except PolicyError as error:
            raise UserError(f"success_classifier: {error}") from error
        self._shapes = {name: interface.fields[name].shape for name in self._cameras}
        self._reader = DemonstrationReader(settings, config, interface, Needs(reads=self._cameras))

    def run(self, session: Session) -> None:
        """Trains the classifier, saves it in the run's folder and hands it to the environments.

        Raises: UserError where no demonstration or no other episode can be used.
        """
        successes, failures = self._episodes(session, self._reader.read(session))
        train, held_out = _split(successes, failures)
        session.note(f"success classifier: trained on {train.counts}, measured on {held_out.counts}")
        classifier = PictureClassifier(self._shapes, self._seed)
        self._train(classifier, train)
        classifier.raise_threshold(self._settings.threshold)
        measures = measures_of(classifier, held_out)
        session.note("success classifier, held-out pictures: " + ", ".join(f"{k} {v:.1%}" for k, v in measures.items()))
        folder = session.folder / FOLDER
        if folder.exists():
            shutil.rmtree(folder)  # of a run that ended before its first checkpoint
        with writing_with_checksums(folder, measures) as partial:
            saved = classifier.save(partial / FILE)
        _hand_out(session, replace(saved, file=str(folder / FILE)))

    @staticmethod
    def restore(session: Session) -> None:
        """Hands the classifier in the run's folder to the environments. Raises: UserError if it is damaged."""
        _hand_out(session, saved_classifier(session.folder))

    # -- pictures ----------------------------------------------------------------------------------------------------

    def _episodes(
        self, session: Session, demos: list[Demonstration]
    ) -> tuple[list[ExecutedEpisode], list[ExecutedEpisode]]:
        """The demonstrations, and episodes of random actions."""
        settings = self._settings
        session.note(f"success classifier: {counted(demos)}, {settings.num_failures} episodes of random actions")
        seeded = [(one.seed, one.actions) for one in demos if one.seed is not None]
        demonstrated = self._executed(session, seeded)
        if seeded and not any(one.success is not False for one in demonstrated):
            raise UserError(f"success_classifier.source={settings.source}: no replayed demonstration succeeds")
        demonstrated = [replace(one, success=one.success is not False) for one in demonstrated]
        # Files without seeds do not show what the last action led to; its picture is nearest to that.
        demonstrated += [
            ExecutedEpisode(pictures={name: _pictures(one, name) for name in self._cameras}, success=True)
            for one in demos
            if one.seed is None
        ]
        generator = np.random.default_rng([self._seed, SEED_STREAM])
        seeds = [int(seed) | TRAIN_SEED_BIT for seed in generator.integers(0, TRAIN_SEED_BIT, settings.num_failures)]
        # A held-out episode continues a held-out demonstration.
        continued = seeded[: len(seeded) - len(seeded) % HELD_OUT]
        wandering = []
        for number, seed in enumerate(seeds):
            actions = random_actions(self._actions, self._limit, generator)
            if continued and number // HELD_OUT % 2:
                seed, kept_actions = continued[number % len(continued)]
                num_kept = int(generator.integers(0, len(kept_actions)))
                actions = torch.cat([kept_actions[:num_kept], actions[num_kept:]])
            wandering.append((seed, actions))
        return demonstrated, self._executed(session, wandering)

    def _executed(self, session: Session, episodes: Sequence[tuple[int, Tensor]]) -> list[ExecutedEpisode]:
        executed: list[ExecutedEpisode] = []
        for first in range(0, len(episodes), EPISODES_AT_ONCE):
            seeds, actions = zip(*episodes[first : first + EPISODES_AT_ONCE], strict=True)
            arguments = (list(seeds), list(actions), self._cameras)
            (of_rank,) = session.group("env").call("execute", *arguments, ranks=[0])
            executed += of_rank
        return executed

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self, classifier: PictureClassifier, data: Labelled) -> None:
        """Each batch is half successes, half failures."""
        settings = self._settings
        generator = torch.Generator().manual_seed(self._seed)
        rows = [data.is_success.nonzero()[:, 0], (~data.is_success).nonzero()[:, 0]]
        half = settings.batch_size // 2
        optimizer = torch.optim.AdamW(classifier.parameters(), settings.learning_rate)
        labels = torch.cat([torch.ones(half), torch.zeros(half)])
        for _ in range(settings.num_steps):
            batch = torch.cat([each[torch.randint(len(each), (half,), generator=generator)] for each in rows])
            pictures = {name: values[batch] for name, values in data.pictures.items()}
            loss = binary_cross_entropy_with_logits(classifier(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def saved_classifier(run: Path) -> SuccessClassifier | None:
    """The classifier that gave the reward of a run; None: the environment did. Raises: UserError if it is damaged."""
    folder = run / FOLDER
    if not folder.exists():
        return None
    if (problem := damage(folder)) is not None:
        raise UserError(f"{folder}: {problem}", hint="a run cannot go on, nor be replayed, with another classifier")
    return SuccessClassifier(loader=CLASSIFIER_LOADER, file=str(folder / FILE), digest=file_digest(folder / FILE))


def measures_of(classifier: PictureClassifier, data: Labelled) -> dict[str, float]:
    """Accuracy, precision and recall; a share of nothing is 1."""
    with torch.inference_mode():
        accepted = torch.cat(
            [
                classifier({name: values[first : first + 64] for name, values in data.pictures.items()}) > 0
                for first in range(0, len(data.is_success), 64)
            ]
        )
    right = (accepted & data.is_success).sum()
    return {
        "accuracy": float((accepted == data.is_success).float().mean()),
        "precision": float(right / accepted.sum()) if accepted.any() else 1.0,
        "recall": float(right / data.is_success.sum()) if data.is_success.any() else 1.0,
    }


def random_actions(spec: ActionSpec, count: int, generator: np.random.Generator) -> Tensor:
    """[count, *action shape]: each is repeated a random number of times."""
    low, high = spec.low.numpy(), spec.high.numpy()
    actions: list[np.ndarray] = []
    while len(actions) < count:
        if spec.kind == "discrete":
            action = generator.integers(low, high, endpoint=True)
        else:
            action = generator.uniform(np.maximum(low, -1.0), np.minimum(high, 1.0)).astype(np.float32)
        actions += [np.asarray(action)] * int(generator.integers(1, MAX_HOLD, endpoint=True))
    return torch.from_numpy(np.stack(actions[:count]))


def _pictures(demonstration: Demonstration, name: str) -> Tensor:
    pictures = demonstration.observations[name]
    assert isinstance(pictures, Tensor), "the reader has checked it"
    return pictures


def _split(successes: list[ExecutedEpisode], failures: list[ExecutedEpisode]) -> tuple[Labelled, Labelled]:
    """For training, and held out."""
    held_out = [*successes[::HELD_OUT], *failures[::HELD_OUT]]
    train = [one for each in (successes, failures) for number, one in enumerate(each) if number % HELD_OUT]
    return Labelled.of(train), Labelled.of(held_out)


def _hand_out(session: Session, classifier: SuccessClassifier | None) -> None:
    assert classifier is not None, "the run has trained one"
    session.note(f"success classifier: {classifier.file} (SHA-256 {classifier.digest[:16]}) gives the reward")
    session.group("env").call("reward_by", classifier)
