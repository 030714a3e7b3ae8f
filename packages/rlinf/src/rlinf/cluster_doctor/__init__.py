"""`rlinf doctor --cluster`: every node of a Ray cluster looked at, and every way between two of them."""
