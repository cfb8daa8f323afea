"""Tests of reft. `tests.support` holds what they share."""
