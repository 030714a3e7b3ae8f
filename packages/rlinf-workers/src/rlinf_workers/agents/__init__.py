"""Agents: episodes of many turns, whose every token is kept as the engine served it.

records.py is what an episode leaves behind. Nothing in this folder imports torch.
"""
