"""The Python interface: `rlcore.train`, `plan`, `launch`, `evaluate` and `rollout`, which the commands call too."""
