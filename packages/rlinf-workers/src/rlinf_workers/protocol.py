"""What a driver and a worker must agree on, beside rlinf_comm.protocol. Imports nothing, so that it can be read without
torch."""

PROTOCOL = 5
"""Raised by whoever changes a control message (launchers/messages.py), or what the driver calls of a WorkerHost and
what it means."""
