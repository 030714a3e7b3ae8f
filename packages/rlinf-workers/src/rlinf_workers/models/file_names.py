"""The names that the tensors of a transformers model have in files.

transformers keeps some models under other names in memory than on disk: the experts of a Qwen3 mixture are one tensor
[experts, 2 * width, hidden] in memory and two for each expert on disk. It reverts that in `save_pretrained`, for the
whole model; here it is done for those tensors that one rank writes.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

CONVERTS = importlib.util.find_spec("transformers.core_model_loading") is not None
"""Whether this release of transformers does so; those before 5 have one name for everything."""


def converted_together(model: Any, names: Iterable[str]) -> list[Sequence[str]]:
    """Names of tensors in memory, those together that become one tensor in a file."""
    if not CONVERTS:
        return [[name] for name in names]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_converters

    loaded_with = getattr(model, "_weight_conversions", None)
    found = get_model_conversion_mapping(model, add_legacy=False) if loaded_with is None else loaded_with
    reverts = [one.reverse_transform() for one in reversed(found)]
    converters = [one for one in reverts if isinstance(one, WeightConverter)]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[apply_converters(name, converters)[0]].append(name)
    return list(groups.values())


def under_file_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names in memory -> as they are in files."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    if not CONVERTS:
        return kept
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, kept)
