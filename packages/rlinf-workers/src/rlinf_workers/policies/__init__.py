"""Policies: models that act on observations."""
