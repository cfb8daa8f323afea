"""The link to the agent: protocol, job identity, answers about hangs."""
