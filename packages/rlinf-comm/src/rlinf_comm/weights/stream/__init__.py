"""Weights over any link, for hosts that share no memory.

sender.py, receiver.py   the two ends
wire.py                  the messages, and how boxes are cut into buckets
referenced.py            a version that is sent from where it lies
packing.py               a bucket in host memory, or on a device
talk.py                  deadlines, stale messages, several receivers at once
delta.py                 what changed between two versions of a buffer, in a few bytes
choice.py                delta or dense, by measured cost
"""
