"""Published search spaces, a module for each: what a network of the space is, by its encoding or its number."""
