"""Shared parts of backends; a new backend starts from `base.PackedBackend`."""
