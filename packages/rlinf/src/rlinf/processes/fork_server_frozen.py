"""Last import of the fork server: freezes what was imported. The garbage collector of a worker then does not traverse
it, which would copy much of the server's memory after the fork."""

import gc

gc.collect()
gc.freeze()
