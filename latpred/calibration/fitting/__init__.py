"""From journal rows to a profile, and the gate that accepts it."""
