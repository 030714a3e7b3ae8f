"""The protocol number that a driver and its workers must share, besides rlinf_comm.protocol. Imports nothing, so that
it can be read without torch."""

PROTOCOL = 7
"""Increase it with every change to a control message (launchers/messages.py), or to the methods of WorkerHost that the
driver calls."""
