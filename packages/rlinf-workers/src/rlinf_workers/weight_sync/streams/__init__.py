"""The weight sync `streams`: between processes of any machines."""
