"""Configuration: dataclasses are the truth (schema.py, build.py), Hydra composes (compose.py), presets lie in conf/."""
