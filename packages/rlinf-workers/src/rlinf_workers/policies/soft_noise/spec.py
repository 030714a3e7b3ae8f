"""The spec of the soft actor over the noise of another policy."""

from rlinf_workers.policies.spec import PolicySpec

SPEC = PolicySpec(
    name="soft_noise", implementation="rlinf_workers.policies.soft_noise.policy:SoftNoise", backbone=(), off_policy=True
)
