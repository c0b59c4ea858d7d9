"""An environment with a tool: the model may look up a word before it answers."""

from rlcore_environments.tools import ToolEnvironment

WORDS = {"kilo": "a thousand", "mega": "a million"}


def look_up(word: str) -> str:
    """Look up the meaning of a word.

    Args:
        word: The word in lower case.
    """
    return WORDS[word]


class Dictionary(ToolEnvironment):
    tools = (look_up,)

    async def score(self, answer: str) -> float:
        return float(self.row["answer"] in answer)


EXAMPLES = [
    (
        {"prompt": "How much is a kilo?", "answer": "thousand"},
        ['<tool_call>{"name": "look_up", "arguments": {"word": "kilo"}}</tool_call>', "A thousand."],
        1.0,
    ),
    ({"prompt": "How much is a kilo?", "answer": "thousand"}, ["A million."], 0.0),
]
