"""OpenVLA-OFT (arXiv:2502.19645): OpenVLA that decodes a chunk of actions in one forward pass."""
