"""RLinf: reinforcement-learning post-training of language models and robot policies.

The product is the command `rlinf`; from Python, `rlinf.config` makes configs and `rlinf.jobs` runs them. Importing
this package imports nothing heavy.
"""

__version__ = "2026.11.0"
