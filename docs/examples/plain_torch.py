"""rlinf-algos alone in a plain torch loop: a small recurrent policy learns by GRPO to repeat a digit three times."""

import torch
from torch import Tensor, nn

from rlinf_algos import grpo_advantages, ppo_clip_loss, score_all, token_logprobs, token_mean

NUM_PROMPTS, GROUP_SIZE, NUM_TOKENS, NUM_STEPS, NUM_EPOCHS = 16, 8, 3, 60, 2  # B = NUM_PROMPTS * GROUP_SIZE


class Policy(nn.Module):
    """Token ids [B, L] -> logits of what follows each, [B, L, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 32), nn.Linear(32, 10)
        self.memory = nn.GRU(32, 32, batch_first=True)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.head(self.memory(self.embedding(token_ids))[0])


def sample(policy: Policy, prompts: Tensor) -> Tensor:
    """[B, 1] prompts -> [B, T] completions."""
    sequences = prompts
    for _ in range(NUM_TOKENS):
        next_ids = torch.multinomial(policy(sequences)[:, -1].softmax(-1), 1)
        sequences = torch.cat([sequences, next_ids], 1)
    return sequences[:, 1:]


def main() -> float:
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for step in range(NUM_STEPS):
        prompts = torch.randint(10, (NUM_PROMPTS, 1)).repeat_interleave(GROUP_SIZE, 0)
        with torch.no_grad():
            completions = sample(policy, prompts)
            inputs = torch.cat([prompts, completions[:, :-1]], 1)
            proximal_logprobs = token_logprobs(policy(inputs), completions)
        texts = ["".join(map(str, row)) for row in completions.tolist()]
        answers = [str(digit) * NUM_TOKENS for digit in prompts.flatten().tolist()]
        right = torch.tensor([result.value for result in score_all("exact_match", texts, answers)])
        rewards = right + (completions == prompts).float().mean(1)  # a part of the way counts too
        advantages = grpo_advantages(rewards.view(NUM_PROMPTS, GROUP_SIZE)).flatten()
        for _ in range(NUM_EPOCHS):
            logprobs = token_logprobs(policy(inputs), completions)
            loss = ppo_clip_loss(logprobs, proximal_logprobs, advantages, None, clip_high=0.28)
            optimizer.zero_grad()
            token_mean(loss.loss_terms, None, total_tokens=completions.numel()).backward()
            optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1}: {right.mean():.2f} right")
    return float(right.mean())


if __name__ == "__main__":
    main()
