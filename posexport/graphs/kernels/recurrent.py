"""RNN, GRU and LSTM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from posexport.graphs.kernels.registry import Call, kernel

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "softplus": F.softplus,
    "affine": lambda x, alpha=1.0, beta=0.0: alpha * x + beta,
    "leakyrelu": lambda x, alpha=0.01, beta=0.0: torch.where(x < 0, alpha * x, x),
    "thresholdedrelu": lambda x, alpha=1.0, beta=0.0: torch.where(x >= alpha, x, torch.zeros_like(x)),
    "scaledtanh": lambda x, alpha=1.0, beta=1.0: alpha * torch.tanh(beta * x),
    "hardsigmoid": lambda x, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "elu": lambda x, alpha=1.0, beta=0.0: torch.where(x < 0, alpha * torch.expm1(x), x),
}

_Activation = Callable[[Tensor], Tensor]


@kernel("RNN", "GRU", "LSTM")
def recurrent(
    call: Call,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    first_h: Tensor | None = None,
    first_c: Tensor | None = None,
    peepholes: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """x [time, batch, width] (batch first with layout=1) to Y [time, directions, batch, hidden], the last H and C."""
    if call.get("layout", 0):
        x = x.transpose(0, 1)
        first_h, first_c = (None if state is None else state.transpose(0, 1) for state in (first_h, first_c))
    time, batch, _ = x.shape
    hidden, directions = r.shape[-1], w.shape[0]
    ends = torch.full((batch,), time) if lengths is None else lengths.to(torch.int64)
    rows = torch.arange(time)[:, None]
    outputs, lasts = [], []
    for at in range(directions):
        backwards = at == 1 or call.get("direction", "forward") == "reverse"
        order = torch.where(rows < ends, ends - 1 - rows, rows) if backwards else rows.expand(time, batch)
        inputs = x[order, torch.arange(batch)]
        state = [torch.zeros(batch, hidden, dtype=x.dtype) if s is None else s[at] for s in (first_h, first_c)]
        both = torch.zeros(2 * w.shape[1], dtype=x.dtype) if bias is None else bias[at]
        cell = _Cell(call, at, w[at], r[at], both, None if peepholes is None else peepholes[at])
        steps = []
        for step in range(time):
            going = (step < ends)[:, None]
            new = cell.step(inputs[step], state)
            state = [torch.where(going, a, b) for a, b in zip(new, state, strict=True)]
            steps.append(torch.where(going, new[0], torch.zeros_like(new[0])))
        y = torch.stack(steps) if steps else x.new_zeros(0, batch, hidden)
        outputs.append(y[order, torch.arange(batch)] if backwards else y)
        lasts.append(state)
    y = torch.stack(outputs, 1)
    finals = [torch.stack([state[number] for state in lasts]) for number in (0, 1)]
    if call.get("layout", 0):
        y, finals = y.permute(2, 0, 1, 3), [state.transpose(0, 1) for state in finals]
    return (y, *finals) if call.op_type == "LSTM" else (y, finals[0])


class _Cell:
    """The cell of one direction."""

    def __init__(self, call: Call, at: int, w: Tensor, r: Tensor, bias: Tensor, peepholes: Tensor | None) -> None:
        self._call, self._w, self._r = call, w, r
        self._w_bias, self._r_bias = bias.chunk(2)
        self._peepholes = None if peepholes is None else peepholes.chunk(3)
        defaults = _DEFAULTS[call.op_type]
        count = len(defaults)
        names = list(call.get("activations", ()))[at * count : (at + 1) * count] or defaults
        before = list(call.get("activations", ()))[: at * count]
        self._activations = [
            self._activation(name, sum(map(_takes_alpha, before + names[:number]))) for number, name in enumerate(names)
        ]
        limit = call.get("clip")
        self._clip: _Activation = (lambda x: x) if limit is None else (lambda x: x.clamp(-limit, limit))

    def _activation(self, name: str, number: int) -> _Activation:
        function = _FUNCTIONS[name.lower()]
        given: dict[str, float] = {}
        for key in ("alpha", "beta"):
            values: Sequence[float] = self._call.get(f"activation_{key}", ())
            if _takes_alpha(name) and number < len(values):
                given[key] = float(values[number])
        return lambda x: function(x, **given)

    def step(self, x: Tensor, state: list[Tensor]) -> list[Tensor]:
        """The states after one step."""
        return {"RNN": self._rnn, "GRU": self._gru, "LSTM": self._lstm}[self._call.op_type](x, state[0], state[1])

    def _rnn(self, x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        (f,) = self._activations
        return [f(self._clip(x @ self._w.T + h @ self._r.T + self._w_bias + self._r_bias)), c]

    def _gru(self, x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        f, g = self._activations
        xz, xr, xh = (x @ self._w.T + self._w_bias).chunk(3, -1)
        (rz, rr, rh), (bz, br, bh) = self._r.chunk(3), self._r_bias.chunk(3)
        z = f(self._clip(xz + h @ rz.T + bz))
        reset = f(self._clip(xr + h @ rr.T + br))
        inside = reset * (h @ rh.T + bh) if self._call.get("linear_before_reset", 0) else (reset * h) @ rh.T + bh
        return [(1 - z) * g(self._clip(xh + inside)) + z * h, c]

    def _lstm(self, x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        f, g, last = self._activations
        i, o, forget, new = (x @ self._w.T + h @ self._r.T + self._w_bias + self._r_bias).chunk(4, -1)
        pi, po, pf = self._peepholes or (torch.zeros((), dtype=x.dtype),) * 3
        i = f(self._clip(i + pi * c))
        forget = 1 - i if self._call.get("input_forget", 0) else f(self._clip(forget + pf * c))
        c = forget * c + i * g(self._clip(new))
        return [f(self._clip(o + po * c)) * last(c), c]


def _takes_alpha(name: str) -> bool:
    """Whether a function reads a number of `activation_alpha`. The numbers are in the order of these functions."""
    return name.lower() in ("affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu")
