"""Derives profiles from public data: a model's config.json, a GPU's datasheet, a simulator's published rate.

Every constant names its source; none is fitted to results of this system. Derived profiles answer "which plan, and why"
before anything runs; measured ones replace them once they exist.

Example: GRPO on a custom model, 16 A100s:
    from rlinf_sched.derive import grpo
    problem = grpo(model="models/mine", gpu="A100", num_devices=16, num_prompts=128, sequence_tokens=8192)

Names are imported at first use, so that shapes can be read without numpy.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
