"""Messages if torch's exporter refuses a module: the place, the problem and advice, in posexport's words."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import cli, refused
from torch import nn

from posexport.errors import RequestError
from posexport.export import export_module
from posexport.runtimes.trace_errors import TraceError, chain_of

HEAD = """import torch
from torch import nn
from torch.export import Dim
from neighbour import pick


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def example_inputs(self):
        return (torch.ones(2, 5, 8),)
"""
NEIGHBOUR = "def pick(x):\n    while x.mean() > 0:\n        x = x - 1\n    return x\n"
TORCH = re.compile(r"Guard|SymNode|u0|unhinted|Traceback|site-packages")
"""Internal terms of torch, which messages must not contain."""

BRANCH, NUMBER = "branches on the values of a tensor", "makes a Python number of a value of a tensor"
SHAPES, OPERATOR, TRACE = "dynamic_shapes let an axis vary", "no ONNX operators for one", "torch can't trace"

# the body of forward, dynamic_shapes, the line in the file (None if it is not known), and parts of the message
WRONG: dict[str, tuple[str, str | None, str | None, tuple[str, ...]]] = {
    "an if": (
        "if x.max() > 1:\n            x = x + 1\n        return x",
        None,
        "16 of 'model.py'",
        (BRANCH, "torch.where"),
    ),
    "an assert": ("assert x.max() < 9\n        return x", None, "16 of 'model.py'", (BRANCH, "an assert")),
    "beside the file": ("return pick(self.linear(x))", None, "2 of 'neighbour.py'", (BRANCH, "torch.cond")),
    "a size by values": (
        "i = x.nonzero()\n        return i * 2 if i.shape[0] > 3 else i",
        None,
        "17 of 'model.py'",
        (BRANCH, "a size that"),
    ),
    "int": ("return x.flatten()[: int(x.argmax())]", None, "16 of 'model.py'", (NUMBER, "leave it a tensor")),
    "float": ("return x * round(float(x.mean()))", None, "16 of 'model.py'", (NUMBER,)),
    "numpy": (
        "return torch.from_numpy(x.numpy() * 2)",
        None,
        "16 of 'model.py'",
        (TRACE, "torch says: RuntimeError: "),
    ),
    "sparse": ("return x[0].to_sparse().to_dense()", None, "16 of 'model.py'", (TRACE, "torch says: Unsupported")),
    "an operator": ("return torch.linalg.svd(x)[1]", None, None, (OPERATOR, "torch says: DispatchError: ")),
    "a fixed axis": ("return x + torch.ones(5, 8)", "{1: Dim('s')}", None, (SHAPES, "torch says: UserError: ")),
    "an axis by name": ("return x + torch.ones(5, 8)", "{1: 's'}", None, (SHAPES, "torch says: ValueError: ")),
    "a size that is asked": ("return x if x.shape[1] == 5 else x + 1", "{1: Dim('s')}", None, (SHAPES,)),
    "a range": ("return x + 1", "{1: Dim('s', max=4)}", None, (SHAPES, "leave that axis out")),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_does_not_take_is_one_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, shapes, line, parts = WRONG[name]
    monkeypatch.chdir(tmp_path)
    text = f"{HEAD}\n    def forward(self, x):\n        {body}\n"
    if shapes is not None:
        text += f"\n    dynamic_shapes = ({shapes},)\n"
    Path("model.py").write_text(text)
    Path("neighbour.py").write_text(NEIGHBOUR)
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    where = "" if line is None else f" at line {line}"
    result = cli("export", "--module", "model.py:Model")
    refused(result, f"exporting 'model.py:Model' failed{where}: ", *parts)
    assert not TORCH.search(result.stderr), result.stderr
    assert not Path("Model.onnx").exists()


class Branches(nn.Module):
    """A module with another function for large values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.max() > 1 else x


def test_torchs_own_error_is_the_cause_for_callers_in_python() -> None:
    with pytest.raises(TraceError, match=BRANCH) as caught:
        export_module(Branches(), torch.ones(2, 3))
    assert isinstance(caught.value, RequestError)
    assert type(chain_of(caught.value)[-1]).__module__.startswith("torch.")
    assert str(caught.value).count("\n") == 0


def test_an_error_of_the_module_itself_stays_its_own() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("heads must divide")

    with pytest.raises(ValueError, match="heads must divide"):
        export_module(Raises(), torch.ones(2, 3))
