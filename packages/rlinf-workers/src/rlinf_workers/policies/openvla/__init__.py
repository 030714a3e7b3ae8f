"""OpenVLA (arXiv:2406.09246): a vision-language-action policy whose actions are tokens of a language model."""
