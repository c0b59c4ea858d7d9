"""Built-in rewards, and the machinery that isolates the run from failing rewards.

Reading order: `rlcore.protocols.reward` (the interface), `signature` (the columns that a reward needs), `runner` (calls
rewards), `executor` (runs them in processes with a timeout), `pipeline` (outcomes to numbers). None imports torch.
"""
