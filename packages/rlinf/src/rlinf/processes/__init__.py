"""Starts the worker processes of a run."""
