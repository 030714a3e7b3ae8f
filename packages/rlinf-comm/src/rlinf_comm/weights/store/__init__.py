"""Transfers weights from the ranks that train them to the ranks that serve them, through shared memory, attested.

A store has two slots. A sender writes version v into one while receivers may still read version v - 1 from the other;
it waits before it overwrites a version that some receiver has not received. Each piece of a reshard plan (a box that
some receiver needs) is stored densely in a slot, in the dtype of its destination, with the version and the digest that
the sender computed from its own tensor.

A sender that keeps its tensors may publish by reference instead: the slot stays empty, receivers copy from the sender's
tensors, and the slot is filled only if those are about to change before every receiver has the version.

A receiver copies its boxes from the slot directly into its own tensors, and then computes the digests of *those
tensors*. So the check covers what will be served: a torn copy, a flipped byte in the store, a stale or a missing piece
all end in WeightMismatchError with the names of the tensors, and never in a policy that is silently wrong.

memory.py                the slots, the control words, and access to them
side.py                  the common base of the two ends
shared_tensors.py        tensors of one process that others read by reference
sender.py, receiver.py   the two ends
"""
