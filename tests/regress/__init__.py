"""Tests of single bugs, one file each: the first line says what was wrong, and the test fails
without the fix."""
