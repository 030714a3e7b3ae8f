"""The arguments that make SGLang's processes call our loader; does not import SGLang."""

from __future__ import annotations

LOADER = "rlinf_workers.engines.sglang.inside.run"
"""The `load_format` of update_weights_from_tensor that calls `inside.run` in every process; the server argument
`custom_weight_loader` must list it."""
