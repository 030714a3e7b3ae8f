"""The spec of pi0.5: that of pi0, but with the state in the text."""

from rlinf_workers.policies.pi0.spec import Pi0Spec

SPEC = Pi0Spec(
    name="pi05",
    implementation="rlinf_workers.policies.pi05.policy:Pi05",
    published_model="pi0.5",
    text_tokens=200,
    own_layer="time_mlp_in",
)
