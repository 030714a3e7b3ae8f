"""The launcher `ray`: processes on the nodes of a Ray cluster."""
