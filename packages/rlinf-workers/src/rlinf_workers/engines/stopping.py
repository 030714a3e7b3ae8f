"""Stop strings: end a completion when its text contains one.

A completion ends with the first token after which its text, decoded with special tokens, contains a stop string. The
stop string and the rest of the token that completes it belong to the completion, because a token cannot be split. The
prompt's text does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MARGIN = 4
"""Extra tokens before those that can hold a stop string: decoders drop a leading space or half a character."""


class StopStrings:
    """Finds stop strings in the tokens of completions.

    Args:
        tokenizer: a transformers tokenizer, each of whose tokens stands for at least one byte of text.
        stops: not empty, and without empty strings.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._window = max(len(stop.encode()) for stop in stops) + MARGIN

    def end(self, token_ids: Sequence[int], *, begun: int = 0) -> int | None:
        """Number of tokens up to the end of a completion's first stop string; None: it has none.

        Args:
            begun: this many tokens are known to contain none.
        """
        if not self._is_in(token_ids[max(0, begun - self._window) :]):
            return None
        ends = range(begun + 1, len(token_ids) + 1)
        return next((end for end in ends if self._is_in(token_ids[max(0, end - self._window) : end])), None)

    def _is_in(self, token_ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stops)
