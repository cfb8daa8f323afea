"""The command `reft`."""
