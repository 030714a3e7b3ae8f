"""Environments of Gymnasium, by their registered id."""
