"""The supervised jobs: a language model learns from demonstrations (`sft`) or preferences (`dpo`)."""
