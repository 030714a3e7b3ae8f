"""Rollout: samples completions with the latest synced weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlinf_algos import NonFiniteError
from rlinf_comm import record
from rlinf_comm.weights import Layout
from rlinf_workers.agents.settings import EpisodeSettings
from rlinf_workers.engines.base import (
    Completions,
    GenerationEngine,
    OnNewWeights,
    SupportsAbort,
    SupportsPause,
    UnfinishedCompletion,
)
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.engines.segments import extended
from rlinf_workers.errors import SettingsRefused, WorkersError
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.execution.stage_calls import WHOLE_BATCH
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.lora_settings import LoraSettings
from rlinf_workers.models.packed import computed_tokens
from rlinf_workers.models.sequences import fit_width
from rlinf_workers.plugins import ENGINES
from rlinf_workers.roles.language.late_groups import Departures, LateGroup, late_from_start
from rlinf_workers.roles.language.new_weights import WeightTakes
from rlinf_workers.roles.records.kept_tokens import KeptTokens
from rlinf_workers.roles.records.language import Prompt, SampleGroup, Segment
from rlinf_workers.serving import ServingWorker, layout_of_group
from rlinf_workers.spans import now_ns

Part = TypeVar("Part")


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """Settings of the rollout."""

    model: ModelSettings
    train: SamplingSettings
    evaluate: SamplingSettings
    max_prompt_tokens: int | None
    """Longest prompt to expect; None: all prompts have one length."""
    max_batch_sequences: int | None = None
    """Maximum number of completions sampled concurrently; None: as many as fit in the engine's memory."""
    engine: str = "huggingface"
    """A name of `plugins.ENGINES`, or an import path."""
    engine_options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further arguments of the engine's constructor."""
    on_new_weights: OnNewWeights = "finish"
    """How running completions go on when new weights arrive; finish: weights arrive between two stages alone."""
    agent: EpisodeSettings | None = None
    """Of episodes of many turns (`AgentRollout`); None: completions."""
    further_adapters: Mapping[str, LoraSettings] = field(default_factory=dict)
    """Worker group that trains a further policy -> the adapter that its engine serves beside its base."""
    max_lateness: int = 0
    """Steps by which a group may leave later than its prompt came in, so that a step does not wait for its slowest
    groups; 0: all groups leave in their step."""


class Rollout(ServingWorker):
    """Generates a group of completions for each prompt."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._settings = settings
        self._engine = self._make_engine(settings.model)
        self._served = self._engine
        self._groups: GroupsUnderWay[Any] = OpenGroups(1)
        self._late: list[LateGroup] = []
        """Groups of earlier steps that are not whole, or had no place in the latest step."""
        self._takes = WeightTakes()
        if settings.on_new_weights != "finish" and not isinstance(self._engine, SupportsPause):
            raise SettingsRefused(
                f"{settings.engine} cannot pause, so on_new_weights={settings.on_new_weights} is not possible"
            )

    def _make_engine(self, model: ModelSettings) -> GenerationEngine:
        settings = self._settings
        engine = ENGINES.get(settings.engine)
        takes_devices = "devices" in inspect.signature(engine).parameters
        return engine(
            model,
            self.device,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_batch_sequences=settings.max_batch_sequences,
            **({"devices": self.identity.devices} if takes_devices else {}),
            **settings.engine_options,
        )

    def generate(self, prompts: Reader[Prompt], samples: Writer[SampleGroup]) -> None:
        """Stage: samples a group for each prompt and sends it when all its completions have ended."""
        is_training = self.step.phase == "train"
        self._takes = (
            self._begin_takes() if is_training and self._settings.on_new_weights != "finish" else WeightTakes()
        )
        if self._settings.max_lateness and is_training:
            return self._generate_as_finished(prompts, samples)
        for chunk in prompts:
            for groups in self.sample(chunk, partial(self._further_chunk, prompts)):
                with prompts.hands_on(self._groups.close(groups)):
                    self._send(samples, [(group.index, group) for group in groups])

    def _send(self, samples: Writer[SampleGroup], groups: list[tuple[int, SampleGroup]]) -> None:
        """Puts whole groups, each with its index."""
        samples.put_many(groups)

    def sample(
        self, prompts: Sequence[Prompt], further_prompts: Callable[[int], Sequence[Prompt]] | None = None
    ) -> Iterator[list[SampleGroup]]:
        """Samples a group of completions for each prompt, and yields groups as their last completions end.

        Args:
            further_prompts: maps the engine's free capacity, in prompts, to more prompts to start; called while others
                are running. By default there are none.
        """
        sampling = self._settings.train if self.step.phase == "train" else self._settings.evaluate
        groups = OpenGroups(sampling.group_size)
        self._groups = groups
        waiting = prompts
        while waiting or groups:
            completions = self._take_due_weights()
            waiting = self._submit(waiting, further_prompts, groups, sampling)
            with self.asking():
                completions += self._engine.finished()
            finished = groups.add(completions)
            for group in finished:
                self._record(group, (self.step.step, group.index))
            if finished:
                yield finished

    def _generate_as_finished(self, prompts: Reader[Prompt], samples: Writer[SampleGroup]) -> None:
        """As many groups as there are prompts, in the order in which they become whole."""
        for chunk in prompts:  # one, with all prompts of this rank: when they arrive decides nothing
            for leaving in self._sample_as_finished(chunk):
                with prompts.hands_on([now_ns()] * len(leaving)):
                    samples.put_many(leaving)

    def _sample_as_finished(self, prompts: Sequence[Prompt]) -> Iterator[list[tuple[int, SampleGroup]]]:
        """Samples groups for the prompts, and goes on with late ones. Yields those that leave, each with the index that
        it takes over."""
        engine, sampling, first = self._engine, self._settings.train, self.step.num_items
        assert isinstance(engine, SupportsPause), "the config refuses other engines"
        late, submitted, departures = self._departures(prompts)
        groups = OpenGroups(sampling.group_size)
        self._groups = groups
        groups.open([one.prompt for one in late])
        with self.asking():
            engine.submit_unfinished([completion for one in late for completion in one.unfinished], sampling)
        waiting, held = prompts, dict[int, SampleGroup]()
        ended = [completions for one in late for completions in one.finished]
        while True:
            whole = groups.add(ended)
            held |= {group.index: group for group in whole}
            if leaving := departures.add(group.index for group in whole):
                yield [
                    (key, self._leaves(held.pop(index), key, submitted[index], is_late=index >= first))
                    for index, key in leaving
                ]
            if departures.all_left:
                break
            ended = self._take_due_weights()
            waiting = self._submit(waiting, None, groups, sampling)
            with self.asking():
                ended += engine.finished()
        with self.asking():
            unfinished = engine.suspend()
            whole = groups.add(engine.finished())  # what has ended meanwhile
        held |= {group.index: group for group in whole}
        self._late = groups.left_over(unfinished, held.values(), submitted)
        self._late += [late_from_start(prompt, self.step, sampling.group_size) for prompt in waiting]
        self._groups = OpenGroups(1)

    def _departures(self, prompts: Sequence[Prompt]) -> tuple[list[LateGroup], dict[int, tuple[int, int]], Departures]:
        """Late groups, numbered after the prompts of the step; step and index with which each group was submitted; and
        which groups leave."""
        late = [one.numbered(index) for index, one in enumerate(self._late, start=self.step.num_items)]
        submitted = {prompt.index: (self.step.step, prompt.index) for prompt in prompts}
        submitted |= {one.prompt.index: (one.step, one.submitted_index) for one in late}
        last = self.step.step - self._settings.max_lateness
        departures = Departures(
            [prompt.index for prompt in prompts], {index: step - last for index, (step, _) in submitted.items()}
        )
        return late, submitted, departures

    def _leaves(self, group: SampleGroup, key: int, submitted: tuple[int, int], *, is_late: bool) -> SampleGroup:
        """The group as prompt `key` of this step, recorded.

        Args:
            submitted: step and index with which its prompt was submitted.
        """
        self.record("rollout/late_fraction", float(is_late))
        group = replace(group, prompt=replace(group.prompt, index=key))
        self._record(group, submitted)
        return group

    def late_groups(self) -> list[LateGroup]:
        """The groups that go on in the next step; called between two steps."""
        return self._late

    def go_on_with(self, shares: Sequence[Sequence[LateGroup]]) -> None:
        """Sets the groups that go on in the next step.

        Args:
            shares: those of each rank.
        """
        self._late = list(shares[self.rank])

    # -- new weights in the middle of a stage ----------------------------------------------------------------------

    @property
    def _pausing(self) -> SupportsPause:
        """The engine, which can pause where weights are taken."""
        assert isinstance(self._engine, SupportsPause), "the constructor refuses others"
        return self._engine

    def weights_offered(self) -> None:
        if self._settings.on_new_weights != "finish":
            self._pausing.interrupt()

    def _begin_takes(self) -> WeightTakes:
        recorded = None if self.recorded is None else [one for rank, one in self.recorded if rank == self.rank]
        takes = WeightTakes.of_stage(self._pausing.num_steps, recorded)
        self._interrupt_at(takes)
        return takes

    def _take_due_weights(self) -> list[Completions]:
        """Takes the newest weights, or in a replay those that were taken at this decode step. Completions in flight go
        on with them as `on_new_weights` says.

        Returns: the completions that ended before the engine paused.
        """
        ended: list[Completions] = []
        while self._takes.is_open:
            num_steps = self._takes.num_steps(self._pausing.num_steps)
            version = self._takes.due(num_steps, self.newer_version)
            if version is None:
                break
            ended += self._take(version)
            self.decide({"took": version, "after": num_steps})
            self._interrupt_at(self._takes)
        return ended

    def _take(self, version: int) -> list[Completions]:
        ended: list[Completions] = []

        def pause() -> None:
            with self.asking():
                ended.extend(self._pausing.pause(self._settings.on_new_weights))

        def resume() -> None:
            with self.asking():
                self._pausing.resume()

        self.take_weights(version, pause=pause, resume=resume)
        return ended

    def _interrupt_at(self, takes: WeightTakes) -> None:
        """Has the engine stop where the next recorded weights are due."""
        if (step := takes.next_step) is not None:
            self._pausing.interrupt(step)

    def _submit(
        self,
        waiting: Sequence[Prompt],
        further_prompts: Callable[[int], Sequence[Prompt]] | None,
        groups: OpenGroups,
        sampling: SamplingSettings,
    ) -> Sequence[Prompt]:
        """Submits prompts to the engine. Returns those that exceed its free capacity."""
        size = sampling.group_size
        while (capacity := self._engine.free_capacity(size)) > 0:
            if not waiting and further_prompts is not None:
                waiting = further_prompts(capacity)
            if not waiting:
                break
            submitted, waiting = waiting[:capacity], waiting[capacity:]
            groups.open(submitted)
            with self.asking():
                self._engine.submit(submitted, sampling, seed=self.step.seed, step=self.step.step)
        if not groups:
            raise WorkersError(f"{self._settings.engine} is idle but has no free capacity for {size} completions")
        return waiting

    def _further_chunk(self, prompts: Reader[Prompt], capacity: int) -> list[Prompt]:
        """The next chunk, if it has already arrived and this replica may take it."""
        return prompts.ready_chunk() if self._may_take(prompts.granularity, capacity, len(self._groups)) else []

    def _may_take(self, num_items: int, room: int, num_open: int) -> bool:
        """Whether this replica may take a further chunk. It leaves to other replicas what exceeds its free capacity or
        its share of the prompts in flight. If there are no other replicas, or each has prompts of its own, it may
        always."""
        num_replicas = self.identity.num_replicas
        if num_replicas == 1 or num_items == WHOLE_BATCH:
            return True
        return num_items <= room and num_open + num_items <= max(num_items, -(-self.step.num_items // num_replicas))

    def _record(self, group: SampleGroup, submitted: tuple[int, int]) -> None:
        """Records a whole group.

        Args:
            submitted: step and index with which its prompt was submitted.

        Raises: NonFiniteError if the log-probabilities are not finite, since a broken model still samples something.
        """
        for part in (group, *group.of_policies.values()):
            if not part.rollout_logprobs.isfinite().all():
                raise NonFiniteError(
                    f"the log-probabilities of the completions of prompt {group.index} are not finite: the weights of "
                    "the model are broken, in its files or by training"
                )
        if self.records:
            tokens = {str(version): count for version, count in group.tokens_by_version().items()}
            submission = {"submitted": list(submitted), "tokens": tokens}
            self.decide({"group": group.index, "samples": group.digest()} | submission)
        self.count_tokens(*computed_tokens([group, *group.of_policies.values()]))
        self._measure(group)

    def _measure(self, group: SampleGroup, prefix: str = "") -> None:
        """Records lengths and entropy of a group.

        Args:
            prefix: of the metrics.
        """
        size, tokens = group.num_counted, float(group.loss_mask.sum())
        if not size:
            return
        self.record(f"{prefix}rollout/completion_tokens", tokens / size)
        if group.kept_tokens is not None:
            num_kept = int(group.kept_tokens.counts.sum())
            self.record(f"{prefix}rollout/kept_tokens", num_kept / max(tokens, 1.0), weight=tokens)
        self.record(f"{prefix}rollout/entropy", -float(group.rollout_logprobs.sum()) / max(tokens, 1.0), weight=tokens)
        if group.truncated is not None:
            num_truncated = float((group.by_episode(group.truncated.int()) > 0).sum())
            self.record(f"{prefix}rollout/truncated_fraction", num_truncated / size)

    def layout(self) -> Layout:
        return layout_of_group(self._engine, self.num_ranks)

    def weights_received(self, policy_version: int) -> None:
        super().weights_received(policy_version)
        with self.asking():
            self._engine.weights_received(policy_version)

    def abandon(self) -> None:
        if not self._groups:
            return
        if not isinstance(self._engine, SupportsAbort):
            raise WorkersError(f"{self._settings.engine} cannot cancel the {len(self._groups)} groups in flight")
        with self.asking():
            self._engine.abandon()
        self._groups = OpenGroups(1)

    def close(self) -> None:
        self._engine.close()


class GroupsUnderWay(Generic[Part]):
    """Groups that are not whole, which `len` counts, and when each group was opened.

    Args:
        group_size: parts of a group.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self._open: dict[int, tuple[Prompt, Part]] = {}
        """Index of a prompt -> the prompt, and what has come back for it."""
        self._began_ns: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def close(self, groups: Iterable[SampleGroup]) -> list[int]:
        """Returns when (`spans.now_ns`) each of these whole groups was opened, and forgets them."""
        return [self._began_ns.pop(group.index) for group in groups]


class OpenGroups(GroupsUnderWay[list[Completions]]):
    """Groups whose completions have not all come back."""

    def open(self, prompts: Iterable[Prompt]) -> None:
        """Registers prompts that were submitted."""
        for prompt in prompts:
            self._open[prompt.index] = prompt, []
            self._began_ns[prompt.index] = now_ns()

    def add(self, finished: Iterable[Completions]) -> list[SampleGroup]:
        """Returns the groups that are now complete.

        Raises: WorkersError for completions of a prompt that is not in flight.
        """
        whole = []
        for part in finished:
            if part.index not in self._open:
                raise WorkersError(f"the engine finished completions of prompt {part.index}, which is not in flight")
            prompt, parts = self._open[part.index]
            parts.append(part)
            if sum(len(one.members) for one in parts) >= self.group_size:
                del self._open[part.index]
                whole.append(_group(prompt, parts, self.group_size))
        return whole

    def left_over(
        self,
        unfinished: Sequence[UnfinishedCompletion],
        whole: Iterable[SampleGroup],
        submitted: Mapping[int, tuple[int, int]],
    ) -> list[LateGroup]:
        """The groups that go on in the next step, those that are open and those that are whole.

        Args:
            unfinished: all completions of the open groups that have not ended.
            submitted: index of a group -> step and index with which its prompt was submitted.
        """
        left = [
            _late_group(prompt, submitted[index], parts, [one for one in unfinished if one.prompt.index == index])
            for index, (prompt, parts) in self._open.items()
        ]
        left += [_late_group(group.prompt, submitted[group.index], [_completions(group)], []) for group in whole]
        return sorted(left, key=lambda one: (one.step, one.prompt.index))


def _group(prompt: Prompt, parts: Sequence[Completions], group_size: int) -> SampleGroup:
    members = [member for part in parts for member in part.members]
    if sorted(members) != list(range(group_size)):
        raise WorkersError(f"prompt {prompt.index}: of {group_size} completions the engine finished {sorted(members)}")
    order = torch.tensor(members).argsort()
    width = max(part.token_ids.shape[1] for part in parts)

    def join(name: str) -> Tensor:
        rows: list[Tensor] = [getattr(part, name) for part in parts]
        return torch.cat([fit_width(row, width) if row.dim() > 1 else row for row in rows])[order]

    has_experts = all(part.experts is not None for part in parts)
    return SampleGroup(
        prompt=prompt,
        completion_ids=join("token_ids"),
        loss_mask=join("loss_mask"),
        rollout_logprobs=join("logprobs"),
        policy_version=min(part.policy_version for part in parts),
        truncated=join("truncated"),
        segments=_segments(parts, group_size),
        prompt_experts=parts[0].prompt_experts,
        experts=_experts(parts)[order] if has_experts else None,
        kept_tokens=_kept_tokens(parts, order),
    )


def _kept_tokens(parts: Sequence[Completions], order: Tensor) -> KeptTokens | None:
    kept_tokens = [part.kept_tokens for part in parts if part.kept_tokens is not None]
    return KeptTokens.joined(kept_tokens, order) if len(kept_tokens) == len(parts) else None


def _experts(parts: Sequence[Completions]) -> Tensor:
    """[G, E, layers, k], in the order of the parts."""
    experts = [part.experts for part in parts if part.experts is not None]
    width = max(one.shape[1] for one in experts)
    return torch.cat([pad(one, (0, 0, 0, 0, 0, width - one.shape[1])) for one in experts])


def _late_group(
    prompt: Prompt,
    submitted: tuple[int, int],
    finished: Sequence[Completions],
    unfinished: Sequence[UnfinishedCompletion],
) -> LateGroup:
    step, index = submitted
    return LateGroup(
        prompt=prompt, step=step, submitted_index=index, finished=tuple(finished), unfinished=tuple(unfinished)
    )


def _completions(group: SampleGroup) -> Completions:
    """The completions of a whole group."""
    assert group.truncated is not None, "engines say it"
    return Completions(
        index=group.index,
        members=tuple(range(len(group.loss_mask))),
        token_ids=group.completion_ids,
        loss_mask=group.loss_mask,
        logprobs=group.rollout_logprobs,
        truncated=group.truncated,
        policy_version=group.policy_version,
        segments=group.segments,
        prompt_experts=group.prompt_experts,
        experts=group.experts,
        kept_tokens=group.kept_tokens,
    )


def _segments(parts: Sequence[Completions], group_size: int) -> tuple[tuple[Segment, ...], ...]:
    """The segments of the completions of a group; empty if one version sampled all of it."""
    if not any(part.segments for part in parts) and len({part.policy_version for part in parts}) == 1:
        return ()
    by_member: list[tuple[Segment, ...]] = [()] * group_size
    for part in parts:
        for row, member in enumerate(part.members):
            if part.segments:
                by_member[member] = part.segments[row]
            else:
                by_member[member] = extended((), int(part.loss_mask[row].sum()), part.policy_version)
    return tuple(by_member)
