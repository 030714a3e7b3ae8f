"""Progress output of commands on the terminal."""
