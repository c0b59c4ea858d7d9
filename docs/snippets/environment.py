"""An environment: the model guesses the number in the column `secret`, with hints whether it is higher or lower."""

import re
from typing import Any

from rlcore import Completion, Step


class Guess:
    def __init__(self, config: object) -> None:
        self.secret = 0

    async def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self.secret = int(row["secret"])
        return [{"role": "user", "content": "I think of a number from 1 to 100. Which is it?"}]

    async def step(self, completion: Completion) -> Step:
        found = re.findall(r"\d{1,9}", completion.text)
        if found and int(found[-1]) == self.secret:
            return Step(reward=1.0, done=True)
        if completion.last:
            return Step(reward=0.0, done=True)
        hint = "Please give a number." if not found else "Lower." if int(found[-1]) > self.secret else "Higher."
        return Step(messages=[{"role": "user", "content": hint}])


EXAMPLES = [({"secret": 7}, ["50", "3", "it is 7"], 1.0), ({"secret": 7}, ["8"], None)]
