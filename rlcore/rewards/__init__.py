"""Rewards: built-in ones, and the machinery that runs any reward without letting it take the run down.

Reading order: `rlcore.protocols.reward` (what a reward is), `signature` (which columns it asks for), `scorer` (calls it),
`executor` (in processes with a time-out), `pipeline` (outcomes to numbers). Nothing here imports torch.
"""
