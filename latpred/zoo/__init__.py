"""Models by name, from a user's own file, or as a search holds them."""
