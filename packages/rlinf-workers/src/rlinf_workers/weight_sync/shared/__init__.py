"""The weight sync `shared`: through shared memory of one machine."""
