"""The job `embodied`: a robot learns a task in simulation."""
