"""Links: what carries the edges of a flow and of its weights between processes."""
