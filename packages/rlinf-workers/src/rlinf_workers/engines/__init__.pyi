from .base import Completions as Completions
from .base import GenerationEngine as GenerationEngine
from .base import RemoteWeights as RemoteWeights
from .base import SupportsAbort as SupportsAbort
from .huggingface.engine import HuggingFaceEngine as HuggingFaceEngine
from .inside import enter as enter
from .sampling import SamplingSettings as SamplingSettings
from .spec import EngineSpec as EngineSpec
