"""Shared parts of plugins: `engine` for rollouts that wrap another engine, `http` for plugins that call a server."""
