"""Custom environments, by their import path."""
