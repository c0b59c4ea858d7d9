"""Training backends that come with the core."""
