"""Finding the state of a job, and the ranks that share it."""
