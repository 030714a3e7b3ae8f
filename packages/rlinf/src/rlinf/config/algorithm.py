"""The section `algorithm` of every job: an `rlinf_algos.Algorithm` whose fields a recipe may set; for robots also an
`rlinf_algos.OffPolicyAlgorithm` or `rlinf_algos.DaggerAlgorithm`, which have other fields. `algorithm.name` decides.

These records define and check the fields. A config adds three things: the job determines the kind of samples, omitted
fields come from the preset, and errors name their keys. The section `rollout` is validated before it: with quantized
weights, the default correction is another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    Discriminator,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from rlinf.config.base import CROSS_CHECK, Conflict
from rlinf_algos import (
    DAGGER,
    FIELDS_OF_SAMPLES,
    OFF_POLICY_PRESETS,
    Algorithm,
    AlgorithmError,
    AlgosError,
    DaggerAlgorithm,
    OffPolicyAlgorithm,
    filled,
    filled_off_policy,
)

A = TypeVar("A", Algorithm, OffPolicyAlgorithm, DaggerAlgorithm)


def _validator(samples: str, default: str) -> WrapValidator:
    def validate(values: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Algorithm:
        if not isinstance(values, dict) or not isinstance(name := values.get("name", default), str):
            return handler(values)
        if (chosen := values.get("samples", samples)) != samples:
            raise _refused([("samples", f"={chosen}: the samples of this job are {samples}; leave it out")])
        try:
            engine_differs = getattr(info.data.get("rollout"), "quantization", None) is not None
            values = filled(name, values | {"samples": samples}, engine_differs=engine_differs) | values
        except AlgosError as error:
            raise _refused([("name", f"={name}: {error}")]) from error
        return _handled(handler, values)

    return WrapValidator(validate)


def _off_policy(values: Any, handler: ValidatorFunctionWrapHandler) -> OffPolicyAlgorithm:
    return _handled(handler, filled_off_policy(values["name"], values) if isinstance(values, dict) else values)


def _dagger(values: Any, handler: ValidatorFunctionWrapHandler) -> DaggerAlgorithm:
    return _handled(handler, values)


def _handled(handler: Callable[[Any], A], values: Any) -> A:
    """Validates fields; what the record itself refuses names its keys."""
    try:
        return handler(values)
    except ValidationError as error:
        for detail in error.errors():
            if isinstance(cause := detail.get("ctx", {}).get("error"), AlgorithmError):
                raise _refused(cause.problems) from error
        raise


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


def _kind(values: Any) -> Literal["off_policy", "dagger", "episodes"]:
    """Which record the section is."""
    name = values.get("name") if isinstance(values, dict) else getattr(values, "name", None)
    return "dagger" if name == DAGGER else "off_policy" if name in OFF_POLICY_PRESETS else "episodes"


RobotAlgorithm = Annotated[
    Annotated[EpisodesAlgorithm, Tag("episodes")]
    | Annotated[OffPolicyAlgorithm, WrapValidator(_off_policy), Tag("off_policy")]
    | Annotated[DaggerAlgorithm, WrapValidator(_dagger), Tag("dagger")],
    Discriminator(_kind),
]
