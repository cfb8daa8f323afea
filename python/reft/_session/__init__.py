"""One rank in one attempt: start, program points, notes."""
