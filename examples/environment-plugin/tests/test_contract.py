from example_calculator import EXAMPLES, Calculator, CalculatorConfig, calculate, called

from rlcore.testing import EnvironmentContract


class TestCalculator(EnvironmentContract):
    examples = EXAMPLES

    def make(self):
        return Calculator(CalculatorConfig())


def test_the_model_reads_the_error_of_an_invalid_expression():
    played = TestCalculator().play(
        EXAMPLES[0][0], ['<tool_call>{"name": "calculate", "arguments": {"expression": "f(1)"}}</tool_call>']
    )

    assert played.steps[0][0]["content"] == "error: ValueError: f(1) is not arithmetic"


def test_calculate_returns_exact_text():
    assert [calculate(it) for it in ("21*34", "(3+4)*-5", "1/4", "8/4")] == ["714", "-35", "0.25", "2"]


def test_large_results_keep_all_digits():
    assert calculate("1234*5678") == "7006652"
    assert calculate("99999999999*99999999999") == "9999999999800000000001"
    assert float(calculate("1/3")) == 1 / 3


def test_a_number_with_an_exponent_is_one_number():
    played = TestCalculator().play({"prompt": "a bit", "answer": "1e-07"}, [called("1/10000000"), "1e-07"])

    assert calculate("1/10000000") == "1e-07"
    assert played.reward == 1.0
