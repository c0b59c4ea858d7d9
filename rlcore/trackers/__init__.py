"""Destinations of metrics and samples."""
