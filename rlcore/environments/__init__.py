"""Bases of environments."""
