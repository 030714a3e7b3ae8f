"""Scripts that run inside the code sandboxes: the program's side and the judge's side. They are not imported; their
text is copied into the sandbox."""
