"""Device memory shared between processes of one machine: a sender's arena, mapped by its readers, without a copy.

rlinf_comm.ipc.driver   the driver's functions, as a protocol that tests replace
rlinf_comm.ipc.arena    the arena, and what another process needs to open it
rlinf_comm.ipc.opened   opened arenas, counted

The arena is a separate allocation, exported once: handles of the caching allocator's blocks would expose their
neighbours, and become invalid whenever it frees memory.
"""
