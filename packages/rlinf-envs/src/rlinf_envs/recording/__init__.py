"""Records complete episodes and makes films of them."""
