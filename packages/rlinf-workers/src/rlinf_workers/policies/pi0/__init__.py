"""pi0: a vision-language model reads pictures and an instruction, and an expert denoises a chunk of actions."""
