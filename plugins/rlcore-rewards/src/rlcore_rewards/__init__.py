"""Rewards for rlcore, one file each."""
