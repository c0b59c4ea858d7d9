"""A reward as a function, for completions that contain the row's answer and are short."""


def right_and_short(completion: str, answer: str, num_tokens: int, *, limit: int = 64) -> float:
    """Score 1 for a right answer within `limit` tokens, 0.5 for a longer one, 0 for a wrong one."""
    if answer not in completion:
        return 0.0
    return 1.0 if num_tokens <= limit else 0.5
