"""Algorithms for rlcore: policy gradients, off-policy corrections, preferences, imitation, distillation."""
