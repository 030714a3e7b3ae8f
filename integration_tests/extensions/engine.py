"""A custom engine: finishes completions one at a time and in any order, and takes more prompts meanwhile.

It samples with the Hugging Face engine. Another one starts its own processes in the constructor and ends them in
`close`; its `weights` and `layout` say where the tensors lie that it serves.
"""

import random
from dataclasses import dataclass, replace

from rlinf_workers.engines import Completions, EngineSpec, HuggingFaceEngine


@dataclass(frozen=True, kw_only=True)
class OutOfOrderOptions:
    order_seed: int = 0
    """Decides which completion comes back next."""


class OutOfOrder(HuggingFaceEngine):
    spec = EngineSpec(options=OutOfOrderOptions, cuts_models=False)

    def __init__(self, model, device, *, max_prompt_tokens, max_batch_sequences, order_seed=0):
        super().__init__(model, device, max_prompt_tokens=max_prompt_tokens, max_batch_sequences=max_batch_sequences)
        self._under_way: list[Completions] = []
        self._order = random.Random(order_seed)

    def free_capacity(self, group_size):
        return super().free_capacity(group_size) - len({one.index for one in self._under_way})

    def submit(self, prompts, sampling, *, seed, step):
        super().submit(prompts, sampling, seed=seed, step=step)
        self._under_way += [one for group in super().finished() for one in _singly(group)]
        self._order.shuffle(self._under_way)

    def finished(self):
        return [self._under_way.pop()] if self._under_way else []


def _singly(group):
    for i, member in enumerate(group.members):
        length = int(group.loss_mask[i].sum())
        yield replace(
            group,
            members=(member,),
            token_ids=group.token_ids[i : i + 1, :length],
            loss_mask=group.loss_mask[i : i + 1, :length],
            logprobs=group.logprobs[i : i + 1, :length],
            truncated=group.truncated[i : i + 1],
        )
