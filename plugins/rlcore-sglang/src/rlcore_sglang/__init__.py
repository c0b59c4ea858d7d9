"""rlcore on SGLang: `rollout=sglang`.

Reading order: rollout.py (called by the core), requests.py (conversion of requests and samples), own.py (an engine started
by this rollout), engine.py (main program of its process), weights.py and loader.py (weight updates), server.py (client of a
running server). Only engine.py and loader.py need SGLang, and they run in its processes; the other modules do not import it.
"""

from rlcore_sglang.config import SGLangConfig
from rlcore_sglang.rollout import SGLangRollout

__all__ = ["SGLangConfig", "SGLangRollout"]
