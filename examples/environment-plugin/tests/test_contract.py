from example_calculator import EXAMPLES, Calculator, CalculatorConfig, calculate

from rlcore.testing import EnvironmentContract


class TestCalculator(EnvironmentContract):
    examples = EXAMPLES

    def make(self):
        return Calculator(CalculatorConfig())


def test_what_is_no_arithmetic_is_told_to_the_model():
    said = TestCalculator().play(
        EXAMPLES[0][0], ['<tool_call>{"name": "calculate", "arguments": {"expression": "f(1)"}}</tool_call>']
    )

    assert said.steps[0][0]["content"] == "error: ValueError: f(1) is no arithmetic"


def test_calculate():
    assert [calculate(it) for it in ("21*34", "(3+4)*-5", "1/4")] == ["714", "-35", "0.25"]
