"""The protocol number that two processes must share before they exchange anything. Imports nothing, so that it can be
read without torch."""

PROTOCOL = 1
"""Increase it with every change to the meaning of bytes that another process reads: encoded values, channels, pools and
weight stores in shared memory, digests, and the messages that exchange descriptors and addresses. Fields of records are
compared by name whenever one is received, and need no new number."""
