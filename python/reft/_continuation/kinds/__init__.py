"""The kinds of nodes: one module for each family, in each the captures and restores beside each
other, and `table`, which chooses a capture by an object's class."""
