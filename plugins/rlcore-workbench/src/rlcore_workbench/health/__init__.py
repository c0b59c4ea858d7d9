"""Checks of `rlcore doctor`: `machine`, `settings` and plugins, each in a separate process (`isolated`)."""
