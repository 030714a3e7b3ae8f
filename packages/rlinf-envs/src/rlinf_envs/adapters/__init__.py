"""A folder for each kind of environment: `spec.py`, which needs no simulator and no torch, beside its run time."""
