"""Demonstrations of an embodied run, and the SFT warm-up: supervised training on them, before the first step.

Files are opened, and their first episode is compared with what the environment shows and the policy reads, before any
process starts; the others when the SFT warm-up reads them. Experts are recorded by the env workers, in whose Python
environment the simulator is. The batches are a function of the seed and the demonstrations alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlinf.config.embodied import DemonstrationsConfig, EmbodiedConfig, EnvConfig, ImitationConfig
from rlinf.errors import UserError
from rlinf_envs import (
    ActionSpec,
    Demonstration,
    DemonstrationFiles,
    EnvError,
    FieldSpec,
    RunEnvironment,
    open_demonstrations,
)
from rlinf_workers import Flow
from rlinf_workers.policies import Needs
from rlinf_workers.roles import (
    TRAIN_SEED_BIT,
    DaggerActor,
    DemonstratedBatch,
    EnvInterface,
    ImitatingActor,
    text_tensor,
)
from rlinf_workers.trainers import OptimizerSettings

if TYPE_CHECKING:
    from rlinf.loop.session import Session

WARMUP_STEPS = 20
"""Optimizer steps over which the learning rate rises to its full value."""
STEPS_AT_ONCE = 50
"""Optimizer steps between two lines about the loss."""
MAX_FAILURES = 20
"""Episodes of a task in a row in which its expert may fail."""
SEED_STREAM = 1 << 40
"""Draws the experts' first seed; training steps, whose numbers stand in its place, do not come so far."""


class DemonstrationReader:
    """Reads or records the demonstrations of a section of the config.

    Raises: UserError where files are missing, hold something else, or do not go with environment and policy.
    """

    def __init__(
        self, settings: DemonstrationsConfig, config: EmbodiedConfig, interface: EnvInterface, needs: Needs
    ) -> None:
        self._settings, self._interface, self._needs = settings, interface, needs
        self._at, self._seed = settings.AT, config.seed
        self._files: DemonstrationFiles | None = None
        if settings.path is not None:
            self._open(f"{self._at}.path={settings.path}", settings.path, config.env)

    def _open(self, at: str, path: Path, env: EnvConfig) -> None:
        settings = self._settings
        try:
            environment = RunEnvironment(fields=self._interface.fields, options=env.options)
            files = open_demonstrations(
                settings.source, path, rename=settings.rename, environment=environment, kind=env.spec
            )
        except EnvError as error:
            raise UserError(f"{at}: {error}") from error
        if len(files) < settings.num_episodes:
            raise UserError(
                f"{at}: it has {len(files)} successful episodes, and {self._at}.num_episodes={settings.num_episodes}",
                hint=f"use --{self._at}.num_episodes {len(files)}",
            )
        check_recorded_in(at, files, env)
        self._files = files
        self._episode(0)

    def _episode(self, number: int) -> Demonstration:
        """A successful episode of the files. Raises: UserError where it is not what environment and policy take."""
        assert self._files is not None, "there are no files"
        at = f"{self._at}.path={self._settings.path}, successful episode {number}"
        try:
            demo = self._files[number]
        except EnvError as error:
            raise UserError(f"{at}: {error}") from error
        self._check(at, demo)
        return demo

    def read(self, session: Session) -> list[Demonstration]:
        """All of them. Raises: UserError where the experts fail all the time, or an episode is not like the first."""
        if self._files is None:
            return self._recorded(session)
        return [self._episode(number) for number in range(self._settings.num_episodes)]

    def _recorded(self, session: Session) -> list[Demonstration]:
        """What the experts did right, with seeds that count up: a suite's tasks take turns.

        Raises: UserError where the expert of a task fails all the time.
        """
        drawn = int(np.random.SeedSequence([self._seed, SEED_STREAM]).generate_state(1)[0])
        seed = drawn >> 2 | TRAIN_SEED_BIT  # room above it for those that follow
        demos: list[Demonstration] = []
        failures: Counter[str] = Counter()
        """Task -> episodes in which its expert failed since it last succeeded."""
        while len(demos) < self._settings.num_episodes:
            (demo,) = (one for of_rank in session.group("env").call("demonstrate", seed) for one in of_rank)
            seed += 1
            failures[demo.task] = 0 if demo.success else failures[demo.task] + 1
            demos += [demo] if demo.success else []
            if failures[demo.task] == MAX_FAILURES:
                raise UserError(
                    f"{self._at}.source=experts: the expert of {demo.task} failed {MAX_FAILURES} times in a row",
                    hint="give it more time with --env.max_episode_steps, or shorter actions",
                )
        for task in sorted(failures.keys() - {one.task for one in demos}):
            session.note(
                f"{self._at}: no demonstration of {task}: its expert failed {failures[task]} times; more time "
                f"(env.max_episode_steps), more demonstrations ({self._at}.num_episodes), or the suite without it"
            )
        return demos

    # -- what can be wrong -------------------------------------------------------------------------------------------

    def _check(self, at: str, demo: Demonstration) -> None:
        check_demonstration(
            at, demo, self._needs.reads, self._interface, rename=f"{self._at}.rename: {{NAME_THERE: FIELD}}"
        )
        if self._needs.reads_gripper_sign:
            self._check_gripper(at, demo.actions)

    @staticmethod
    def _check_gripper(at: str, actions: Tensor) -> None:
        """Raises: UserError for a gripper that moves without a change of sign: it would be learned as never moved. One
        that stays where it is does not say how it counts."""
        gripper = actions.flatten(1)[:, -1]
        low, high = gripper.min().item(), gripper.max().item()
        if 0 <= low < high:
            raise UserError(
                f"{at}: the last number of its actions, the gripper's, is from {low:g} to {high:g}, and with "
                "policy.options.gripper it has to be from -1 to 1, as the environment takes it: its sign says which "
                "side it is on",
                hint="write 2 x - 1 in place of x into the files, or 1 - 2 x where the environment counts the other "
                "way",
            )


class SftWarmUp:
    """The SFT warm-up of one run. Raises: as `DemonstrationReader`.

    Args:
        is_kept: the actor keeps the demonstrations afterwards (`DaggerActor.remember`).
    """

    def __init__(
        self,
        settings: ImitationConfig,
        config: EmbodiedConfig,
        interface: EnvInterface,
        needs: Needs,
        *,
        is_kept: bool = False,
    ) -> None:
        self._settings, self._interface, self._needs = settings, interface, needs
        self._num_shards, self._seed = config.actor.num_shards, config.seed
        self._reader = DemonstrationReader(settings, config, interface, needs)
        self._is_kept = is_kept
        self._flow: Flow | None = None
        self._keeping: Flow | None = None

    @property
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(
            learning_rate=self._settings.learning_rate,
            lr_warmup_steps=WARMUP_STEPS,
            lr_decay_steps=self._settings.num_steps,
        )

    def flows_of(self, train: Flow) -> list[Flow]:
        """The stages do not say that they train: nobody takes weights between their runs, and `run` hands them over."""
        self._flow = Flow("sft-warm-up").workers_of(train, "actor")
        self._flow.stage("actor", ImitatingActor.imitate, reads="demonstrated", dispatch="key", ordered=True)
        if not self._is_kept:
            return [self._flow]
        self._keeping = Flow("demonstrations").workers_of(train, "actor")
        self._keeping.stage("actor", DaggerActor.remember, reads="demonstrated", dispatch="key", ordered=True)
        return [self._flow, self._keeping]

    def run(self, session: Session) -> None:
        """Raises: UserError where the experts fail all the time, or an episode is not like the first."""
        assert self._flow is not None, "flows_of comes first"
        demos = self._reader.read(session)
        chunks = Chunks.of(demos, self._needs, self._interface.actions)
        session.note(f"SFT warm-up: {counted(demos)}, {len(chunks.actions)} chunks")
        for first in range(0, self._settings.num_steps, STEPS_AT_ONCE):
            steps = range(first, min(first + STEPS_AT_ONCE, self._settings.num_steps))
            feeds = {"demonstrated": [batch for step in steps for batch in self._batches(chunks, step)]}
            flow_run = session.run_flow(self._flow, step=0, feeds=feeds)
            session.message(f"SFT warm-up {steps.stop}: loss {flow_run.metrics['sft_warm_up/loss']:.3f}")
        if self._keeping is not None:
            everything = self._shards(chunks, torch.arange(len(chunks.actions)), step=0)
            session.run_flow(self._keeping, step=0, feeds={"demonstrated": everything})
        session.sync_weights()

    def _batches(self, chunks: Chunks, step: int) -> list[DemonstratedBatch]:
        """One batch as one item a shard."""
        generator = torch.Generator().manual_seed((self._seed << 40) + step)
        rows = torch.randint(len(chunks.actions), (self._settings.batch_size,), generator=generator)
        return self._shards(chunks, rows, step)

    def _shards(self, chunks: Chunks, rows: Tensor, step: int) -> list[DemonstratedBatch]:
        """These rows as one item a shard."""
        return [
            DemonstratedBatch(
                step=step,
                shard=shard,
                fields={name: values[rows[shard :: self._num_shards]] for name, values in chunks.fields.items()},
                actions=chunks.actions[rows[shard :: self._num_shards]],
            )
            for shard in range(self._num_shards)
        ]


def check_recorded_in(at: str, files: DemonstrationFiles, env: EnvConfig) -> None:
    """Raises: UserError for files of another task, or with other options of the environment, as far as recorded."""
    if not files.are_of(env.id, env.options):
        tasks = f" with env.options.tasks={env.options['tasks']}" if env.options.get("tasks") else ""
        raise UserError(
            f"{at}: it was recorded with env.id={files.env_id}, and the config has {env.id}{tasks}",
            hint=f"use --env.id {files.env_id}, a suite with this task, or other demonstrations",
        )
    chosen = {**files.defaults, **env.options}
    for name, value in files.options.items():
        if chosen.get(name, value) != value:
            raise UserError(
                f"{at}: it was recorded with env.options.{name}={value}, and the config has {chosen[name]}",
                hint=f"use --env.options.{name} {value}, or other demonstrations",
            )


def check_demonstration(
    at: str, demo: Demonstration, reads: Sequence[str], interface: EnvInterface, *, rename: str
) -> None:
    """Compares a demonstration with what an environment shows and takes.

    Args:
        at: where it comes from, as messages begin.
        reads: the fields that a policy reads.
        rename: how the user maps names.

    Raises: UserError.
    """
    for name in reads:
        if name not in demo.observations:
            raise UserError(
                f"{at}: it has no {name!r}, which the policy reads; it has {', '.join(sorted(demo.observations))}",
                hint=f"if it has another name there, say so with {rename.replace('FIELD', name)}",
            )
        actual, expected = _spec_of(demo, name), interface.fields[name]
        if (list(actual.shape), actual.dtype) != (list(expected.shape), expected.dtype):
            raise UserError(
                f"{at}: {name!r} is {actual.dtype} of shape {list(actual.shape)}, and the environment shows "
                f"{expected.dtype} of shape {list(expected.shape)}",
                hint="choose options of the environment (env.options) that show what was recorded",
            )
        _check_finite(at, name, demo.observations[name])
    _check_actions(at, demo.actions, interface.actions)
    _check_finite(at, "actions", demo.actions)


def _check_finite(at: str, name: str, values: Tensor | Sequence[str]) -> None:
    if isinstance(values, Tensor) and not (finite := values.isfinite().flatten(1).all(dim=1)).all():
        row = int((~finite).nonzero()[0])
        raise UserError(f"{at}: row {row} of {name!r} has a number that is not finite: {values[row].tolist()}")


def _check_actions(at: str, actions: Tensor, spec: ActionSpec) -> None:
    kind = "continuous" if actions.is_floating_point() else "discrete"
    if (kind, list(actions.shape[1:])) != (spec.kind, list(spec.shape)):
        raise UserError(
            f"{at}: its actions are {kind} of shape {list(actions.shape[1:])}, and the environment takes "
            f"{spec.kind} ones of shape {list(spec.shape)}",
            hint="the robot and its control mode have to be those that were recorded",
        )


class Chunks:
    """What was shown, and the K actions that followed, of every moment of every demonstration; N rows. Behind the end
    of an episode its last action is repeated, as LeRobot's loader does."""

    def __init__(self, fields: dict[str, Tensor], actions: Tensor) -> None:
        self.fields, self.actions = fields, actions

    @classmethod
    def of(cls, demonstrations: Sequence[Demonstration], needs: Needs, spec: ActionSpec) -> Chunks:
        """Discrete actions count from 0 on, as policies do."""
        fields: dict[str, Tensor] = {}
        for name in needs.reads:
            values = [demonstration.observations[name] for demonstration in demonstrations]
            fields[name] = torch.cat([v if isinstance(v, Tensor) else text_tensor(v) for v in values])
        actions, least = [], 0 if spec.kind == "continuous" else spec.low.flatten()
        for demonstration in demonstrations:
            flat = demonstration.actions.reshape(len(demonstration.actions), -1) - least
            after = torch.arange(len(flat))[:, None] + torch.arange(needs.chunk_size)
            actions.append(flat[after.clamp(max=len(flat) - 1)])
        return cls(fields, torch.cat(actions))


def counted(demos: Sequence[Demonstration]) -> str:
    """How many demonstrations there are, and of which task."""
    counts = Counter(one.task for one in demos)
    if len(counts) == 1:
        return f"{len(demos)} demonstrations of {demos[0].task}"
    return f"{len(demos)} demonstrations ({', '.join(f'{counts[task]} of {task}' for task in sorted(counts))})"


def _spec_of(demo: Demonstration, name: str) -> FieldSpec:
    values = demo.observations[name]
    if not isinstance(values, Tensor):
        return FieldSpec(shape=(), dtype="text")
    return FieldSpec(shape=tuple(values.shape[1:]), dtype="uint8" if values.dtype == torch.uint8 else "float32")
