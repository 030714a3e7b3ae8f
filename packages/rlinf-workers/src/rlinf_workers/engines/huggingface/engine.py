"""Generation with a Hugging Face model and its KV cache: simple, exact, on any device that torch supports.

Departs from `model.generate` in three ways: the prompt is prefilled once for all its completions; noise belongs to the
prompt (sampling.py); and a batch never has fewer than `MIN_ROWS` rows, because below four rows a CPU matrix product
takes another path with other rounding (measured: rows are bit-equal from 4 to 512, not for 1 to 3), and numbers must
not depend on how a plan splits the batch. On a GPU it decodes with a static cache and CUDA graphs (graphs.py); there,
rows of another batch may round differently. With `refill` it uses continuous batching: a completion that has ended
frees its cache row for the next one (slots.py), and new weights can arrive between two decode steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlinf_comm.weights import Layout, specs_of
from rlinf_workers.engines.base import Completions, OnNewWeights, UnfinishedCompletion
from rlinf_workers.engines.huggingface.masks import whole_masks
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings, prompt_noise, sample_kept, sample_tokens
from rlinf_workers.engines.stopping import StopStrings
from rlinf_workers.models.cache_argument import as_cache
from rlinf_workers.models.language_model import LoadedModel, ModelSettings, load_model
from rlinf_workers.models.pictures import padded_places, padded_positions, rope_offsets, seen
from rlinf_workers.models.router_replay import experts_of_groups, recorded_experts
from rlinf_workers.models.sequences import pad_left
from rlinf_workers.roles.records.kept_tokens import KeptTokens, split_by_row
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.roles.records.pictures import Pictures
from rlinf_workers.serving import ServedModule

if TYPE_CHECKING:
    from rlinf_workers.engines.huggingface.graphs import FixedDecoder
    from rlinf_workers.engines.huggingface.slots import Slots

_LOG = logging.getLogger(__name__)
MIN_ROWS = 8
MAX_BATCH_SEQUENCES = 512
"""Completions per batch by default."""


class HuggingFaceEngine(ServedModule):
    """A GenerationEngine on a `transformers` model, in whole batches or with continuous batching.

    On a CPU the same prompt, seed and step give the same tokens and log-probabilities in any batch; for a mixture of
    experts the latter up to rounding, because few rows of a batch reach each expert. On a GPU the same batch gives the
    same; in another batch, kernels that round differently may be chosen.

    Args:
        model: settings, or a model already in memory.
        max_prompt_tokens: prompts are left-padded to this length, so that the shape of a batch does not depend on its
            prompts. None: all prompts have one length; no mask is needed, and attention takes its fast path.
        max_batch_sequences: maximum number of concurrent completions; None: `MAX_BATCH_SEQUENCES`, and with `refill` as
            many as fit in the cache.
        cuda_graphs: on a GPU, decode with CUDA graphs if the model allows it; not where experts or kept tokens are
            recorded.
        refill: continuous batching: reuse the cache row of an ended completion while others run; without CUDA graphs.
        cache_share: with `refill`, fraction of the memory free on the device at the first prompts that the cache may
            take; None: 0.8 of a GPU's, 0.25 of a host's.
        keep_turns: with `refill`, prompts that begin like a completion that has ended take over its keys and values
            (kept.py).
    Raises: ValueError if the model does not support `refill`, or `keep_turns` is set without it.
    """

    def __init__(
        self,
        model: ModelSettings | LoadedModel,
        device: torch.device,
        *,
        max_prompt_tokens: int | None,
        max_batch_sequences: int | None = None,
        cuda_graphs: bool = True,
        refill: bool = False,
        cache_share: float | None = None,
        keep_turns: bool = False,
    ) -> None:
        if keep_turns and not refill:
            raise ValueError("engine_options.keep_turns needs continuous batching; set engine_options.refill=true")
        loaded = load_model(model) if isinstance(model, ModelSettings) else model
        self._model = loaded.model
        super().__init__(self._model, device)
        self._tokenizer, self._pad_id = loaded.tokenizer, loaded.pad_id
        self._stop_ids = torch.tensor(loaded.stop_ids, device=device)
        self._blank = torch.tensor([self._pad_id])
        self._pads = max_prompt_tokens is not None
        self._width = max_prompt_tokens
        self._max_batch_sequences = max_batch_sequences or MAX_BATCH_SEQUENCES
        self._batch: tuple[Sequence[Prompt], SamplingSettings, int, int] | None = None
        self._version = -1
        self._make = partial(self._make_slots, max_batch_sequences, cache_share, keep_turns) if refill else None
        self._slots = self._make() if self._make is not None else None
        uses_graphs = cuda_graphs and device.type == "cuda" and not refill
        self._decoder = self._make_decoder() if uses_graphs else None

    def layout(self) -> Layout:
        return Layout.replicated(specs_of(self.weights()), 1)

    def weights_received(self, policy_version: int) -> None:
        self._version = policy_version
        if self._slots is not None:
            self._slots.weights_received(policy_version)

    @property
    def num_steps(self) -> int:
        """0 without `refill`: it cannot pause then."""
        return 0 if self._slots is None else self._slots.num_steps

    def interrupt(self, at_step: int = 0) -> None:
        if self._slots is not None:
            self._slots.interrupt(at_step)

    def pause(self, on_new_weights: OnNewWeights) -> list[Completions]:
        """Without `refill`, only `finish` is possible: a batch is generated within one call of `finished`."""
        if self._slots is None and on_new_weights == "finish":
            return []
        return self._rows("pause").pause(on_new_weights)

    def resume(self) -> None:
        if self._slots is not None:
            self._slots.resume()

    def suspend(self) -> list[UnfinishedCompletion]:
        return self._rows("suspend").suspend()

    def submit_unfinished(self, unfinished: Sequence[UnfinishedCompletion], sampling: SamplingSettings) -> None:
        slots = self._rows("continue")
        for one in unfinished:
            self._check_length(one.prompt)
        if unfinished:
            assert self._width is not None, "set by the first prompts"
            slots.submit_unfinished(unfinished, sampling, width=self._width)

    def _rows(self, verb: str) -> Slots:
        if self._slots is None:
            raise ValueError(
                f"the engine huggingface can {verb} completions only with continuous batching; set "
                "engine_options.refill=true"
            )
        return self._slots

    def onload(self) -> None:
        super().onload()
        if self._slots is not None:
            self._slots.onload()

    def offload(self) -> None:
        self._release_caches()
        super().offload()

    def discard(self) -> None:
        self._release_caches()
        super().discard()

    def abandon(self) -> None:
        self._batch = None
        if self._make is not None:
            self._slots = self._make()
            self._slots.weights_received(self._version)

    def close(self) -> None:
        self._release_caches()

    def free_capacity(self, group_size: int) -> int:
        if self._slots is not None:
            return self._slots.free_capacity(group_size)
        return 0 if self._batch else max(1, self._max_batch_sequences // group_size)

    def submit(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int, step: int) -> None:
        if len(prompts) > self.free_capacity(sampling.group_size):
            raise ValueError(f"{len(prompts)} prompts exceed the engine's free_capacity()")
        for prompt in prompts:
            self._check_length(prompt)
        if self._slots is not None:
            if prompts:
                assert self._width is not None, "set by the first prompts"
                self._slots.submit(prompts, sampling, width=self._width, seed=seed, step=step)
            return
        self._batch = (prompts, sampling, seed, step) if prompts else None

    @torch.no_grad()
    def finished(self) -> list[Completions]:
        if self._slots is not None:
            return self._slots.finished()
        if self._batch is None:
            return []
        (prompts, sampling, seed, step), self._batch = self._batch, None
        keys = [NoiseKey(seed=seed, step=step, index=prompt.index) for prompt in prompts]
        noise = prompt_noise(keys, sampling).to(self._device)
        stops = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        kept_tokens: list[list[Tensor]] | None = [[] for _ in noise] if sampling.records_kept else None
        with recorded_experts(self._model) if sampling.records_experts else nullcontext() as choices:
            if self._decoder is None or choices is not None or kept_tokens is not None:  # graphs record nothing
                tensors = self._generate_batch(prompts, sampling, noise, stops, kept_tokens)
            else:
                tensors = self._decoder.generate(prompts, *self._pad(prompts, len(prompts)), noise, sampling, stops)
        tokens, logprobs, mask, truncated = (tensor.cpu().split(sampling.group_size) for tensor in tensors)
        experts: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(prompts)
        if choices is not None:
            lengths = [len(prompt.token_ids) for prompt in prompts]
            assert self._width is not None, "set by the first prompts"
            experts = [*experts_of_groups(choices, lengths, self._width, mask)]
        size = sampling.group_size
        members = tuple(range(size))
        return [
            Completions(
                index=prompt.index,
                members=members,
                token_ids=tokens[i],
                loss_mask=mask[i],
                logprobs=logprobs[i],
                truncated=truncated[i],
                prompt_experts=experts[i][0],
                experts=experts[i][1],
                kept_tokens=None if kept_tokens is None else KeptTokens.of_rows(kept_tokens[i * size : (i + 1) * size]),
                policy_version=self._version,
            )
            for i, prompt in enumerate(prompts)
        ]

    def _make_decoder(self, *, captures: bool = True) -> FixedDecoder | None:
        from rlinf_workers.engines.huggingface.graphs import FixedDecoder, why_not

        if (reason := why_not(self._model)) is not None:
            _LOG.warning("decoding without CUDA graphs, because %s", reason)
            return None
        return FixedDecoder(
            self._model, self._prefill, self._device, stop_ids=self._stop_ids, pad_id=self._pad_id, captures=captures
        )

    def _make_slots(self, max_rows: int | None, cache_share: float | None, keeps_turns: bool) -> Slots:
        from rlinf_workers.engines.huggingface.graphs import why_not
        from rlinf_workers.engines.huggingface.slots import Slots

        if (reason := why_not(self._model)) is not None:
            raise ValueError(f"engine_options.refill=true: rows cannot be refilled, because {reason}; leave it out")
        if cache_share is not None and not 0 < cache_share <= 1:
            raise ValueError(f"engine_options.cache_share={cache_share}: use a share above 0 and up to 1")
        return Slots(
            self._model,
            self._tokenizer,
            self._device,
            stop_ids=self._stop_ids,
            pad_id=self._pad_id,
            max_rows=max_rows,
            cache_share=cache_share,
            keeps_turns=keeps_turns,
        )

    def _release_caches(self) -> None:
        if self._decoder is not None:
            self._decoder.release()
        if self._slots is not None:
            self._slots.offload()

    def _generate_batch(
        self,
        prompts: Sequence[Prompt],
        settings: SamplingSettings,
        noise: Tensor,
        stops: StopStrings | None,
        kept_tokens: list[list[Tensor]] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Token ids, log-probabilities and mask, each [P * G, T], and which completions were truncated, [P * G].

        Args:
            kept: [P * G], to which the tokens that sampling left are appended, token by token; None: not recorded.
        """
        from transformers import DynamicCache

        num_prompts, group_size, num_tokens = len(prompts), settings.group_size, settings.max_new_tokens
        padded_prompts = max(num_prompts, -(-MIN_ROWS // group_size))
        prompt_ids, mask = self._pad(prompts, max(padded_prompts, MIN_ROWS))
        cache = DynamicCache(config=self._model.config)
        logits = self._prefill(prompts, prompt_ids, mask, cache)[:padded_prompts].repeat_interleave(group_size, 0)
        offsets = rope_offsets(_pictures(prompts, padded_prompts))
        offsets = None if offsets is None else offsets.repeat_interleave(group_size, 0).to(self._device)
        cache.batch_select_indices(torch.arange(padded_prompts, device=self._device).repeat_interleave(group_size))
        mask = mask[:padded_prompts].repeat_interleave(group_size, 0)
        noise = torch.cat([noise, noise.new_zeros(len(logits) - len(noise), num_tokens)])

        token_ids = torch.full((len(logits), num_tokens), self._pad_id, device=self._device)
        logprobs = torch.zeros(len(logits), num_tokens, device=self._device)
        loss_mask = torch.zeros(len(logits), num_tokens, device=self._device)
        running = torch.ones(len(logits), dtype=torch.bool, device=self._device)
        for t in range(num_tokens):
            if kept_tokens is None:
                tokens, token_logprobs = sample_tokens(logits, noise[:, t], settings)
            else:
                tokens, token_logprobs, is_kept = sample_kept(logits, noise[:, t], settings)
                for row, ids, is_running in zip(kept_tokens, split_by_row(is_kept), running.tolist(), strict=False):
                    row += [ids] if is_running else []
            token_ids[:, t] = torch.where(running, tokens, self._pad_id)
            logprobs[:, t] = torch.where(running, token_logprobs, 0.0)
            loss_mask[:, t] = running
            running = running & ~torch.isin(tokens, self._stop_ids)
            if stops is not None:
                for row in running.nonzero()[:, 0].tolist():
                    running[row] = stops.end(token_ids[row, : t + 1].tolist(), begun=t) is None
            if t + 1 == num_tokens or not running.any():
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            logits = self._forward(token_ids[:, t : t + 1], mask, cache, offsets)
        num_rows = num_prompts * group_size
        return token_ids[:num_rows], logprobs[:num_rows], loss_mask[:num_rows], running[:num_rows]

    def _prefill(self, prompts: Sequence[Prompt], token_ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """As `_forward`, for padded prompts and what they show."""
        pictures = _pictures(prompts, len(token_ids))
        if not any(pictures):
            return self._forward(token_ids, mask, cache)
        positions = padded_positions(pictures, mask).to(self._device)
        with whole_masks(), seen(self._model, pictures, padded_places(pictures, mask)) as arguments:
            return self._last_logits(token_ids, cache, attention_mask=mask, position_ids=positions, **arguments)

    def _forward(self, token_ids: Tensor, mask: Tensor, cache: Any, offsets: Tensor | None = None) -> Tensor:
        """Logits of the last position, [B, V]; fills the cache.

        Args:
            offsets: [B] int64, how far positions differ from the numbers of tokens before them.
        """
        if not self._pads and offsets is None:
            return self._last_logits(token_ids, cache)
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)[:, -token_ids.shape[1] :]
        if offsets is not None:
            positions = positions + offsets[:, None]
        with whole_masks():
            return self._last_logits(token_ids, cache, attention_mask=mask, position_ids=positions)

    def _last_logits(self, token_ids: Tensor, cache: Any, **arguments: Tensor) -> Tensor:
        output = self._model(input_ids=token_ids, **as_cache(cache), use_cache=True, logits_to_keep=1, **arguments)
        return output.logits[:, -1]

    def _pad(self, prompts: Sequence[Prompt], num_rows: int) -> tuple[Tensor, Tensor]:
        """Prompt ids [num_rows, L], left-padded, and their mask; rows past the prompts repeat the last one, or have one
        token if it has pictures."""
        assert self._width is not None, "set by the first prompts"
        rows = [prompt.token_ids for prompt in prompts]
        rows += [self._blank if prompts[-1].pictures else rows[-1]] * (num_rows - len(rows))
        token_ids, mask = pad_left(rows, self._width, self._pad_id)
        return token_ids.to(self._device), mask.to(self._device)

    def _check_length(self, prompt: Prompt) -> None:
        length = len(prompt.token_ids)
        if self._width is None:
            self._width = length
        if length > self._width or (length < self._width and not self._pads):
            allowed = "max_prompt_tokens allows" if self._pads else "without max_prompt_tokens all have"
            raise ValueError(f"prompt {prompt.index} has {length} tokens; {allowed} {self._width}")


def _pictures(prompts: Sequence[Prompt], num_rows: int) -> list[Pictures | None]:
    """[num_rows], those of the prompts; rows past them have none."""
    return [prompt.pictures for prompt in prompts] + [None] * (num_rows - len(prompts))
