"""What the worker processes of a run are started from and with."""
