"""rlcore on SGLang: `rollout=sglang`.

Reading order: rollout.py (what the core calls), requests.py (requests and samples), own.py (an engine that this rollout
starts), engine.py (what runs in its process), weights.py and loader.py (how weights get there), server.py (a server that
runs already). Only engine.py and loader.py need SGLang, and they run in its processes; nothing here imports it.
"""

from rlcore_sglang.config import SGLangConfig
from rlcore_sglang.rollout import SGLangRollout

__all__ = ["SGLangConfig", "SGLangRollout"]
