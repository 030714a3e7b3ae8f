"""What both jobs tell the roles that hold a model: the backend."""

from __future__ import annotations

import inspect

from rlinf.config.embodied import PolicyActorConfig
from rlinf.config.reasoning import ActorConfig
from rlinf.errors import UserError
from rlinf_algos.errors import AlgosError
from rlinf_workers.registry import BACKENDS
from rlinf_workers.training.base import BackendSettings


def backend_settings(actor: ActorConfig | PolicyActorConfig, num_shards: int) -> BackendSettings:
    """Raises: UserError where there is no such backend, or its constructor does not take the options."""
    options = dict(actor.backend_options)
    try:
        signature = inspect.signature(BACKENDS.get(actor.backend))
    except AlgosError as error:
        raise UserError(f"actor.backend={actor.backend}: {error}") from error
    try:
        signature.bind(None, None, optimizer=None, num_shards=num_shards, **options)
    except TypeError as error:
        raise UserError(
            f"actor.backend_options: {actor.backend} {error}",
            hint="they are keyword arguments of the backend's constructor",
        ) from error
    return BackendSettings(name=actor.backend, options=options, num_shards=num_shards)
