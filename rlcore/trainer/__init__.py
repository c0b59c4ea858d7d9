"""The loop and what stands around it: planning, roles, evaluation, checkpoints."""
