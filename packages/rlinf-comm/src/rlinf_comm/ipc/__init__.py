"""Device memory that processes of one machine share: a sender's arena, opened where it is read, without a copy.

rlinf_comm.ipc.driver   the driver's functions, as a protocol that tests replace
rlinf_comm.ipc.arena    the arena, and what another process needs to open it
rlinf_comm.ipc.opened   opened arenas, counted

The arena is its own allocation, exported once: handles of the caching allocator's blocks would expose its neighbours,
and go stale whenever it gives memory back.
"""
