"""What several simulators need on machines without a GPU."""
