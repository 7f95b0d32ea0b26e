"""The wheel holds posexport, all of it, and nothing else; the check that says so can fail."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel():
    found = importlib.util.spec_from_file_location("wheel_contents", ROOT / "scripts" / "wheel_contents.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_source_file_is_expected(wheel):
    assert {"posexport/py.typed", "posexport/models/rotary.py", "posexport/custom_ops/attention.py"} <= wheel.expected()
    assert wheel.problems(wheel.expected()) == []


def test_a_forgotten_module_is_noticed(wheel):
    assert wheel.problems(wheel.expected() - {"posexport/models/rotary.py"}) == [
        "the wheel lacks posexport/models/rotary.py"
    ]


def test_a_stray_package_is_noticed(wheel):
    assert wheel.problems(wheel.expected() | {"models/rotary.py"}) == [
        "the wheel holds models/rotary.py, which is no part of posexport"
    ]


def test_every_pin_lies_in_the_range_that_pyproject_states():
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==") for line in (ROOT / "scripts" / "constraints.txt").read_text().split("\n") if "==" in line
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    names = {name.lower().replace("_", "-"): pin for name, pin in pins.items()}
    for text in ranges:
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-")
        if name in ("tensorrt", "onnxruntime"):  # GPU machines, and machines that are no x86-64
            continue
        assert names[name] in requirement.specifier, f"{text} against {names[name]}"
