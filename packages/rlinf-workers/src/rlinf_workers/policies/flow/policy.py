"""Policies that denoise chunks of actions: acting by their ODE, learning by Flow-SDE or Flow-Noise (arXiv:2510.25889).

Flow-SDE makes one denoising step of each row stochastic, which `noise` chooses, and the others follow the ODE;
Flow-Noise makes all steps stochastic, with a standard deviation that a head on the expert learns. Only executed actions
count in log-probabilities: the first K predicted ones, in the dimensions of the environment. docs/policies/pi0.md has
every detail with its source.

Legend: n rows, H predicted actions, D their dimensions, E width of the expert; K actions that are executed, A their
dimensions, S denoising steps.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rlinf_algos.flow_matching import (
    FlowChain,
    FlowPrediction,
    FlowTransition,
    bounded_std,
    denoising_times,
    flow_chain_logprobs,
    flow_interpolation,
    flow_matching_loss,
    flow_sde_transition,
    guided_velocities,
    real_time_weights,
    sample_flow_chain,
    training_times,
    transition_entropy,
)
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.policies.added_weights import ignored_heads
from rlinf_workers.policies.base import Fields, Needs, Policy, PolicyError, PolicyStep
from rlinf_workers.policies.flow.normalization import Affine
from rlinf_workers.policies.flow.options import FlowOptions
from rlinf_workers.policies.flow.prefix import Prefix
from rlinf_workers.policies.flow.prompts import PromptTokenizer
from rlinf_workers.policies.instructions import check_instructions
from rlinf_workers.policies.layers import in_own_dtype
from rlinf_workers.policies.options import acting_options
from rlinf_workers.policies.pictures import colour_cameras
from rlinf_workers.trainers.base import ModelOutputs

NOISE_HEAD_WIDTHS = (128, 64)
"""Width of the network that learns Flow-Noise's standard deviations, as in the authors' code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowSizes:
    """Sizes of a model that denoises chunks of actions."""

    num_actions: int
    """H"""
    action_size: int
    """D"""
    expert_width: int
    """E"""
    prefix_width: int
    """Width of the vision-language model."""


class FlowPolicy(Policy):
    """A vision-language model with an expert for actions, with a value head, and with a noise head for Flow-Noise."""

    options_class: ClassVar[type[FlowOptions]]

    @classmethod
    def needs(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> Needs:
        chosen = cls.options_class.of(options)
        cameras = colour_cameras(fields, chosen.cameras)
        cls.check(chosen, fields, actions)
        check_instructions(fields, cls.make_prompts(chosen, fields["state"].shape[0]).check)
        cls.make_normalizers(chosen, fields["state"].shape[0], actions)
        prompt = ("instruction",) if "instruction" in fields else ()
        notes = cls.notes(chosen, cameras, actions)
        if chosen.folder is not None:
            notes += ignored_heads(WeightFiles(chosen.folder))
        return Needs(
            reads=("state", *cameras, *prompt),
            chunk_size=chosen.chunk_size,
            notes=notes,
            acting=acting_options(chosen, chosen.acting, cameras),
        )

    def __init__(self, fields: Mapping[str, FieldSpec], actions: ActionSpec, *, seed: int = 0, **options: Any) -> None:
        super().__init__()
        self._options: Any = self.options_class.of(options)
        chosen = self._options
        self._cameras = colour_cameras(fields, chosen.cameras)
        (state_size,), action_size = fields["state"].shape, actions.low.numel()
        self._executed = (chosen.chunk_size, action_size)
        self._prompts = self.make_prompts(chosen, state_size)
        self.normalize_state, self.normalize_actions = self.make_normalizers(chosen, state_size, actions)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model: Any = self.make_model(chosen, state_size, action_size)
            self._sizes = self.sizes()
            self._add_heads()
        for name, parameter in self.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if self.is_wide(name) else getattr(torch, chosen.dtype))
        if chosen.dtype != "float32":
            self._cast_embedded_patches()
        self.freeze()
        self._predicted = (self._sizes.num_actions, self._sizes.action_size)
        size = self._sizes.num_actions * self._sizes.action_size
        steps = chosen.num_denoising_steps
        self.noise_size = 2 * size + 1 if chosen.noise == "flow-sde" else (1 + steps) * size
        self.values_cost_less = chosen.value == "vision-language"

    def _add_heads(self) -> None:
        options, sizes = self._options, self._sizes
        features = sizes.expert_width if options.value == "expert" else sizes.prefix_width
        self.value_head = nn.Sequential(
            nn.Linear(features, options.value_width), nn.GELU(), nn.Linear(options.value_width, 1)
        )
        self.noise_head = None
        if options.noise == "flow-noise":
            first, second = NOISE_HEAD_WIDTHS
            self.noise_head = nn.Sequential(
                nn.Linear(sizes.expert_width, first),
                nn.Tanh(),
                nn.Linear(first, second),
                nn.Tanh(),
                nn.Linear(second, sizes.action_size),
            )

    def _cast_embedded_patches(self) -> None:
        """Converts embedded patches, whose weights are float32, to the dtype of the layers that read them."""
        vision = self.vision_tower()
        dtype = vision.encoder.layers[0].mlp.fc1.weight.dtype
        vision.embeddings.register_forward_hook(lambda _, __, embedded: embedded.to(dtype))

    # -- in which policies differ ----------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def check(cls, options: Any, fields: Mapping[str, FieldSpec], actions: ActionSpec) -> None:
        """Checks that need no weights. Raises: PolicyError."""

    @classmethod
    @abstractmethod
    def make_prompts(cls, options: Any, state_size: int) -> PromptTokenizer:
        """The prompt tokenizer. Raises: PolicyError if the state does not fit in the prompt."""

    @classmethod
    @abstractmethod
    def make_normalizers(cls, options: Any, state_size: int, actions: ActionSpec) -> tuple[Affine, Affine]:
        """The normalizers of states and of actions. Raises: PolicyError if there are no such statistics."""

    @classmethod
    def notes(cls, options: Any, cameras: tuple[str, ...], actions: ActionSpec) -> tuple[str, ...]:
        """What the run's manifest should say about the checkpoint."""
        return ()

    @abstractmethod
    def make_model(self, options: Any, state_size: int, action_size: int) -> nn.Module:
        """The network with its weights; its layer `action_out_proj` turns the expert's output into velocities."""

    @abstractmethod
    def sizes(self) -> FlowSizes:
        """The sizes of `self.model`."""

    @abstractmethod
    def is_wide(self, name: str) -> bool:
        """Whether a parameter stays in float32 whatever `dtype` is. Patch embeddings and our heads do."""

    @abstractmethod
    def freeze(self) -> None:
        """Freezes what the options do not train and what does not affect the output."""

    @abstractmethod
    def vision_tower(self) -> Any:
        """The picture encoder, of SigLIP's kind."""

    @abstractmethod
    def read(self, fields: Fields, state: Tensor) -> Prefix:
        """The vision-language model's output.

        Args:
            state: [n, size], normalised.
        """

    @abstractmethod
    def expert_features(self, prefix: Prefix, state: Tensor, chunk: Tensor, times: Tensor) -> Tensor:
        """[n, H, E]: the expert's output at the actions; leaves the prefix unchanged.

        Args:
            state: [n, size], normalised.
            chunk: [n, H, D], noisy actions at `times` [n], 1 being noise.
        """

    # -- answers ---------------------------------------------------------------------------------------------------

    def action_range(self) -> tuple[Tensor, Tensor] | None:
        """For mean and standard deviation, three deviations from the mean."""
        half_range = self.normalize_actions.half_range
        if half_range is None or self._options.relative_to_state:
            return None
        side = torch.full_like(self.normalize_actions.scale, half_range)
        low, high = (self.normalize_actions.inverse(x) for x in (-side, side))
        return low.float().cpu(), high.float().cpu()

    def act(self, fields: Fields, noise: Tensor | None) -> PolicyStep:
        denoiser = self.denoiser(fields)
        num_rows, times = len(fields["state"]), self._times(fields)
        if noise is None:
            start = self.evaluation_start(fields["state"])
            chain = sample_flow_chain(denoiser.velocities, start, times, noise_level=None)
            logprobs, extras = torch.zeros(num_rows, *self._executed, device=start.device), {}
            values = denoiser.values(None)
        else:
            start, step_noise, steps = self._split(noise)
            chain = sample_flow_chain(
                denoiser, start, times, noise_level=self._noise_level, indices=steps, step_noise=step_noise
            )
            logprobs, values = self._of_executed(chain.logprobs), denoiser.values(steps)
            extras = {"chain": chain.states.transpose(0, 1)} | ({} if steps is None else {"noisy_step": steps})
        return PolicyStep(actions=self._actions(chain, fields), logprobs=logprobs, values=values, extras=extras)

    def continue_chunk(self, fields: Fields, rest: Tensor, delay: int) -> Tensor:
        """Answers as `act` without noise, with a chunk that goes on from the previous one (`real_time_weights`).

        Args:
            rest: [n, L, A], the actions that are left of the previous chunk; L is at most the number of predicted ones.
            delay: how many of them will have been executed when this answer is used.

        Returns: [n, K, A]; the first `delay` actions are those that are executed meanwhile, nearly equal to `rest`.
        Raises: AlgosError if `rest` is too long, or `delay` longer than it.
        """
        num_left, size = rest.shape[1], self._executed[1]
        weights = torch.zeros(self._predicted, device=rest.device)
        weights[:, :size] = real_time_weights(self._predicted[0], num_left, delay).to(rest.device)[:, None]
        start = self.evaluation_start(fields["state"])
        target = torch.zeros_like(start)
        target[:, :num_left, :size] = self.normalize_actions(rest - self._origin(fields))
        predict = guided_velocities(self.denoiser(fields).velocities, target, weights)
        return self._actions(sample_flow_chain(predict, start, self._times(fields), noise_level=None), fields)

    def denoise(self, denoiser: Denoiser, fields: Fields, noise: Tensor) -> Tensor:
        """The actions [n, K, A] that the ODE makes of initial noise [n, R, A].

        Args:
            denoiser: of the same fields.
            noise: of the first R predicted actions; the others have that of the last one. Numbers that only the model
                has, not the environment, start from 0.

        Raises: PolicyError if the model predicts fewer than R actions.
        """
        num_rows, size = noise.shape[1:]
        if num_rows > self._predicted[0]:
            raise PolicyError(f"it predicts {self._predicted[0]} actions, and noise is given for {num_rows}")
        rows = torch.arange(self._predicted[0], device=noise.device).clamp(max=num_rows - 1)
        start = noise.new_zeros(len(noise), *self._predicted)
        start[..., :size] = noise[:, rows]
        return self._actions(
            sample_flow_chain(denoiser.velocities, start, self._times(fields), noise_level=None), fields
        )

    def _actions(self, chain: FlowChain, fields: Fields) -> Tensor:
        """[n, K, A]: the executed actions."""
        chosen = chain.actions[:, : self._executed[0], : self._executed[1]]
        return self.normalize_actions.inverse(chosen) + self._origin(fields)

    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> ModelOutputs:
        denoiser, times, steps = self.denoiser(fields), self._times(fields), extras.get("noisy_step")
        states = extras["chain"].transpose(0, 1)
        logprobs = flow_chain_logprobs(denoiser, states, times, noise_level=self._noise_level, indices=steps)
        entropies = self._sde_entropies(times, steps) if steps is not None else denoiser.entropies()
        return ModelOutputs(
            logprobs=self._of_executed(logprobs), entropies=self._of_executed(entropies), values=denoiser.values(None)
        )

    def values(self, fields: Fields) -> Tensor:
        """Needs no denoising."""
        return self.denoiser(fields).values(None)

    def imitate(self, fields: Fields, actions: Tensor, noise: Tensor) -> Tensor:
        """Flow matching: the mean squared error of the velocities over the executed numbers, at one time for each row,
        with a preference for noisy times (arXiv:2410.24164, section IV). The other predicted numbers start from noise,
        as in acting, and have no target."""
        num_actions, size = self._executed
        start = noise[:, : self._predicted[0] * self._predicted[1]].unflatten(-1, self._predicted)
        times = training_times(torch.special.ndtr(noise[:, -1]))
        states, target = start.clone(), torch.zeros_like(start)
        chosen = (slice(None), slice(num_actions), slice(size))
        normal = self.normalize_actions(actions - self._origin(fields))
        states[chosen], target[chosen] = flow_interpolation(normal, start[chosen], times)
        velocities = self.denoiser(fields).velocities(states, times).velocities
        return flow_matching_loss(velocities[chosen], target[chosen]).mean((1, 2))

    def _origin(self, fields: Fields) -> Tensor:
        """[n, 1, A]: the origin of predicted differences; zeros for dimensions that are not differences."""
        state, size = fields["state"], self._executed[1]
        origin = torch.zeros(len(state), 1, size, device=state.device, dtype=state.dtype)
        if self._options.relative_to_state:
            origin[:, 0, : size - 1] = state[:, : size - 1]
        return origin

    @property
    def _noise_level(self) -> float | None:
        return self._options.noise_level if self._options.noise == "flow-sde" else None

    def evaluation_start(self, state: Tensor) -> Tensor:
        """[n, H, D]: the initial noise of an evaluation, derived from the numbers of each row [n, size], so that the
        same observation always has the same answer, and other observations have different noise."""
        size = self._predicted[0] * self._predicted[1]
        drawn = [_normal(row, size) for row in state.float().cpu().numpy()]
        return torch.from_numpy(np.stack(drawn)).to(state).unflatten(-1, self._predicted)

    def _times(self, fields: Fields) -> Tensor:
        state = fields["state"]
        return denoising_times(self._options.num_denoising_steps, device=state.device, dtype=state.dtype)

    def _split(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The initial state [n, H, D], the noise of the steps [S, n, H, D], and the stochastic step, [n]; None: all."""
        size, num_steps = self._predicted[0] * self._predicted[1], self._options.num_denoising_steps
        start = noise[:, :size].unflatten(-1, self._predicted)
        if self._options.noise == "flow-noise":
            return start, noise[:, size:].unflatten(-1, (num_steps, *self._predicted)).transpose(0, 1), None
        drawn = noise[:, size:-1].unflatten(-1, self._predicted).expand(num_steps, -1, -1, -1)
        uniform = torch.special.ndtr(noise[:, -1])
        return start, drawn, (uniform * num_steps).long().clamp(max=num_steps - 1)

    def _of_executed(self, elements: Tensor) -> Tensor:
        """[n, H, D] -> [n, K, A], the elements of the executed actions."""
        num_actions, size = self._executed
        return elements[:, :num_actions, :size]

    def _sde_entropies(self, times: Tensor, steps: Tensor) -> Tensor:
        """[n, H, D]; they depend on the step alone."""
        zeros = torch.zeros(len(steps), *self._predicted, device=times.device)
        level = self._options.noise_level
        return transition_entropy(flow_sde_transition(zeros, zeros, times[steps], times[steps + 1], noise_level=level))

    def denoiser(self, fields: Fields) -> Denoiser:
        """Reads the observations, [n, ...] each."""
        state = self.normalize_state(fields["state"])
        return Denoiser(self, self.read(fields, state), state)

    def tokens_of(self, fields: Fields, state: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and mask of the prompts, [n, tokens] each; of an empty one without an instruction."""
        empty = torch.zeros(len(state), 1, dtype=torch.uint8, device=state.device)
        return self._prompts(fields.get("instruction", empty), state)

    def spread(self, features: Tensor) -> Tensor:
        """[n, H, E] -> [n, H, D], the learned standard deviations of Flow-Noise."""
        assert self.noise_head is not None, "Flow-SDE has no noise head"
        return bounded_std(
            in_own_dtype(self.noise_head, features), low=self._options.least_std, high=self._options.largest_std
        )

    @property
    def reads_value_from_expert(self) -> bool:
        return self._options.value == "expert"

    def values_of(self, features: Tensor) -> Tensor:
        """[n, width] -> [n] float32"""
        return in_own_dtype(self.value_head, features.detach() if self._options.detach_values else features)[:, 0]


def _normal(row: np.ndarray, size: int) -> np.ndarray:
    """[size] standard normal numbers that depend on the row alone."""
    key = int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(size)


class Denoiser:
    """The expert for one batch of observations; stores its output at each state for which it is called."""

    def __init__(self, policy: FlowPolicy, prefix: Prefix, state: Tensor) -> None:
        self._policy, self._prefix, self._state = policy, prefix, state
        self._values: list[Tensor] = []
        self._stds: list[Tensor] = []

    @property
    def features(self) -> Tensor:
        """[n, width], the mean output of the vision-language model, at least float32."""
        return self._prefix.mean_features

    def __call__(self, states: Tensor, times: Tensor) -> FlowPrediction:
        """Velocities, and standard deviations if they are learned; states [n, H, D], times [n]."""
        features = self._features(states, times)
        velocities = in_own_dtype(self._policy.model.action_out_proj, features)
        if self._policy.noise_head is None:
            return FlowPrediction(velocities)
        self._stds.append(self._policy.spread(features))
        return FlowPrediction(velocities, self._stds[-1])

    def velocities(self, states: Tensor, times: Tensor) -> FlowPrediction:
        """Velocities only, for the ODE."""
        return FlowPrediction(in_own_dtype(self._policy.model.action_out_proj, self._features(states, times)))

    def _features(self, states: Tensor, times: Tensor) -> Tensor:
        features = self._policy.expert_features(self._prefix, self._state, states, times)
        if self._policy.reads_value_from_expert:
            self._values.append(self._policy.values_of(features.mean(1)))
        return features

    def values(self, steps: Tensor | None) -> Tensor:
        """[n]: the values of the vision-language model's features, or the mean value of the expert's features over all
        states for which it was called; with `steps` [n] the value at that step."""
        if not self._policy.reads_value_from_expert:
            return self._policy.values_of(self._prefix.mean_features)
        values = torch.stack(self._values)
        return values.mean(0) if steps is None else values.gather(0, steps[None])[0]

    def entropies(self) -> Tensor:
        """[n, H, D], summed over the steps."""
        stds = torch.stack(self._stds)
        return transition_entropy(FlowTransition(mean=torch.zeros_like(stds), std=stds)).sum(0)
