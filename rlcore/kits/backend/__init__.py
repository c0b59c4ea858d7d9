"""Shared parts of backends; `base.PackedBackend` is where a new one starts."""
