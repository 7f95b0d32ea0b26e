"""Decoders that accept only one token at a time, as on phones: their rotations are recognised too."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import rewrite_helpers as helpers
from small_graphs import decoder, inputs, run, with_operator

from posexport.graphs.attention.describe import Describer
from posexport.graphs.view import view_of
from posexport.rewrite.rewriter import REWRITTEN


def of_steps(fixed: dict[str, int]) -> onnx.ModelProto:
    """The decoder with fixed sizes in place of some names of dimensions."""
    model = decoder()
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in fixed:
                dim.dim_value = fixed[dim.dim_param]
    return model


SIZES = [{"seq": 1}, {"batch": 1, "seq": 1}, {"batch": 1, "seq": 1, "past": 31, "total": 32}]


@pytest.mark.parametrize("fixed", SIZES, ids=map(str, SIZES))
def test_the_rotation_of_one_token_is_recognised(fixed: dict[str, int]) -> None:
    view = view_of(ir.from_proto(of_steps(fixed)))
    (found,) = (Describer(view).describe(one) for one in view.attentions)
    encoding = {key: found["encoding"].get(key) for key in ("name", "layout", "theta", "reason")}
    assert encoding == {"name": "rope", "layout": "half", "theta": 10_000.0, "reason": None}


@pytest.mark.parametrize(("form", "domain"), [("native", ""), ("contrib", "com.microsoft")])
def test_the_rotation_of_one_token_gets_an_operator(form: str, domain: str) -> None:
    model = of_steps({"batch": 1, "seq": 1})
    done, after = helpers.rewritten_model(model, form=form)
    assert [site.state for site in done.sites] == [REWRITTEN]
    assert with_operator(after, "RotaryEmbedding", domain)
    for past in (0, 9):
        given = inputs(1, 1, past)
        have = run(after, given)
        for name, want in run(model, given).items():
            np.testing.assert_allclose(have[name], want, rtol=0, atol=1e-5, err_msg=name)
