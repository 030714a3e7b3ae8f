"""Weights over any transport, for hosts that share no memory.

sender.py, receiver.py   the two ends
wire.py                  the messages, and how boxes are divided into buckets
referenced.py            a version that is sent by reference
packing.py               a bucket in host memory, or on a device
talk.py                  deadlines, stale messages, several receivers at once
delta.py                 the compressed difference between two versions of a buffer
choice.py                delta or dense, by measured cost
"""
