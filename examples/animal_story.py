"""A reward in one function, for stories that mention the animal in their row and have an end.

    rlcore train model.path=DIR data.train=stories.jsonl reward=examples/animal_story.py:animal_story

with rows such as  {"prompt": "Once upon a time", "animal": "dog"}
"""

import re


def animal_story(completion: str, finish_reason: str, animal: str) -> float:
    """Score 1 for a story that mentions the animal and ends, 0.7 for the animal only, 0.3 for the end only."""
    mentioned = re.search(rf"\b{re.escape(animal)}s?\b", completion, re.IGNORECASE) is not None
    return 0.7 * mentioned + 0.3 * (finish_reason == "stop")
