"""Stop strings: where a completion ends because of what its text says.

A completion ends with the first token after which its text, as the tokenizer decodes it with special tokens, contains
a stop string. The stop string belongs to the completion, and so does the rest of the token that completes it, because
a token cannot be cut. What the prompt says does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MARGIN = 4
"""Tokens before those that can hold a stop string: decoders drop a space at the beginning, or half a character."""


class StopStrings:
    """Finds stop strings in the tokens of completions.

    Args:
        tokenizer: one of transformers, each of whose tokens stands for at least one byte of text.
        stops: not empty, and none of them is.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._window = max(len(stop.encode()) for stop in stops) + MARGIN

    def end(self, token_ids: Sequence[int], *, begun: int = 0) -> int | None:
        """How many tokens of a completion there are up to the end of its first stop string; None: it has none.

        Args:
            begun: so many tokens are known to hold none.
        """
        if not self._is_in(token_ids[max(0, begun - self._window) :]):
            return None
        ends = range(begun + 1, len(token_ids) + 1)
        return next((end for end in ends if self._is_in(token_ids[max(0, end - self._window) : end])), None)

    def _is_in(self, token_ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stops)
