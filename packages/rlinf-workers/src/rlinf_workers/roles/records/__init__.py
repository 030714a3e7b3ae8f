"""The items that travel through the shipped flows."""
