"""Models: Hugging Face language models and small actor-critics."""
