"""OpenVLA as a policy: [begin | patches | prompt] -> the tokens of an action, one after the other.

For learning, an action's log-probability is the sum of those of its tokens, each a choice among the tokens of actions
alone. The value comes from three layers on the state that predicts the first of them, which is that of an observation
whatever is done (arXiv:2505.19789, "What Can RL Bring to VLA Generalization?", takes it there).

Legend: n rows, P positions of the context, A dimensions of an action, B bins, H width of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlinf_envs.protocol import ActionSpec, FieldSpec
from rlinf_workers.policies.base import Answer, Fields, Needs, Policy, PolicyError
from rlinf_workers.policies.heads.categories import CategoriesHead
from rlinf_workers.policies.layers import VALUE_GAIN, tanh_tower
from rlinf_workers.policies.openvla.actions import action_table, actions_of, bins_of
from rlinf_workers.policies.openvla.model import check_files, load_parts, make_parts
from rlinf_workers.policies.openvla.pixels import normalized, resized
from rlinf_workers.policies.openvla.prompts import Prompts, byte_ids, file_ids
from rlinf_workers.policies.openvla.spec import ModelSpec, spec_of_folder, spec_of_sizes
from rlinf_workers.policies.pictures import chosen_cameras
from rlinf_workers.training.base import Evaluation

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class OpenVLA(Policy):
    """Acts on one picture [n, H, W, 3] and the instruction."""

    table: Tensor
    """[A, B] float32: what the bins mean."""

    @classmethod
    def needs(
        cls,
        fields: Mapping[str, FieldSpec],
        actions: ActionSpec,
        *,
        folder: str | None = None,
        unnorm_key: str | None = None,
        camera: str | None = None,
        temperature: float = 1.0,
        value_hidden_size: int = 256,
        dtype: str = "float32",
        **sizes: Any,
    ) -> Needs:
        chosen = _camera(fields, camera)
        if "instruction" not in fields:
            raise PolicyError(f"it reads an 'instruction', and the environment shows {', '.join(sorted(fields))}")
        if actions.kind != "continuous":
            raise PolicyError("its tokens are bins of continuous actions, and the environment takes discrete ones")
        if not temperature > 0:
            raise PolicyError(f"options.temperature has to be above 0, not {temperature}")
        if dtype not in DTYPES:
            raise PolicyError(f"options.dtype is {dtype!r}; there are {', '.join(DTYPES)}")
        spec = _spec(actions, folder, unnorm_key, sizes)
        if (found := len(spec.statistics.q01)) != actions.low.numel():
            raise PolicyError(f"its actions have {found} numbers, and the environment takes {actions.low.numel()}")
        if folder is not None:
            check_files(spec, folder)
        return Needs(reads=(chosen, "instruction"))

    def __init__(
        self,
        fields: Mapping[str, FieldSpec],
        actions: ActionSpec,
        *,
        folder: str | None = None,
        unnorm_key: str | None = None,
        camera: str | None = None,
        temperature: float = 1.0,
        value_hidden_size: int = 256,
        dtype: str = "float32",
        seed: int = 0,
        **sizes: Any,
    ) -> None:
        """
        Args:
            folder: a published checkpoint; None: a small model.
            unnorm_key: the dataset of the checkpoint whose statistics actions have; None: the only one.
            camera: as in "image.<camera>"; None: the only one.
            temperature: of the tokens of actions, when they are drawn and when they are evaluated.
            value_hidden_size: width of the two hidden layers of the value.
            dtype: of the weights.
            sizes: of a small model, the fields of `spec.Sizes`.
        """
        super().__init__()
        self._spec, self._temperature = _spec(actions, folder, unnorm_key, sizes), temperature
        self._camera_field = _camera(fields, camera)
        before = torch.get_default_dtype()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                torch.set_default_dtype(DTYPES[dtype])
                parts = make_parts(self._spec)
            finally:
                torch.set_default_dtype(before)
            self.vision_backbone, self.projector = parts["vision_backbone"], parts["projector"]
            self.language_model = parts["language_model"]
            width = self.language_model.config.hidden_size
            self.value_head = tanh_tower(width, (value_hidden_size, value_hidden_size), 1, VALUE_GAIN)
        if folder is not None:
            load_parts(self, folder)
        self._prompts = Prompts(file_ids(self._spec.tokenizer) if self._spec.tokenizer else byte_ids)
        self.register_buffer("table", action_table(self._spec.statistics, self._spec.num_bins), persistent=False)
        self._num_dims = len(self.table)
        self._token, self._tokens = (CategoriesHead((self._spec.num_bins,) * n) for n in (1, self._num_dims))
        self.noise_size = self._tokens.num_outputs

    @torch.no_grad()
    def act(self, fields: Fields, noise: Tensor | None) -> Answer:
        embeddings, mask = self._context(fields)
        positions = _positions(mask)
        chosen: list[Tensor] = []
        logits: list[Tensor] = []
        values, cache = torch.zeros(()), None
        for dim in range(self._num_dims):
            found = self.language_model.model(
                inputs_embeds=embeddings,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            cache, state = found.past_key_values, found.last_hidden_state[:, -1]
            if dim == 0:
                values = self._values(state)
            logits.append(self._logits(state))
            if noise is None:
                bins = self._token.mode(logits[-1])
            else:
                bins = self._token.sample(logits[-1], noise.unflatten(1, (self._num_dims, -1))[:, dim])
            chosen.append(bins[:, 0])
            embeddings = self._embed(bins)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = positions[:, -1:] + 1
        all_bins = torch.stack(chosen, dim=1)
        return Answer(
            actions=actions_of(self.table, all_bins)[:, None],
            logprobs=self._tokens.log_prob(torch.cat(logits, dim=-1), all_bins),
            values=values,
        )

    def evaluate(self, fields: Fields, actions: Tensor, extras: Mapping[str, Tensor]) -> Evaluation:
        bins = bins_of(self.table, actions[:, 0])
        context, mask = self._context(fields)
        mask = torch.cat([mask, mask.new_ones(len(bins), self._num_dims - 1)], dim=1)
        found = self.language_model.model(
            inputs_embeds=torch.cat([context, self._embed(bins[:, :-1])], dim=1),
            attention_mask=mask,
            position_ids=_positions(mask),
            use_cache=False,
        )
        states = found.last_hidden_state[:, -self._num_dims :]
        logits = self._logits(states).flatten(1)
        return Evaluation(
            logprobs=self._tokens.log_prob(logits, bins),
            entropies=self._tokens.entropy(logits),
            values=self._values(states[:, 0]),
        )

    def _context(self, fields: Fields) -> tuple[Tensor, Tensor]:
        """Embeddings [n, P, H] of what comes before the action, and their mask [n, P]: the first token, the patches,
        the rest of the prompt."""
        ids, mask = self._prompts(fields["instruction"])
        embedded = self.language_model.model.embed_tokens(ids)
        pictures = resized(fields[self._camera_field], self._spec.image_size)
        for_towers = zip(self._spec.means, self._spec.stds, strict=True)
        dino, siglip = (normalized(pictures, mean, std).to(embedded.dtype) for mean, std in for_towers)
        patches = self.projector(self.vision_backbone(dino, siglip))
        mask = torch.cat([mask[:, :1], mask.new_ones(patches.shape[:2]), mask[:, 1:]], dim=1)
        return torch.cat([embedded[:, :1], patches, embedded[:, 1:]], dim=1), mask

    def _embed(self, bins: Tensor) -> Tensor:
        """[n, t] -> [n, t, H]. The last token of the vocabulary is the lowest bin."""
        return self.language_model.model.embed_tokens(self._spec.num_tokens - 1 - bins)

    def _logits(self, states: Tensor) -> Tensor:
        """[..., H] -> [..., B], float32 at least, over the bins from the lowest, by the temperature."""
        last = self._spec.num_tokens
        logits = self.language_model.lm_head(states)[..., last - self._spec.num_bins : last]
        return logits.flip(-1).to(torch.promote_types(logits.dtype, torch.float32)) / self._temperature

    def _values(self, states: Tensor) -> Tensor:
        """[n, H] -> [n], float32 also where the rest is not."""
        return self.value_head(states.to(next(self.value_head.parameters()).dtype))[..., 0]


def _positions(mask: Tensor) -> Tensor:
    """[n, P]: positions as if there were no padding."""
    return mask.cumsum(1) - 1


def _camera(fields: Mapping[str, FieldSpec], camera: str | None) -> str:
    name, *others = chosen_cameras(fields, None if camera is None else [camera])
    if others:
        raise PolicyError(f"it looks through one camera; options.camera chooses among {', '.join([name, *others])}")
    if (channels := fields[name].shape[-1]) != 3:
        raise PolicyError(f"it looks at pictures of 3 colours, and {name!r} has {channels} channels")
    return name


def _spec(actions: ActionSpec, folder: str | None, unnorm_key: str | None, sizes: Mapping[str, Any]) -> ModelSpec:
    if folder is None:
        if unnorm_key is not None:
            raise PolicyError("options.unnorm_key chooses statistics of a checkpoint; give options.folder, or neither")
        return spec_of_sizes(sizes, actions)
    if sizes:
        raise PolicyError(f"options {', '.join(sizes)}: a model from options.folder has the sizes of its files")
    return spec_of_folder(folder, unnorm_key)
