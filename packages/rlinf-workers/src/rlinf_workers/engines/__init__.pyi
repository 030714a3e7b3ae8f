from .base import (
    Completions as Completions,
    GenerationEngine as GenerationEngine,
    RemoteWeights as RemoteWeights,
    SupportsAbort as SupportsAbort,
)
from .huggingface.engine import HuggingFaceEngine as HuggingFaceEngine
from .inside import enter as enter
from .sampling import SamplingSettings as SamplingSettings
from .spec import EngineSpec as EngineSpec
