import pytest

from gptoss_debug.engines.environment import Environment, release


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.32.0", (0, 32, 0)), ("0.26.0+cu130", (0, 26, 0)), ("0.11.2rc1", (0, 11, 2)), ("0.1.dev1+gabc", None),
     ("not installed", None)],
)  # fmt: skip
def test_releases_are_read_and_source_builds_are_none(text, numbers):
    assert release(text) == numbers


def test_kernels_are_emulated_for_quantised_experts_on_a_cpu():
    assert Environment.current("marlin").kernels == "emulated"
    assert Environment.current("bf16_cpu").kernels == "real"
    assert "expert kernels emulated on the CPU" in str(Environment.current())
    assert "python" in Environment.current()._repr_html_()
