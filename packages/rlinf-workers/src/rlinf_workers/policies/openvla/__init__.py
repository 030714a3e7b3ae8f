"""OpenVLA (arXiv:2406.09246): a vision-language-action policy that says an action as tokens of a language model."""
