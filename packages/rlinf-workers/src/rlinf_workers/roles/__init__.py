"""Roles: the workers of the shipped jobs, and the records that they exchange. A role knows the algorithm, but no
engine, backend, policy or environment by name."""
