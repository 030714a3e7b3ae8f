"""Scripts that run inside the sandbox for code: the program's side and the judge's. Nothing here is imported from
outside; their text is copied in."""
