"""What buffers take of the actor's host memory."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.config.embodied import EmbodiedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstratedRows:
    """What an actor keeps of demonstrations in its buffers."""

    num_bytes: int = 0
    text: str = ""
    """To follow the size of the other buffers; "" without demonstrations."""


def demonstrated_in(config: EmbodiedConfig, row_bytes: int) -> DemonstratedRows:
    """The largest that they can be, with a row for each action of episodes of `env.max_episode_steps`.

    Args:
        row_bytes: bytes of a row.
    """
    section = config.demonstrations or config.sft_warm_up
    if section is None:
        return DemonstratedRows()
    num_rows = section.num_episodes * config.env.max_episode_steps
    num_bytes = num_rows * row_bytes
    return DemonstratedRows(
        num_bytes=num_bytes, text=f", and up to {num_rows:,} demonstrated ones, {size_of(num_bytes)}"
    )


def size_of(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
