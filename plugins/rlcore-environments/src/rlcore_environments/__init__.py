"""Environments: conversations of several turns over any engine of rlcore, and a base for tools."""
