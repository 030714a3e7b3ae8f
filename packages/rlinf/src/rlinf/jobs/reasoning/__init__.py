"""The job `reasoning`: a language model learns to answer, from rewards alone."""
