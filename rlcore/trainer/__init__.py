"""The training loop, with planning, roles, evaluation and checkpoints."""
