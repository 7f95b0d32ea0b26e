"""Which specs, opsets and targets each form supports, with the reason for each spec that it does not support.

Imports no engine, so that `posexport list` and the support matrix can use it. The bodies of the operators (custom_ops)
raise the same reasons for calls outside a spec.
"""

from __future__ import annotations

from posexport.custom_ops import unsupported
from posexport.custom_ops.unsupported import AttentionCall
from posexport.errors import FieldError, Reason, RequestError, check_known
from posexport.spec.forms import FORM_OPSETS, FORMS, TARGETS, opset_problem, scatters, unsupported_opset
from posexport.spec.spec import Spec


def default_opset(form: str, spec: Spec | None = None, target: str = "portable", shared: bool = False) -> int:
    """The default opset of a form: the lowest one that has its operators. `shared`: caches become buffers."""
    if scatters(form, target, shared):
        return 24
    if form == "native" and spec is not None and spec.kv_cache == "shared":
        return 24  # TensorScatter
    return FORM_OPSETS[form][0]


def unsupported_reason(spec: Spec, form: str, target: str = "portable", opset: int | None = None) -> Reason | None:
    """Why `form` can't express `spec` for `target`; None if it can."""
    reason = unsupported_opset(form, target, opset)
    if reason is not None:
        return reason
    if form == "native" and spec.kv_cache == "shared" and opset == 23:
        text = "native with shared caches is written in opset 24, which has TensorScatter: give opset 24, or none"
        return Reason("opset", text)
    call = AttentionCall(spec.kv_cache, spec.softcap is not None, spec.head_dim, not spec.cross)
    return unsupported.unsupported_reason(form, target, call)


def checked_opset(spec: Spec | None, form: str, target: str, opset: int | None, shared: bool = False) -> int:
    """The opset, by default the form's; RequestError if the form can't express the spec, or a name is unknown.

    Without a spec, any module may be exported; `shared` says that its caches become buffers.
    """
    check_known("form", form, FORMS)
    check_known("target", target, TARGETS)
    opset = default_opset(form, spec, target, shared) if opset is None else opset
    if (problem := opset_problem(form, target, opset, shared)) is not None:
        raise FieldError("opset", f"{problem}.")
    if spec is not None and (why := unsupported_reason(spec, form, target, opset)) is not None:
        raise RequestError(f"{why}.")
    return opset
