"""The protocol of generation engines: prompts in, completions out, several at once and in any order.

The rollout stage (roles/language/rollout.py) keeps an engine busy: it submits prompts while there is free capacity,
takes finished completions, and sends each group when all its completions have ended. An engine knows nothing of
channels, leases or plans.

    engine.submit([prompt, ...], sampling, seed=0, step=12)   at most engine.free_capacity(sampling.group_size) prompts
    engine.finished() -> [Completions]                        until all have come back
    engine.submit([...], ...)                                 also while earlier prompts are in flight

Each engine states whether the same prompt, seed and step give the same tokens in any batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_comm.weights import Layout
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings
from rlinf_workers.roles.records.kept_tokens import KeptTokens
from rlinf_workers.roles.records.language import Prompt, Segment
from rlinf_workers.weight_sync.base import WeightPort, WeightReceiver

OnNewWeights = Literal["finish", "keep", "recompute"]
"""How running completions go on when new weights arrive.

finish: they end with the earlier weights first.
keep: their KV cache stays as the earlier weights computed it; further tokens are sampled with the new weights.
recompute: the new weights compute their KV cache again, from the prompt and the tokens so far.
"""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """Finished completions of one prompt: N of its group of G.

    Example: completions 0 and 3 of prompt 7; T = 3 tokens, the second one ended after 2:
        index = 7, members = (0, 3), token_ids = [[5, 9, 4], [5, 2, 0]], loss_mask = [[1, 1, 1], [1, 1, 0]]
    """

    index: int
    """`Prompt.index`"""
    members: tuple[int, ...]
    """Indices of these completions in the group, from 0; each comes back once."""
    token_ids: Tensor
    """[N, T] int64 on the CPU, T at most max_new_tokens; arbitrary after the end of a row."""
    loss_mask: Tensor
    """[N, T] float32; 1 on sampled tokens, the end token included, then 0."""
    logprobs: Tensor
    """[N, T] float32, nats, of the full distribution at the sampling temperature (1 for greedy), or among the
    `kept_tokens`; 0 where loss_mask is 0."""
    truncated: Tensor
    """[N] bool; the completion reached max_new_tokens without ending."""
    prompt_experts: Tensor | None = None
    """As in `SampleGroup`; None unless `SamplingSettings.records_experts`."""
    experts: Tensor | None = None
    """[N, E, layers, k], as in `SampleGroup`."""
    kept_tokens: KeptTokens | None = None
    """Of the N rows; None unless `SamplingSettings.records_kept`."""
    policy_version: int
    """Version of the weights that sampled the first tokens, -1 before any were received. A property of completions, not
    of groups: if weights arrive while completions are in flight, those of one group may begin under different
    versions."""
    segments: tuple[tuple[Segment, ...], ...] = ()
    """For each of the N completions, the versions that sampled its tokens, from the first token on; empty:
    `policy_version` sampled all of them."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedCompletion:
    """A suspended completion, with all that is needed to continue it: later, after a restart, or in another engine."""

    prompt: Prompt
    """The caller may change its index; the noise stays the same."""
    member: int
    """Index in its group."""
    token_ids: Tensor
    """[T] int64 on the CPU, the tokens so far; may be empty."""
    logprobs: Tensor
    """[T] float32, as in `Completions`."""
    segments: tuple[Segment, ...]
    """The versions that sampled these tokens."""
    kept_tokens: KeptTokens | None = None
    """As in `Completions`, of one row."""
    noise: NoiseKey


def not_begun(prompt: Prompt, group_size: int, noise: NoiseKey) -> tuple[UnfinishedCompletion, ...]:
    """The completions of a prompt that an engine has not begun."""
    nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    return tuple(
        UnfinishedCompletion(
            prompt=prompt, member=member, token_ids=nothing[0], logprobs=nothing[1], segments=(), noise=noise
        )
        for member in range(group_size)
    )


class GenerationEngine(Protocol):
    """Samples completions with a model whose weights are synced from outside.

    Each rank of the rollout has one instance; all methods are called from one thread. The ranks of a replica make the
    same calls in the same order, so `free_capacity` and `finished` return the same on each. The rollout creates it as
    `Engine(model, device, max_prompt_tokens=..., max_batch_sequences=..., **engine_options)`:
        model: ModelSettings, the folder with config and tokenizer, and whether it has initial weights.
        device: the rank's first device; the process sees only the rank's own GPUs.
        max_prompt_tokens: the longest prompt to expect; None: all prompts have one length.
        max_batch_sequences: maximum number of concurrent completions; None: as many as fit in memory.
        devices: names of the rank's devices (`Identity.devices`), for an engine whose constructor takes them, which
        shards
            the model over them.
        engine_options: the recipe's `rollout.engine_options`.
    """

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int, step: int) -> None:
        """Accepts prompts, at most `free_capacity`; may begin with them at once.

        Args:
            prompts: their indices differ from those of the prompts in flight.
            seed: the run's seed. With step and index it determines the noise in engines that guarantee equal numbers.
        Raises: ValueError for a prompt that is too long.
        """
        ...

    def finished(self) -> list[Completions]:
        """Returns the completions that finished since the last call, in any order; each exactly once.

        Waits until there is at least one, so it is empty only if nothing is in flight.
        """
        ...

    def free_capacity(self, group_size: int) -> int:
        """How many prompts with this group size it accepts now; at least one if nothing is in flight."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that it serves, named like the buffers of `layout`; a weight sync fills them in place."""
        ...

    def layout(self) -> Layout:
        """The placement of the canonical tensors (Hugging Face names) in `weights`, on each rank of a replica; of one
        rank if all hold the same."""
        ...

    def weights_received(self, policy_version: int) -> None:
        """Called when `weights` hold that version. Drops what was computed from earlier ones, such as a prefix
        cache."""
        ...

    def onload(self) -> None:
        """Moves its state onto the devices."""
        ...

    def offload(self) -> None:
        """Moves its state off the devices. Completions in flight continue after `onload`."""
        ...

    def close(self) -> None:
        """Frees its resources, such as processes. Called once."""
        ...


@runtime_checkable
class SupportsDiscard(Protocol):
    """Optional: gives up its weights. Without it, an engine keeps them while it is offloaded."""

    def discard(self) -> None:
        """As `offload`, if a weight sync fills `weights` after the next `onload`, before anything reads them. Frozen
        weights beside an adapter must be kept: they are received only once."""
        ...


@runtime_checkable
class SupportsMemoryReport(Protocol):
    """Optional: for an engine with its own processes, in containers, where the driver lists other process ids."""

    def reserved_bytes(self) -> int:
        """GPU memory that torch has reserved at most in one of its processes, CUDA's own not counted."""
        ...


@runtime_checkable
class SupportsAbort(Protocol):
    """Optional: cancels requests in flight. Without it, the worker's process is replaced if a run is abandoned
    meanwhile."""

    def abandon(self) -> None:
        """Cancels everything in flight; none of it comes back later. The engine may be offloaded."""
        ...


@runtime_checkable
class SupportsPause(Protocol):
    """Optional: receives weights while completions are in flight, and hands back unfinished ones.

        engine.interrupt()                               any thread; `finished` returns soon, at engine.num_steps
        ended = engine.pause("recompute")                then the weight sync fills `weights`
        engine.weights_received(8)
        engine.resume()

        unfinished = engine.suspend()                    the engine is empty
        engine.submit_unfinished(unfinished, sampling)   they go on, here or in another engine, with its weights

    No token is sampled twice, and sampled tokens keep their log-probabilities. Where noise belongs to the prompt, token
    t of a completion has the same noise whether or not it was paused or suspended before.
    """

    @property
    def num_steps(self) -> int:
        """Decode steps since the engine was created. In engines that guarantee equal numbers, equal calls between the
        same steps give the same completions; others may count something else that grows as they generate."""
        ...

    def interrupt(self, at_step: int = 0) -> None:
        """Makes the running call of `finished`, or the next one, return between two decode steps, even if no completion
        has finished. May be called from any thread.

        Args:
            at_step: the value of `num_steps` at which it returns; the next step by default. Only for the thread that
                calls the other methods; it replaces an earlier one. An engine without equal numbers may ignore it.
        """
        ...

    def pause(self, on_new_weights: OnNewWeights) -> list[Completions]:
        """Stops generating until `resume`; `weights` may change meanwhile. `weights_received` then treats running
        completions as `on_new_weights` says. Completions that have no token yet begin with the new weights.

        Returns: the completions that ended first, with `finish`; otherwise those that ended by themselves meanwhile.
        Raises: ValueError if the engine cannot do this with its settings.
        """
        ...

    def resume(self) -> None:
        """Generates again, in the engines that only compute within `finished` with its next call."""
        ...

    def suspend(self) -> list[UnfinishedCompletion]:
        """Takes back everything in flight; `finished` does not return it. Afterwards the engine is empty. Completions
        that ended meanwhile are not included; `finished` returns them."""
        ...

    def submit_unfinished(self, unfinished: Sequence[UnfinishedCompletion], sampling: SamplingSettings) -> None:
        """Continues suspended completions, from their last token and with the current weights; they are accepted
        whatever the free capacity, and begin before prompts that are submitted later.

        Args:
            sampling: as before.
        """
        ...


@runtime_checkable
class RemoteWeights(Protocol):
    """Optional: for an engine whose weights live in its own processes.

    `weights` is then empty, and `layout` describes the weights in those processes, whatever the number of ranks: each
    rank has an engine, with as many receiving ends of a weight sync edge as it has processes. `engines.processes`
    implements it for an engine that can call a function in each of its processes.
    """

    def open_receiver(self, ports: Sequence[WeightPort]) -> WeightReceiver:
        """Opens the receiving ends of an edge, one per process.

        Args:
            ports: in the order of the layout's ranks.

        Returns: a receiver that fills all of them. Its `receive` gets no tensors; the check that it returns runs before
        a prompt is submitted.

        Raises: WeightSyncRefused, like WeightSync.open_receiver.
        """
        ...

    def process_ids(self) -> Sequence[int]:
        """Process ids of these processes on this machine, for diagnosing a hang; can be called from any thread."""
        ...
