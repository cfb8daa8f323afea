"""Restores the state of a restarted script."""
