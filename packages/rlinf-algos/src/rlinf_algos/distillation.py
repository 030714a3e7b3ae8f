"""On-policy distillation: the student samples, the teacher judges every token.

Two ways. As a policy gradient, with the per-token reverse KL as the advantage (`reverse_kl_advantages`; MiniLLM,
arXiv:2306.08543; K. Lu et al., "On-Policy Distillation", Thinking Machines, 2025): of the teacher it needs only the
log-probabilities of the sampled tokens. Or directly, with the divergence over the whole vocabulary
(`distillation_terms`; GKD, arXiv:2306.13649): needs both sets of logits, has no sampling noise within a token.
"""

import torch
from torch import Tensor

from rlinf_algos.checks import as_mask, check_range, check_shape, masked
from rlinf_algos.divergence import Divergence, vocabulary_divergence


@torch.no_grad()
def reverse_kl_advantages(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    loss_mask: Tensor | None = None,
    *,
    coef: float = 1.0,
) -> Tensor:
    """`coef * (teacher_logprobs - student_logprobs)`: each token's own part of -KL(student || teacher), without what
    comes after (gamma = 0). Use it as the advantage of any policy loss, or add it to a reward's.

    Args:
        student_logprobs: any shape, nats, of the policy that sampled: rollout_logprobs or proximal_logprobs.
        teacher_logprobs: the same shape, the teacher's of the same tokens.
        loss_mask: the same shape, bool or 0/1; None: every element.
        coef: weight, at least 0.

    Returns:
        the same shape, at least float32, 0 outside the mask, without gradient.

    Raises:
        ShapeError, NonFiniteError. AlgosError: a negative coef.
    """
    check_range("coef", coef, low=0.0, why="a negative one would move away from the teacher")
    check_shape("teacher_logprobs", teacher_logprobs, student_logprobs.shape, "student_logprobs")
    mask = as_mask("loss_mask", loss_mask, "student_logprobs", student_logprobs)
    teacher = masked("teacher_logprobs", teacher_logprobs, mask)
    return coef * (teacher - masked("student_logprobs", student_logprobs, mask))


def distillation_terms(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float = 1.0,
    *,
    kind: Divergence = "reverse",
    beta: float = 0.5,
    loss_mask: Tensor | None = None,
) -> Tensor:
    """The divergence between student and teacher at each token, exact over the vocabulary, to aggregate and minimise.

    Args:
        student_logits: [B, T, V], with gradient.
        teacher_logits: [B, T, V], a constant; the same vocabulary.
        temperature: of both.
        kind: "reverse" KL(student || teacher), which seeks a mode (TRL: `beta=1`); "forward" KL(teacher || student),
            which covers all of them (`beta=0`); "js" between the two.
        beta: the teacher's weight in the mixture of "js", as in TRL.
        loss_mask: [B, T].

    Returns and raises: as `rlinf_algos.divergence.vocabulary_divergence`, [B, T] in nats.
    """
    return vocabulary_divergence(student_logits, teacher_logits, temperature, kind=kind, beta=beta, loss_mask=loss_mask)
