"""Multi-turn environments over any engine of rlcore, and a base class for environments with tools."""
