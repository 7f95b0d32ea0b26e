"""Why TensorRT's parser or builder doesn't take a file, in one sentence with what to do.

What is wrong, and what to do, follow from the parser's error codes, from the graph and from the request. The engine's
own words come after "TensorRT says", only for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import onnx

from posexport.artifact.onnx_limits import nodes_within
from posexport.errors import RequestError, shown
from posexport.runtimes.tensorrt.options import PlanOptions

_ATTENTION = ("Attention", "GroupQueryAttention", "MultiHeadAttention", "RotaryEmbedding")
"""Operators that TensorRT knows, but of which it takes only some inputs and attributes."""

_TYPES = onnx.TensorProto
_TAKEN = {_TYPES.FLOAT, _TYPES.FLOAT16, _TYPES.BFLOAT16, _TYPES.DOUBLE, _TYPES.BOOL, _TYPES.INT8, _TYPES.UINT8}
_TAKEN |= {_TYPES.INT32, _TYPES.INT64, _TYPES.FLOAT8E4M3FN, _TYPES.INT4, _TYPES.FLOAT4E2M1}
"""The types of inputs that the parser takes."""

_PROBLEMS = {
    "INTERNAL_ERROR": "its parser stopped, as it does where an attribute or an input that ONNX requires is missing",
    "MEM_ALLOC_FAILED": "its parser has not enough memory",
    "MODEL_DESERIALIZE_FAILED": "its parser can't read the file",
    "INVALID_VALUE": "a number there is not valid",
    "INVALID_GRAPH": "the graph is not valid there, as where a node reads a value that nothing gives",
    "INVALID_NODE": "the types, shapes or attributes there don't fit together",
    "UNSUPPORTED_GRAPH": "it has no layers for such a graph",
    "UNSUPPORTED_NODE": "it doesn't take this operator with these inputs and attributes",
    "UNSUPPORTED_NODE_ATTR": "it doesn't take an attribute with this value",
    "UNSUPPORTED_NODE_INPUT": "it doesn't take such an input",
    "UNSUPPORTED_NODE_DATATYPE": "it doesn't take the type of an input or output",
    "UNSUPPORTED_NODE_DYNAMIC": "it takes this operator with fixed sizes only",
    "UNSUPPORTED_NODE_SHAPE": "it doesn't take the shape of an input or output",
}
"""What is wrong, by the code of the parser's error."""

_INVALID = ("INTERNAL_ERROR", "MODEL_DESERIALIZE_FAILED", "INVALID_VALUE", "INVALID_GRAPH")
"""Codes of files that no runtime takes."""

_OUR_ADVICE = {
    "MEM_ALLOC_FAILED": "free some memory",
    "UNSUPPORTED_NODE_DATATYPE": "export with --dtype fp16",
    "UNSUPPORTED_NODE_DYNAMIC": "export with --batch, --seq or --max-seq, which fix sizes",
}
_OTHER_ADVICE = {
    "MEM_ALLOC_FAILED": "free some memory",
    "UNSUPPORTED_NODE_DATATYPE": "convert it to fp16",
    "UNSUPPORTED_NODE_DYNAMIC": "fix the sizes of its inputs where it is exported",
    **dict.fromkeys(_INVALID, "check it with onnx.checker.check_model, or export it again"),
}
"""What to do by code, if neither the operator nor an input says more."""


_UNREAD_ATTRIBUTES, _UNREAD_INPUT = ("left_window_size", "right_window_size"), 6
"""What TensorRT for RTX 1.7 doesn't read of Attention, without saying so: windows, and numbers of keys. It also takes
the root of a negative scale."""


def check_read(name: str, file: str, model: onnx.ModelProto) -> None:
    """RequestError for an Attention that the parser would take and compute wrongly."""
    nodes = (node for holder in (model.graph, *model.functions) for _, node in nodes_within(holder) if node)
    for node in nodes:
        if node.op_type != "Attention" or node.domain not in ("", "ai.onnx"):
            continue
        attributes = {one.name: one for one in node.attribute}
        found = [one for one in _UNREAD_ATTRIBUTES if one in attributes and attributes[one].i >= 0]
        found += [*filter(None, node.input[_UNREAD_INPUT : _UNREAD_INPUT + 1])] and ["nonpad_kv_seqlen"]
        found += ["negative scale"] if "scale" in attributes and attributes["scale"].f < 0 else []
        if found:
            label = shown(node.name or next(iter(node.output), ""))
            ours = any(entry.key == "posexport.spec" for entry in model.metadata_props)
            raise RequestError(
                f"{name} would take the Attention {label} of {file!r} without its {found[0]}, and compute something "
                f"else: {_of_attention(ours)}."
            )


def parser_error(name: str, file: str, parser: Any, model: onnx.ModelProto) -> RequestError:
    """The parser's first error in one sentence with the node, the operator, what is wrong there and what to do.

    `model` is what was parsed.
    """
    if not parser.num_errors:
        return RequestError(f"{name} can't parse {file!r} and gives no reason: export it again.")
    error = parser.get_error(0)
    operator, code = str(error.node_operator()), error.code().name
    ours = any(entry.key == "posexport.spec" for entry in model.metadata_props)
    if not operator:
        if (refused := next(_refused_inputs(model), None)) is not None:
            label, kind = refused
            return RequestError(
                f"{name} can't take {file!r}, whose input {shown(label)} has the type {kind}: it takes floating point "
                "numbers, int32, int64, int8, uint8 and bool, so change the type of that input."
            )
        problem, advice = _PROBLEMS.get(code, _PROBLEMS["UNSUPPORTED_GRAPH"]), _advice(code, ours)
        return RequestError(f"{name} can't take {file!r}: {problem}; {advice}{_quoted(error.desc())}.")
    inside = "".join(f" in {call}" for call in error.local_function_stack())
    label = f"node {error.node_name()!r} (operator {operator})" if error.node_name() else f"a node {operator}"
    where = f"{name} can't take {label}{inside} of {file!r}"
    if not parser.supports_operator(operator):
        return RequestError(f"{where}, it has no such operator: {_without_operator(operator, model, ours)}.")
    advice = _of_attention(ours) if operator in _ATTENTION and code not in _INVALID else _advice(code, ours)
    return RequestError(f"{where}, {_PROBLEMS.get(code, 'it gives no known reason')}: {advice}{_quoted(error.desc())}.")


def build_error(
    name: str, file: str, errors: Sequence[str], options: PlanOptions | None = None, *, ours: bool = True
) -> RequestError:
    """The builder's error in one sentence with what to do, by the options of the build.

    `errors` are those in its log. `ours` is true if posexport wrote the file.
    """
    advice = list(_by_options(options or PlanOptions()))
    if ours:
        advice += ["export with --dtype fp16 or --form decomposed"]
    else:
        advice += ["change the graph where TensorRT names a node", "run it on ONNX Runtime"]
    text = f"{', '.join(advice[:-1])} or {advice[-1]}"
    return RequestError(f"{name} read {file!r} and can't build a plan of it: {text}{_quoted(*errors)}.")


def _by_options(options: PlanOptions) -> Iterator[str]:
    """What may make a build possible, by the options that were given."""
    if options.memory_limit is not None:
        yield "raise --memory-limit"
    if options.compute_capability:
        yield f"drop --compute-capability {','.join(options.compute_capability)}"
    yield "give smaller sizes with --profile"


def _refused_inputs(model: onnx.ModelProto) -> Iterator[tuple[str, str]]:
    """Inputs of types that the parser doesn't take, with their types."""
    for value in model.graph.input:
        kind = value.type.tensor_type.elem_type
        if not value.type.HasField("tensor_type"):
            yield value.name, str(value.type.WhichOneof("value")).removesuffix("_type")
        elif kind not in _TAKEN and kind in _TYPES.DataType.values():
            yield value.name, _TYPES.DataType.Name(kind).lower()


def _advice(code: str, ours: bool) -> str:
    if ours:
        return _OUR_ADVICE.get(code, "export with --form decomposed, and with --dtype fp16 where that is not enough")
    return _OTHER_ADVICE.get(code, "change the graph there, or run it on ONNX Runtime")


def _without_operator(operator: str, model: onnx.ModelProto, ours: bool) -> str:
    if ours:
        return "use standard ones as 'posexport export --form decomposed' does"
    if any(node.op_type == operator and node.domain == "com.microsoft" for node in model.graph.node):
        return (
            "'posexport rewrite --target tensorrt' writes ONNX Runtime's operators of attention in standard ones; "
            "export the graph without others, or run it on ONNX Runtime"
        )
    return "export the graph without it, or run it on ONNX Runtime"


def _of_attention(ours: bool) -> str:
    if ours:
        return "export with --target tensorrt, or with --form decomposed where that is not enough"
    return "write its attention anew with 'posexport rewrite --target tensorrt', or with --form decomposed there"


def _quoted(*texts: str) -> str:
    """The first message of the engine that says something, labelled as the engine's; empty if there is none."""
    said = next(filter(None, map(detail, texts)), "")
    return f" (TensorRT says: {said})" if said else ""


_CODE = re.compile(r"Error Code \d+: [\w ]+\((.*)")
_SOURCE = re.compile(r"\[\w+\.(cpp|h):\d+: ?\w*\] ?")
_CONDITION = re.compile(r"^Parameter check failed, condition: .*?\. (?=[A-Z])")
_PLACE = re.compile(r"\.?\s+In [^/]{1,80} at /.*")
_MESSAGE = re.compile(r'&& ((?:"[^"]*"\s*)+)$')
_PROGRAM = re.compile(r"&&|\|\||->|==|::|[Cc]uda|^Invalid Node|^\S*$|^Assertion failed")
"""Patterns of lines that are only about the engine's program."""


def detail(message: str) -> str:
    """What a message of the engine says, on one line, without conditions, error codes and places of its program."""
    for line in message.splitlines():
        text = _PLACE.sub("", _SOURCE.sub("", coded[1] if (coded := _CODE.search(line)) else line))
        text = _CONDITION.sub("", text)
        if strings := _MESSAGE.search(text):
            text = "".join(re.findall('"([^"]*)"', strings[1]))
        elif text.startswith("Assertion failed: "):
            text = re.split(r"(?<! ): ", text.removeprefix("Assertion failed: "), maxsplit=1)[-1]
        text = " ".join(text.split()).rstrip(".")
        if coded and text.count(")") > text.count("("):
            text = text.removesuffix(")")
        if text and not _PROGRAM.search(text):
            return text
    return ""
