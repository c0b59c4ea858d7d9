"""Fixtures, models and data that the tests of the core and of the plugins share; pytest has this folder on its path."""
