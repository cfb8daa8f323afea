"""What attackers may try, one file a door."""
