"""What SGLang is told so that its processes call us; imports nothing of it."""

from __future__ import annotations

LOADER = "rlinf_workers.engines.sglang.inside.run"
"""The `load_format` of update_weights_from_tensor that calls `inside.run` in every process; the server argument
`custom_weight_loader` has to list it."""
