"""The spec of the small actor-critic for pictures."""

from rlinf_workers.policies.spec import PolicySpec

SPEC = PolicySpec(name="cnn", implementation="rlinf_workers.policies.cnn.policy:CnnActorCritic", backbone=())
