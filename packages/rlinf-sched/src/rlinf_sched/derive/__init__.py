"""Profiles from public shapes: a model's config.json, a GPU's datasheet, a simulator's published rate.

Every constant names its source; none is fitted to a result of a system like this one. Derived profiles answer "which
plan, and why" before anything runs; measured ones replace them where they exist.

Example: GRPO on a model of one's own, 16 A100s:
    from rlinf_sched.derive import grpo
    problem = grpo(model="models/mine", gpu="A100", num_devices=16, num_prompts=128, sequence_tokens=8192)

A name is imported when it is first asked for, so that shapes can be read without numpy.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
