"""Processes: where workers live and how the driver talks to them."""
