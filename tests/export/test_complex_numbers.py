"""Modules with complex numbers: operators that torch's exporter does not translate are written with pairs of reals."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from posexport.export import export_module

TOKENS, WIDTH = 6, 8
Z = "torch.view_as_complex(x.unflatten(-1, (-1, 2)))"
"""x [batch, tokens, 8] as complex numbers [batch, tokens, 4]."""
TABLE = torch.polar(torch.ones(20, 4), torch.arange(80.0).reshape(20, 4))

OPERATORS = {
    "unsqueeze": f"({Z} * table[: x.shape[1]].unsqueeze(0)).unsqueeze(-2).squeeze(-2)",
    "new axes": f"{Z}[:, :, None] * table[: x.shape[1]][None, :, None]",
    "squeeze": f"{Z}[:1].squeeze()",
    "squeezed axes": f"{Z}[:, :, None, :, None].squeeze((2, -1))",
    "squeeze of longer axes": f"({Z}.squeeze(1) * table[: x.shape[1]]).squeeze((-1, 0))",
    "select": f"{Z}[:, -1] * table[3]",
    "select on the last axis": f"{Z}[..., -1]",
    "rows by position": f"{Z} * table[ids]",
    "rows by index_select": f"{Z} * table.index_select(0, ids[0])",
    "columns by index_select": f"{Z}.index_select(-1, torch.tensor([2, 0]))",
    "embedding": f"{Z} * torch.nn.functional.embedding(ids, table)",
    "gather": f"{Z}.gather(1, ids[:, :, None].expand(-1, -1, 4))",
    "unbind": f"torch.stack([*{Z}.unbind(-1)][::-1], -1)",
    "split": f"torch.cat({Z}.split(2, -1)[::-1], -1)",
    "split of sizes": f"torch.cat({Z}.split([1, 3], -1)[::-1], -1)",
    "chunk": f"torch.cat({Z}.chunk(2, dim=-1)[::-1], -1)",
    "expand": f"table[:1].expand(x.shape[1], -1) * {Z}",
    "repeat": f"table[:2].repeat(3, 1) * {Z}",
    "times real": f"{Z} * x[..., :4]",
    "real times": f"x[..., :1] * {Z} * 0.5",
    "imaginary unit": f"{Z} * (x[..., :4] + 1j * x[..., 4:])",
    "real divisor": f"{Z} / (2 + x[..., :4].abs()) / 3.0",
    "real dividend": f"x[..., :4] / (3 + {Z})",
    "sums of real and complex": f"x[..., :4] - {Z} + 0.5 - torch.add({Z}, x[..., 4:], alpha=2)",
    "complex numbers": f"({Z} + (1 - 2j)) * (2 + 1j) / (1 + 1j)",
    "complex from real": f"{Z} + x[..., :4].to(torch.complex64)",
    "wider": f"({Z}.to(torch.complex128) * table[: x.shape[1]]).to(torch.complex64)",
    "exponential": f"{Z} * torch.exp(1j * x[..., :4])",
    "exponential with a real part": f"torch.exp({Z})",
    "real and imaginary": f"torch.complex({Z}.imag, {Z}.real)",
    "conjugate": f"{Z}.conj() * table[: x.shape[1]]",
    "quotient": f"{Z} / table[ids]",
}


class Module(torch.nn.Module):
    """A module that computes one expression of x, ids and a complex table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.register_buffer("table", TABLE)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        z = eval(self.text, {"torch": torch, "x": x, "ids": ids, "table": self.table})
        return torch.view_as_real(z.resolve_conj()).flatten(-2)


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, TOKENS, WIDTH, generator=generator)
    return x, torch.randint(0, TOKENS, (batch, TOKENS), generator=generator)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("text", OPERATORS.values(), ids=OPERATORS)
def test_operator_is_as_in_torch(text: str) -> None:
    module = Module(text)
    batch = {0: torch.export.Dim.AUTO}
    model = export_module(module, inputs(2), {"x": batch, "ids": batch})
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    given = inputs(2 if "[:1]" in text else 3)
    (got,) = session.run(None, {"x": given[0].numpy(), "ids": given[1].numpy()})
    expected = module(*given).numpy()
    assert got.shape == expected.shape and np.isfinite(got).all()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "text",
    [
        "torch.fft.fftn(x, dim=(1, 2)).real",
        "torch.fft.ifft(torch.complex(x, -x), dim=1).imag",
        "torch.fft.fft(x, dim=1, norm='ortho').abs()",
        "torch.fft.ifft2(x, norm='forward').imag",
    ],
)
def test_fourier_transforms_keep_their_digits(text: str) -> None:
    class Transform(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = eval(text, {"torch": torch, "x": x})
            return result

    model = export_module(Transform(), (torch.randn(2, 6, 8),), {"x": {1: torch.export.Dim.AUTO}})
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.randn(
        2, 131, 8, generator=torch.Generator().manual_seed(0)
    )  # For a prime length, the error of ORT's DFT is 1e-3.
    expected = Transform()(x.double()).numpy()
    assert np.abs(session.run(None, {"x": x.numpy()})[0] - expected).max() < 2e-6 * np.abs(expected).max()
