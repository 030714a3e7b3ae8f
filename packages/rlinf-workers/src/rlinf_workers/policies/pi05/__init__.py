"""pi0.5: pi0 with the state as text in the prompt, and with an expert whose norms depend on the denoising time."""
