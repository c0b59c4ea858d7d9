"""Shared parts of plugins.

`backend` is for training backends, `engine` for rollouts that wrap another engine, `http` for plugins that call a server.
"""
