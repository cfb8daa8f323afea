"""Putting a restarted script back."""
