"""pi0.5: pi0 whose state is words of the prompt, and whose expert takes the denoising time into its norms."""
