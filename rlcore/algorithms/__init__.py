"""Algorithms, one file each, and the pure functions that they share."""
