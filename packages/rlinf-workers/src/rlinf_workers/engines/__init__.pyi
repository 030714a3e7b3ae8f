from .base import (
    Completions as Completions,
    GenerationEngine as GenerationEngine,
    OnNewWeights as OnNewWeights,
    RemoteWeights as RemoteWeights,
    SupportsAbort as SupportsAbort,
    SupportsPause as SupportsPause,
    UnfinishedCompletion as UnfinishedCompletion,
)
from .huggingface.engine import HuggingFaceEngine as HuggingFaceEngine
from .inside import enter as enter
from .sampling import NoiseKey as NoiseKey, SamplingSettings as SamplingSettings
from .spec import EngineSpec as EngineSpec
