"""The weight sync `device`: through the memory of GPUs of one machine."""
