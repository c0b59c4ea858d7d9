"""A reward in one function: does the story mention the animal that its row names, and does it end?

    rlcore train model.path=DIR data.train=stories.jsonl reward=examples/animal_story.py:animal_story

with rows such as  {"prompt": "Once upon a time", "animal": "dog"}
"""

import re


def animal_story(completion: str, finish_reason: str, animal: str) -> float:
    """1 for a story that mentions the animal and ends before the limit; 0.7 if it does not end, 0.3 if it only ends."""
    mentioned = re.search(rf"\b{re.escape(animal)}s?\b", completion, re.IGNORECASE) is not None
    return 0.7 * mentioned + 0.3 * (finish_reason == "stop")
