"""What every generation engine offers: prompts in, completions out, several at once and in any order.

The rollout stage (roles/language/rollout.py) keeps an engine full: it submits prompts while there is room, takes what
has finished, puts groups together and hands each on when all its completions have ended. An engine knows nothing of
channels, leases or plans.

    engine.submit([prompt, ...], sampling, seed=0, step=12)   as many as engine.free_capacity(sampling.group_size) says
    engine.finished() -> [Completions]                        until all have come back
    engine.submit([...], ...)                                 also while earlier ones are on their way

Whether the same prompt, seed and step give the same tokens in any batch is for each engine to promise or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from rlinf_comm.weights import Layout
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.weight_sync.base import WeightPort, WeightReceiver


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """Finished completions of one prompt, one or several: N of its group of G.

    Example: completions 0 and 3 of prompt 7; T = 3 tokens, the second one ended after 2:
        index = 7, members = (0, 3), token_ids = [[5, 9, 4], [5, 2, 0]], loss_mask = [[1, 1, 1], [1, 1, 0]]
    """

    index: int
    """`Prompt.index`"""
    members: tuple[int, ...]
    """Which completions of the group these are, from 0; each comes back once."""
    token_ids: Tensor
    """[N, T] int64 on the CPU, T at most max_new_tokens; what stands behind the end of a row says nothing."""
    loss_mask: Tensor
    """[N, T] float32; 1 on sampled tokens, the end token included, then 0."""
    logprobs: Tensor
    """[N, T] float32, nats, of the full distribution at the sampling temperature (at 1 for greedy); 0 where loss_mask
    is 0."""
    truncated: Tensor
    """[N] bool; the completion has max_new_tokens tokens and did not end."""
    policy_version: int
    """Version of the weights that sampled the first tokens, -1 before any came. It belongs to completions and not to
    groups: where weights arrive while completions are under way, those of one group begin under different versions."""


class GenerationEngine(Protocol):
    """Samples completions with a model whose weights are filled from outside.

    One object for each rank of the rollout; all methods are called from one thread. The ranks of a replica make the
    same calls in the same order, so `free_capacity` and `finished` answer the same on each. The rollout makes it as
    `Engine(model, device, max_prompt_tokens=..., max_batch_sequences=..., **engine_options)`:
        model: ModelSettings, the folder with config and tokenizer, and whether it has the first weights.
        device: the rank's first device; the process sees no GPUs but the rank's own.
        max_prompt_tokens: the longest prompt that comes; None: all prompts have one length.
        max_batch_sequences: completions to sample at once, at most; None: as many as its memory holds.
        devices: names of the rank's devices (`Identity.devices`), for an engine whose constructor takes them: it cuts
            the model over them.
        engine_options: what the recipe says under `rollout.engine_options`.
    """

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int, step: int) -> None:
        """Takes prompts, at most as many as `free_capacity` says; may begin with them at once.

        Args:
            prompts: their indices differ from those of the prompts under way.
            seed: the run's seed. With step and index it decides the noise, in engines that promise equal numbers.
        Raises: ValueError for a prompt that is too long.
        """
        ...

    def finished(self) -> list[Completions]:
        """What has finished since it was last asked, in any order; each completion comes back exactly once.

        Waits until there is something, so that it is empty only when nothing is under way.
        """
        ...

    def free_capacity(self, group_size: int) -> int:
        """How many prompts of so many completions it takes now; at least one when nothing is under way."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The tensors that it serves, named as the buffers of `layout`; a weight sync fills them in place."""
        ...

    def layout(self) -> Layout:
        """Where the boxes of the canonical tensors (Hugging Face names) lie in `weights`, on each rank of a replica;
        of one rank, where all hold the same."""
        ...

    def weights_received(self, policy_version: int) -> None:
        """`weights` hold that version from now on. Drops what was computed from earlier ones, a prefix cache say."""
        ...

    def onload(self) -> None:
        """Brings its state onto the devices."""
        ...

    def offload(self) -> None:
        """Takes its state off the devices. What is under way waits, and goes on after `onload`."""
        ...

    def close(self) -> None:
        """Ends what it has started, processes for example. Called once."""
        ...


@runtime_checkable
class SupportsAbort(Protocol):
    """What an engine has besides that can forget what is under way. The process of another one ends where a run is
    given up meanwhile, and a new one takes its place."""

    def abandon(self) -> None:
        """Nothing is under way afterwards, and nothing of it ever comes back. Its state may be off the devices."""
        ...


@runtime_checkable
class RemoteWeights(Protocol):
    """What an engine has besides whose weights lie in processes of its own.

    `weights` is empty then, and `layout` speaks of these processes, whatever the number of ranks: each rank has an
    engine, with as many receiving ends of a weight edge as processes. `generation.processes` does all of it for an
    engine that can call a function in each of its processes.
    """

    def open_receiver(self, ports: Sequence[WeightPort]) -> WeightReceiver:
        """Opens the receiving ends of an edge, each in its process.

        Args:
            ports: in the order of the layout's ranks.

        Returns: what fills all of them. Its `receive` is given no tensors; the check that it returns is made before a
            prompt is submitted.

        Raises: WeightSyncRefused, as WeightSync.open_receiver.
        """
        ...

    def process_ids(self) -> Sequence[int]:
        """Numbers of these processes on this machine, for people who ask why nothing comes; from any thread."""
        ...
