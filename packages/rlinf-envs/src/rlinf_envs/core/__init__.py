"""Shared by all kinds of environments: the protocol, batches of rows, simulators in subprocesses."""
