"""What commands tell the terminal while they work."""
