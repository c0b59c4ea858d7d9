"""Configuration: dataclasses define it (schema.py, build.py), Hydra composes it (compose.py), presets are in conf/."""
