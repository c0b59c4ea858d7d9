"""Train from Python with rows, functions and a callback, then evaluate:  python examples/python_api.py

It needs neither a GPU nor Ray, and takes about ten seconds.
"""

import rlcore


def sorted_start(completion: str, digits: str) -> float:
    """Reward the first digit; `digits` is a column of the data."""
    return float(completion[:1] == min(digits))


class Progress:
    """A callback: methods have the names of hooks and take any of their arguments."""

    def rlcore_step_end(self, step, metrics):
        print(f"step {step}: reward {metrics['reward/mean']:.2f}")


rows = [{"prompt": f"sort {number}=", "digits": str(number)} for number in range(50000, 50400)]
held_out = [{"prompt": f"sort {number}=", "digits": str(number)} for number in range(70000, 70050)]

settings = {"trainer.steps": 3, "trainer.prompts_per_step": 32, "sampling.max_response_tokens": 8}

if __name__ == "__main__":
    result = rlcore.train(
        model="quickstart:model",  # a directory, or a loaded model with tokenizer=
        data=rows,
        reward=[sorted_start, {"name": "sorted_digits", "weight": 0.5}],
        runtime="local",  # "ray" on more than one device
        callbacks=[Progress()],
        settings=settings,
    )
    print(result.directory, result.metrics[-1]["reward/mean"])

    found = rlcore.evaluate(result, held_out, reward=sorted_start)
    print(found.metrics["eval/reward"], found.samples[0]["completion"])

    planned = rlcore.plan("quickstart:model", rows, reward=sorted_start, runtime="local", settings=settings)
    print(planned.describe())
    with rlcore.launch(planned) as run:
        for metrics in run:
            if metrics["reward/mean"] > 0.9:
                break
    print(run.result.directory)
