"""What two processes must agree on before they share anything, as one number. Imports nothing, so that it can be read
without torch."""

PROTOCOL = 3
"""Raised by whoever changes what the bytes mean that another process reads: encoded values, channels, pools and weight
stores in shared memory, digests, and the messages by which descriptors and addresses are handed over. Fields of records
are compared by name whenever one is received, and need no new number."""
