"""Rewards for rlcore, one file each; they run in the reward processes of a run like any other."""
