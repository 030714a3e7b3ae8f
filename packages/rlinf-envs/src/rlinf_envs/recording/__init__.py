"""Episodes kept whole, and films of them."""
