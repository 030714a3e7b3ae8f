"""Workarounds that several simulators need on machines without a GPU."""
