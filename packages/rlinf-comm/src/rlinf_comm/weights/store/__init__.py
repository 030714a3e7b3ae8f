"""Hands weights from the ranks that train them to the ranks that serve them, through shared memory, attested.

A store has two slots. A sender writes version v into one while receivers may still read version v - 1 from the other;
it waits before it overwrites a version that a receiver has not taken. Each piece of a reshard plan (a box that some
receiver needs) lies dense in a slot, in the dtype of its destination, with the version and the digest that the sender
computed from its own tensor.

A sender whose tensors stay may lend a version instead: the slot stays empty, receivers copy from the sender's tensors,
and the slot is filled when those are about to change and a receiver has not come yet.

A receiver copies its boxes from the slot straight into its own tensors, and then computes the digests of *those
tensors*. So what is checked is what will be served: a torn copy, a flipped byte in the store, a stale or a missing
piece all end in WeightMismatchError with the names of the tensors, and never in a policy that is silently wrong.

memory.py                the slots, the control words, and who may open them
side.py                  what the two ends have in common
shared_tensors.py        tensors of one process that others read where they lie
sender.py, receiver.py   the two ends
"""
