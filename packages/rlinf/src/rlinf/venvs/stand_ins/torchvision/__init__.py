"""rlinf's stand-in for torchvision 0.28.0 on CPUs: the names that SGLang, vLLM and transformers import for vision
models.

It does not read or change images. Names as of SGLang 0.5.23, vLLM 0.32.0 and transformers 5.19.
"""

from __future__ import annotations

import torch

__version__ = "0.28.0+rlinf.standin"

if torch.version.cuda is not None or torch.version.hip is not None:
    raise ImportError("this torchvision is rlinf's stand-in for CPUs; install the torchvision that fits this torch")
