"""Where the pictures of a prompt are among its tokens, for servers that put the features of each into its place."""

from __future__ import annotations

import torch

from rlinf_workers.roles.records.language import Prompt


def picture_places(prompt: Prompt) -> list[tuple[int, int]]:
    """The first token of each picture of a prompt, and how many it has.

    Raises: ValueError if the tokens there are not the picture's; then its features would go to other tokens.
    """
    if prompt.pictures is None:
        return []
    places = []
    for begin, picture in zip(prompt.pictures.begins, prompt.pictures.pictures, strict=True):
        if not torch.equal(prompt.token_ids[begin : begin + picture.num_tokens], picture.token_ids):
            raise ValueError(
                f"prompt {prompt.index}: tokens {begin} to {begin + picture.num_tokens} are not those of the picture "
                f"that it has there ({picture.digest[:12]})"
            )
        places.append((begin, picture.num_tokens))
    return places
