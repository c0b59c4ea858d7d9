"""Generated stories and word problems: text with structure, from a seed and without a network."""

from __future__ import annotations

import random
from typing import Final

_SLOTS: Final = {
    "opening": (
        "Once upon a time, there was a little {child} named {name}. {name} lived near a {place}.",
        "Once upon a time, there was a {adjective} {animal}. The {animal} lived in the {place}.",
        "One day, a little {child} named {name} found a {adjective} {toy} in the {place}.",
        "{name} and {friend} were playing in the {place}. They had a {adjective} {toy}.",
        "There was a little {child} who loved to play with a {toy}.",
    ),
    "middle": (
        "One day, a {adjective} {animal} came to the {place}.",
        "The {animal} was {feeling} and wanted to {verb}.",
        '"Hello, {animal}," said {name}. "Do you want to {verb} with me?"',
        "{friend} saw the {animal} and was very {feeling}.",
        "They looked for the {toy} in the {place}, but it was not there.",
    ),
    "ending": (
        "They were very {feeling} and played all day.",
        "{name} went home and told {friend} about the {animal}.",
        "From that day on, {name} and the {animal} were best friends.",
        "The {toy} was {adjective} again, and {name} smiled.",
    ),
    "name": ("Lily", "Lily", "Tom", "Tim", "Sue", "Ben", "Anna", "Max"),
    "friend": ("Tom", "Mom", "Dad", "Sam", "Mia"),
    "child": ("girl", "girl", "boy"),
    "animal": ("dog", "cat", "bird", "bear", "fish", "frog", "bunny"),
    "toy": ("ball", "box", "kite", "hat", "book", "car"),
    "place": ("park", "garden", "forest", "house", "room", "sea"),
    "adjective": ("big", "small", "red", "shiny", "green", "pretty", "nice"),
    "feeling": ("happy", "sad", "scared", "excited", "proud"),
    "verb": ("play", "run", "jump", "sing", "eat", "hide"),
}


def write_story(draw: random.Random) -> str:
    """Return a story; each slot has one word throughout."""
    words = {slot: draw.choice(options) for slot, options in _SLOTS.items()}
    words["middle"] = " ".join(draw.sample(_SLOTS["middle"], 2))
    return "{opening} {middle} {ending}".format(**words).format(**words)


def write_problem(draw: random.Random) -> dict[str, str]:
    """Return a word problem with the columns, the calculator marks and the last line of GSM8K."""
    name, toy = draw.choice(_SLOTS["name"]), draw.choice(_SLOTS["toy"])
    first, factor = draw.randint(3, 600), draw.randint(2, 9)
    second, total = first * factor, first * (factor + 1)
    question = (
        f"{name} sold {first} {toy}s in April and {factor} times as many in May. "
        f"How many {toy}s did {name} sell in the two months?"
    )
    steps = (
        f"In May {name} sold {first}*{factor} = <<{first}*{factor}={second}>>{second} {toy}s.",
        f"In the two months {name} sold {first}+{second} = <<{first}+{second}={total}>>{total} {toy}s.",
        f"#### {total:,}",
    )
    return {"question": question, "answer": "\n".join(steps)}
