"""A trained robot policy in the caller's process: observations in, actions out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from rlinf.config.devices import device_kind
from rlinf.config.downloads import with_downloads
from rlinf.config.playing import TrainedConfig
from rlinf.errors import UserError
from rlinf.jobs.acting import chosen_policy, env_spec, policy_settings
from rlinf.jobs.env_interface import needs_of, probe
from rlinf.machine import machine_of
from rlinf.playing.checkpoint import find_policy
from rlinf.run_folder.checkpoints import MODEL
from rlinf_algos import AlgosError
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers import WeightFilesError
from rlinf_workers.policies import Policy, PolicyError, PolicySettings, make_policy
from rlinf_workers.roles import load_policy as load_weights, text_tensor


@runtime_checkable
class ChunkContinuing(Protocol):
    """A policy that can go on from actions that are being executed."""

    def continue_chunk(self, fields: Mapping[str, torch.Tensor], rest: torch.Tensor, delay: int) -> torch.Tensor:
        """`rlinf_workers.policies.flow.policy.FlowPolicy.continue_chunk`."""
        ...


class LoadedPolicy:
    """A policy that acts without exploration, as in evaluations. `load_policy` makes one.

    Attributes:
        fields: name -> what one environment shows; only those in `reads` are looked at.
        actions: what one environment takes.
        reads: names of the fields that `act` needs.
        chunk_size: K, actions of an answer, to be executed one after the other.
    """

    def __init__(self, policy: Any, fields: Mapping[str, FieldSpec], actions: ActionSpec, needs: Any) -> None:
        self._policy = policy
        self.fields, self.actions = fields, actions
        self.reads: tuple[str, ...] = needs.reads
        self.chunk_size: int = needs.chunk_size

    @property
    def continues_chunks(self) -> bool:
        """Whether `act` takes a `rest`: flow policies (pi0, pi0.5, SmolVLA) do."""
        return isinstance(self._policy, ChunkContinuing)

    def act(
        self, observations: Mapping[str, Any] | Any, *, rest: np.ndarray | None = None, delay: int = 0
    ) -> np.ndarray:
        """Answers n environments.

        Args:
            observations: field -> array [n, *shape of the field], or n texts; or the array alone, if the policy reads
                one field.
            rest: [n, L, A], the actions of the previous answer that have not been executed, from which the new ones go
                on (real-time chunking: `rlinf_algos.flow_matching.real_time_weights`); None: there are none.
            delay: how many actions of `rest` will have been executed when the answer is used.

        Returns: [n, K, A], float32 within the bounds of the actions, or int64 for discrete ones.
        Raises: UserError for fields that are missing or have another shape, and for a `rest` that the policy cannot
            continue.
        """
        if not isinstance(observations, Mapping):
            if len(self.reads) != 1:
                raise UserError(f"the policy reads several fields: {', '.join(self.reads)}", hint="give a dict of them")
            observations = {self.reads[0]: observations}
        tensors = {name: self._tensor(name, observations) for name in self.reads}
        if len({len(tensor) for tensor in tensors.values()}) > 1:
            raise UserError(f"the fields have different numbers of rows: { {n: len(t) for n, t in tensors.items()} }")
        with torch.no_grad():
            answer = self._policy.act(tensors, None).actions if rest is None else self._continued(tensors, rest, delay)
        actions = answer.cpu().numpy()
        if np.issubdtype(actions.dtype, np.floating):
            return np.clip(actions, self.actions.low.numpy(), self.actions.high.numpy())
        return actions

    def _continued(self, tensors: Mapping[str, torch.Tensor], rest: np.ndarray, delay: int) -> torch.Tensor:
        if not isinstance(self._policy, ChunkContinuing):
            raise UserError("the policy cannot continue a chunk; flow policies can: pi0, pi05, smolvla")
        num_rows, size = len(next(iter(tensors.values()))), self.actions.low.numel()
        if rest.ndim != 3 or (len(rest), rest.shape[2]) != (num_rows, size):
            raise UserError(
                f"the rest of a chunk has the shape {list(rest.shape)}; the policy needs [{num_rows}, L, {size}]"
            )
        device = next(iter(tensors.values())).device
        try:
            return self._policy.continue_chunk(tensors, torch.from_numpy(rest.astype(np.float32)).to(device), delay)
        except AlgosError as error:
            raise UserError(f"the rest of a chunk: {error}") from error

    def _tensor(self, name: str, observations: Mapping[str, Any]) -> torch.Tensor:
        if name not in observations:
            raise UserError(
                f"the observations lack {name!r}; they have {', '.join(map(repr, observations)) or 'nothing'}"
            )
        field = self.fields[name]
        device = next(self._policy.parameters()).device
        if field.dtype == "text":
            return text_tensor([str(text) for text in observations[name]]).to(device)
        array = np.asarray(observations[name])
        if array.shape[1:] != tuple(field.shape):
            rows = f"[n, {', '.join(map(str, field.shape))}]"
            raise UserError(f"{name} has the shape {list(array.shape)}, and the policy reads {rows}")
        if str(array.dtype) != field.dtype and (field.dtype == "uint8" or not np.issubdtype(array.dtype, np.number)):
            raise UserError(f"{name} has the dtype {array.dtype}, and the policy reads {field.dtype}")
        return torch.from_numpy(np.array(array, dtype=field.dtype)).to(device)


def load_policy(path: str | Path, checkpoint: str | None = None) -> LoadedPolicy:
    """Loads a trained robot policy into this process.

    Args:
        path: a run's folder, one of its checkpoints, or a recipe with a published checkpoint in
            `policy.options.folder`.
        checkpoint: of a run: newest (default), best, or a name such as step-000100.

    Raises: UserError if it does not exist or is damaged, or the run's environment cannot be created, which says what
        the policy reads.
    """
    trained = find_policy(str(path), checkpoint, ())
    return acting_policy(trained.config, trained.checkpoint)


def acting_policy(config: TrainedConfig, checkpoint: Path | None) -> LoadedPolicy:
    """Loads a policy as `policy_of`, on the device of `config.cluster`."""
    device = torch.device(device_kind(config.cluster, machine_of(config.cluster)))
    policy, settings = policy_of(config, checkpoint, device)
    return LoadedPolicy(policy, settings.fields, settings.actions, needs_of(settings, config.env.id))


def policy_of(config: TrainedConfig, checkpoint: Path | None, device: torch.device) -> tuple[Policy, PolicySettings]:
    """Loads the policy of a checkpoint whose digests were checked, or of `policy.options.folder`. Raises: UserError as
    `load_policy`."""
    config = with_downloads(config)
    interface = probe(env_spec(config.env), None)
    chosen, _ = chosen_policy(config.policy, interface, config.env.id)
    settings = policy_settings(chosen, interface, config.seed)
    try:
        if checkpoint is None:
            return make_policy(settings, device), settings
        return load_weights(settings, str(checkpoint / MODEL), device), settings
    except (WeightFilesError, PolicyError) as error:
        raise UserError(f"{checkpoint or f'policy.name={settings.name!r}'}: {error}") from error
