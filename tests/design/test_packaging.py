"""The wheel contains all of posexport and nothing else, and the check of this can fail."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel():
    found = importlib.util.spec_from_file_location("wheel_contents", ROOT / "scripts" / "wheel_contents.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_source_file_is_expected(wheel):
    assert {"posexport/py.typed", "posexport/models/rotary.py", "posexport/custom_ops/attention.py"} <= wheel.expected()
    assert wheel.problems(wheel.expected()) == []


@pytest.mark.parametrize("name", ["posexport/models/rotary.py", "posexport/spec/preset_files/gpt-oss-20b.toml"])
def test_a_forgotten_file_is_noticed(wheel, name):
    assert wheel.problems(wheel.expected() - {name}) == [f"the wheel lacks {name}"]


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
        if name in ("tensorrt", "onnxruntime"):  # these are for GPU machines, and for machines that are not x86-64
            continue
        assert names[name] in requirement.specifier, f"{text} against {names[name]}"


@pytest.mark.slow
def test_the_wheel_installs_and_runs_elsewhere(tmp_path):
    """`pip install .` in two steps, without the dependencies, which are installed already."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    code = "import posexport.cli as c, posexport.models as m; print(c.__file__, m.__file__); c.main(['list'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *listed = done.stdout.splitlines()
    assert [Path(file).is_relative_to(site) for file in first.split()] == [True, True]
    assert any("rope2d" in line for line in listed)
