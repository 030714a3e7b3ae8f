"""The section `algorithm` of every job: an `rlinf_algos.Algorithm` whose fields a recipe may set.

`Algorithm` defines and checks the fields. A config adds three things: the job determines the kind of samples, omitted
fields come from the preset, and errors name their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapSerializer, WrapValidator
from pydantic_core import PydanticCustomError

from rlinf.config.base import CROSS_CHECK, Conflict
from rlinf_algos import FIELDS_OF_SAMPLES, Algorithm, AlgorithmError, AlgosError, filled


def _validator(samples: str, default: str) -> WrapValidator:
    def validate(values: Any, handler: ValidatorFunctionWrapHandler) -> Algorithm:
        if not isinstance(values, dict) or not isinstance(name := values.get("name", default), str):
            return handler(values)
        if (chosen := values.get("samples", samples)) != samples:
            raise _refused([("samples", f"={chosen}: the samples of this job are {samples}; leave it out")])
        try:
            return handler(filled(name, values | {"samples": samples}) | values)
        except AlgosError as error:
            raise _refused([("name", f"={name}: {error}")]) from error
        except ValidationError as error:
            for detail in error.errors():
                if isinstance(cause := detail.get("ctx", {}).get("error"), AlgorithmError):
                    raise _refused(cause.problems) from error
            raise

    return WrapValidator(validate)


def _refused(problems: Sequence[tuple[str, str]]) -> PydanticCustomError:
    conflicts = [Conflict(keys=(f"algorithm.{key}", "algorithm.name"), text=text) for key, text in problems]
    return PydanticCustomError(CROSS_CHECK, "{text}", {"text": "\n".join(map(str, conflicts)), "conflicts": conflicts})


def _own_fields(algorithm: Algorithm, handler: Any) -> dict[str, Any]:
    """Serializes without the fields for the other kind of samples."""
    (other,) = set(FIELDS_OF_SAMPLES) - {algorithm.samples}
    return {
        key: value
        for key, value in handler(algorithm).items()
        if key != "samples" and key not in FIELDS_OF_SAMPLES[other]
    }


CompletionsAlgorithm = Annotated[Algorithm, _validator("completions", "grpo"), WrapSerializer(_own_fields)]
EpisodesAlgorithm = Annotated[Algorithm, _validator("episodes", "ppo"), WrapSerializer(_own_fields)]
