"""Generation engines: prompts in, completions with log-probabilities out."""
