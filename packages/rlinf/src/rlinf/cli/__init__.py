"""The command `rlinf`."""
