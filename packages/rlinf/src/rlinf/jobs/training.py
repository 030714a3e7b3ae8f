"""What both jobs tell the roles that hold a model: the backend."""

from __future__ import annotations

from rlinf.config.embodied import PolicyActorConfig
from rlinf.config.reasoning import ActorConfig
from rlinf.doors import named_class
from rlinf_workers.registry import BACKENDS
from rlinf_workers.training.base import BackendSettings


def backend_settings(actor: ActorConfig | PolicyActorConfig, num_shards: int) -> BackendSettings:
    """Raises: UserError where there is no such backend, or its constructor does not take the options."""
    name, options = actor.backend, dict(actor.backend_options)
    settings = {"optimizer": None, "num_shards": num_shards}
    named_class(BACKENDS, name, options, None, None, at=f"actor.backend={name}", **settings)
    return BackendSettings(name=name, options=options, num_shards=num_shards)
