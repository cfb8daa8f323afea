"""Started agents, for the attacks on them."""

from tests.integration.test_agent import make

__all__ = ["make"]
