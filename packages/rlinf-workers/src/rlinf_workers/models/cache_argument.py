"""The name of the KV cache argument in transformers models: `past_key_values`, and `cache` from 5.24 on, where the old
name is deprecated and warns at every call."""

from functools import cache
from typing import Any


def as_cache(of_earlier: Any) -> dict[str, Any]:
    """The KV cache as a keyword argument of a model or of one of its layers."""
    return {_name(): of_earlier}


@cache
def _name() -> str:
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "cache" if (major, minor) >= (5, 24) else "past_key_values"
