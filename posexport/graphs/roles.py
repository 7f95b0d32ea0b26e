"""The role of each input of a graph, by the names that optimum, torch, onnxruntime-genai and Hugging Face use.

If a name says nothing, dtype and shape decide: floats are features or images, integers that are looked up in a table
are tokens. The user must give the roles that remain (`--input name=role`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import attrs
import onnx_ir as ir

from posexport.artifact.graph_file import GraphFile, dtype_name
from posexport.errors import PosexportError, RequestError, shown
from posexport.graphs.axes import (
    KNOWN_AXES,
    MASKS,
    Axes,
    axes_of,
    has_untold_order,
    has_untold_rows,
    reused_names,
    without_names,
)
from posexport.graphs.compared import compared_ids
from posexport.graphs.input_uses import is_continued, is_joined, meets_a_product
from posexport.graphs.load import InvalidGraphError, inlined, ir_of
from posexport.graphs.mask_senses import HIDES, SHOWS, sense_of
from posexport.graphs.tables import frames_of, patches_of, required_sizes, rows_of, strides_of
from posexport.spec.contract import Shape, Values, read_dims
from posexport.spec.input_roles import NAMES, ROLES, WHERE, check_input, check_role, plain_name

TOKEN_IDS = ("token_ids", "encoder_token_ids")
"""The roles of ids of tokens."""


class GivenRoleError(RequestError):
    """A role that the user gave is wrong: its input doesn't exist, the role is unknown, or the input can't have it."""


@attrs.frozen(kw_only=True)
class Role:
    """What one input is for.

    `kind` is one of ROLES. `axes` is the meaning of each axis (posexport.graphs.axes), or its size if it has no meaning
    and is fixed. Integers are below `rows`, if a table says so. Tokens are compared with the ids `marks`. `strides` and
    `patches` of images, if known, are the steps of the patches and their number on each side. `frames` are the frames
    of sound for one token, and from one token to the next. `taken` has sizes that the graph was seen to take, in rising
    order, for axes by meaning that don't take all sizes (posexport.graphs.baked). `stated` is the shape in the file,
    with `?` for a dimension without a name, or with a name that stands for other lengths too. `grouped` is true if the
    graph has GroupQueryAttention: it takes no padding on the left, and takes chunks after a cache for only one row.
    `truths` is true for a floating-point mask of zeros and ones, which is not added to scores as it is.
    """

    name: str
    kind: str
    shape: Shape
    dtype: str
    axes: Axes
    stated: Shape = ()
    rows: int | None = None
    strides: tuple[int, ...] | None = None
    patches: int | None = None
    frames: tuple[int, int] = (1, 1)
    grouped: bool = False
    truths: bool = False
    marks: tuple[int, ...] = ()
    taken: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def is_first_position(self) -> bool:
        """Whether the input has only the position of each row's first new token, which the others follow."""
        return self.kind == "position_ids" and self.axes[-1:] == (1,)


def roles_of(
    graph: GraphFile | ir.Model, given: Mapping[str, str] | None = None, token_first: Collection[str] = ()
) -> dict[str, Role]:
    """The role of each input of a graph, in the graph's order.

    `given` are roles by name that the user knows. `token_first` are inputs that are known to have tokens before rows.
    RequestError for an input whose role can't be guessed, and if `given` names an input that doesn't exist, an unknown
    role, or a role that an input of this shape can't have.
    """
    try:
        return _roles_of(graph, dict(given or {}), token_first)
    except (PosexportError, MemoryError):
        raise
    except Exception as error:  # a node may lack what its operator needs
        raise InvalidGraphError(
            "the roles of the graph's inputs can't be read, because a node after them is wrong "
            f"({type(error).__name__}): export it again."
        ) from error


def untold(roles: Mapping[str, Role]) -> list[str]:
    """The inputs that may have rows or tokens first, or only one of them: names don't tell."""
    return [
        name
        for name, role in roles.items()
        if has_untold_order(role.kind, role.stated, role.axes) or has_untold_rows(role.kind, role.stated, role.axes)
    ]


def _roles_of(graph: GraphFile | ir.Model, given: dict[str, str], token_first: Collection[str]) -> dict[str, Role]:
    model = graph if isinstance(graph, ir.Model) else inlined(ir_of(graph))
    values = {str(value.name): value for value in model.graph.inputs if not value.is_initializer()}
    check_given(given, values)
    check_drawable(values.values())
    rows = _rows(values)
    kinds = _guesses(values, rows, given)
    for name, kind in kinds.items():
        if kind is None:
            raise _unknown(name, values[name])
    known = {name: str(kind) for name, kind in kinds.items()}
    shapes = {name: shape_of_value(value) for name, value in values.items()}
    outputs = {str(value.name): shape_of_value(value) for value in model.graph.outputs}
    joined = [name for name, value in values.items() if is_joined(value)]
    scored = [name for name, value in values.items() if known[name] in MASKS and meets_a_product(value)]
    reused = reused_names(known, shapes, joined)
    shapes, outputs = (
        {name: without_names(shape, reused) for name, shape in some.items()} for some in (shapes, outputs)
    )
    axes = axes_of(known, shapes, outputs, joined, scored, token_first)
    for name in given:
        if axes[name] is None:
            allowed = ", ".join(map(str, KNOWN_AXES[known[name]]))
            raise GivenRoleError(
                f"--input {name}={known[name]} doesn't fit: the input has {len(shapes[name])} dimensions "
                f"{list(shapes[name])}, that role takes {allowed}."
            )
    grouped = any(node.op_type == "GroupQueryAttention" for node in model.graph.all_nodes())
    roles = {}
    for name, value in values.items():
        meanings = axes[name]
        if meanings is None:
            raise _unknown(name, value)
        pictures = known[name] == "images"
        roles[name] = Role(
            name=name,
            kind=known[name],
            shape=shapes[name],
            stated=shapes[name],
            dtype=dtype_of_value(value),
            axes=meanings,
            rows=rows[name],
            marks=compared_ids(value, rows[name]) if known[name] in TOKEN_IDS else (),
            strides=strides_of(value) if pictures else None,
            patches=patches_of(model) if pictures else None,
            frames=frames_of(model, value) if known[name] == "audio" else (1, 1),
            grouped=grouped,
            truths=known[name] in MASKS and _dtype_kinds(value) == {"f"} and sense_of(value) is not None,
        )
    return roles


def check_drawable(values: Iterable[ir.Value]) -> None:
    """RequestError for an input that is not a tensor of numbers, or whose number of dimensions is not known.

    A role doesn't help with such an input.
    """
    for value in values:
        if value.type is not None and not isinstance(value.type, ir.TensorType):
            raise _undrawable(value, "no tensor")
        dtype_of_value(value)
        if value.shape is None:
            raise RequestError(
                f"the input {shown(value.name)} has no shape, not even a number of dimensions, so nothing can be drawn "
                "for it: export it with shapes."
            )


def values_of_model(values: Iterable[ir.Value]) -> Values:
    """Inputs or outputs of a graph: name to (shape, dtype), with the names of dynamic dimensions.

    The dtype is empty if the file states none, or strings.
    """
    known = (None, ir.DataType.STRING, ir.DataType.UNDEFINED)
    return {
        str(value.name): (shape_of_value(value), "" if value.dtype in known else dtype_of_value(value))
        for value in values
    }


def check_given(given: Mapping[str, str], values: Collection[str]) -> None:
    """GivenRoleError for a role of an input that doesn't exist, and for an unknown role."""
    try:
        for name, role in given.items():
            check_input(name, role, values)
            check_role(name, role)
    except RequestError as error:
        raise GivenRoleError(str(error)) from None


def guessed_roles(model: ir.Model, given: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """The role of each input, None if it can't be guessed; `given` are roles that the user knows.

    GivenRoleError if these are wrong by themselves.
    """
    values = {str(value.name): value for value in model.graph.inputs if not value.is_initializer()}
    check_given(given or {}, values)
    return _guesses(values, _rows(values), dict(given or {}))


def _rows(values: Mapping[str, ir.Value]) -> dict[str, int | None]:
    return {name: rows_of(value) if "i" in _dtype_kinds(value) else None for name, value in values.items()}


def _guesses(
    values: Mapping[str, ir.Value], rows: Mapping[str, int | None], given: Mapping[str, str]
) -> dict[str, str | None]:
    kinds = {name: given.get(name) or _guess(name, value, rows[name]) for name, value in values.items()}
    _tell_encoder_apart(kinds, given)
    plain = [plain_name(name) for name in kinds]
    for name, kind in kinds.items():
        if kind in _BY_SENSE.values() and name not in given:
            kinds[name] = _BY_SENSE.get(sense_of(values[name]) or "", kind)
            if kinds[name] == "attention_mask" and _is_of_encoder(plain_name(name), plain):
                kinds[name] = "encoder_attention_mask"
    return kinds


_BY_SENSE = {HIDES: "padding_mask", SHOWS: "attention_mask"}
"""The role of a mask by what it does where it is true. Its name may say otherwise: Keras' padding masks show keys."""


def shape_of_value(value: ir.Value) -> Shape:
    """The shape, with the names of dynamic dimensions, "?" if they have none. Some files name a number "16"."""
    if value.shape is None:
        return ()
    dims = [dim if isinstance(dim, int) else str(dim.value or "?") for dim in value.shape]
    dims = ["?" if isinstance(dim, int) and dim < 0 else dim for dim in read_dims(dims)]
    sizes = required_sizes(value, len(dims))
    return tuple(sizes.get(at, dim) if isinstance(dim, str) else dim for at, dim in enumerate(dims))


def dtype_of_value(value: ir.Value) -> str:
    """posexport's name of a dtype, or numpy's if there is none; RequestError for strings and values without a dtype."""
    if value.dtype is None or value.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        what = "no tensor" if value.dtype is None else "texts"
        raise _undrawable(value, what)
    return dtype_name(value.dtype).lower()


def _undrawable(value: ir.Value, what: str) -> RequestError:
    return RequestError(f"the input {shown(value.name)} holds {what}, which can't be drawn: cut the graph after it.")


def _dtype_kinds(value: ir.Value) -> set[str]:
    """f for floats, b for bool, i for integers and also q for those with 8 bits; empty for others."""
    dtype = value.dtype
    if dtype is None:
        return set()
    if dtype == ir.DataType.BOOL:
        return {"b"}
    kinds = {"f": dtype.is_floating_point(), "i": dtype.is_integer(), "q": dtype in _OF_8_BITS}
    return {kind for kind, is_so in kinds.items() if is_so}


_OF_8_BITS = (ir.DataType.INT8, ir.DataType.UINT8)


def _guess(name: str, value: ir.Value, rows: int | None) -> str | None:
    """The role by the name, or by dtype and shape; None if neither tells."""
    own, rank = _dtype_kinds(value), len(value.shape) if value.shape is not None else 0
    lower = plain_name(name)
    for pattern, role, kinds in NAMES:
        if (role == "features" and rank > 3) or (role == "images" and _has_tokens(value)):
            continue  # `past_values` may also be the cached values of all layers, and `img` the tokens of a picture
        if own & {*kinds} and re.search(pattern, lower) and (not rank or rank in KNOWN_AXES[role]):
            if role in MASKS and "f" in own and rank == 4 and _is_picture(value):
                break
            return role
    if "f" in own:
        if rank == 4 and is_continued(value):
            return "past"
        channels = value.shape[1] if value.shape is not None and rank == 4 else None
        return "images" if channels in (1, 3, 4) else "features"
    if "i" in own and rows is not None and rank in KNOWN_AXES["index"]:
        return "token_ids" if rank == 2 else "index"
    return None


def _has_tokens(value: ir.Value) -> bool:
    """Whether a value is [batch, tokens, size]: a picture without rows has a fixed number of channels first."""
    shape = shape_of_value(value)
    return len(shape) == 3 and isinstance(shape[0], str) and isinstance(shape[2], int)


_AS_PICTURES = {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze"}
"""Operators between a picture and what reads it as a picture."""


def _is_picture(value: ir.Value) -> bool:
    """Whether a Conv or a Resize reads the values, as it reads a mask that is drawn on a picture."""
    pending, seen = [value], {value}
    while pending:
        for node, _ in pending.pop().uses():
            if node.op_type in ("Conv", "Resize"):
                return True
            if node.op_type in _AS_PICTURES and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                pending.append(node.outputs[0])
    return False


_SIDES = (
    (r"(src|source|enc|encoder)(_|$)", r"(tgt|trg|target|dec|decoder)(_|$)"),
    (r"(txt|text|prompt)(_|$)", r"(img|image|latents?)(_|$)"),
)
"""Patterns of names of inputs for an encoder, and of those beside which they are an encoder's."""


def _tell_encoder_apart(kinds: dict[str, str | None], given: Mapping[str, str]) -> None:
    """If there are tokens of a decoder too, `input_ids` and `attention_mask` are the encoder's, and `src` beside `tgt`.

    So is a text beside the tokens of a picture.
    """
    plain = {name: plain_name(name) for name, kind in kinds.items() if kind in ("token_ids", "features")}
    for name, lower in plain.items():
        if name not in given and _is_of_encoder(lower, plain.values()):
            kinds[name] = f"encoder_{kinds[name]}"
    if not any("decoder_input" in name for name in kinds):
        return
    for name, kind in kinds.items():
        if name not in given and "decoder" not in name and kind in ("token_ids", "attention_mask"):
            kinds[name] = f"encoder_{kind}"


def _is_of_encoder(name: str, others: Collection[str]) -> bool:
    """Whether an input is named as one of an encoder, and another one as one of its decoder; all by plain names."""
    targets = [target for source, target in _SIDES if re.match(source, name)]
    return any(re.match(target, other) for target in targets for other in others)


def _unknown(name: str, value: ir.Value) -> RequestError:
    own, rank = _dtype_kinds(value), len(value.shape) if value.shape is not None else 0
    kinds: dict[str, str] = {**dict.fromkeys(ROLES, ""), "features": "f"}
    for _, role, allowed in NAMES:
        kinds[role] += allowed
    fits = {role: not own or not kinds[role] or bool(own & {*kinds[role]}) for role in ROLES}
    fitting = [role for role in ROLES if rank in KNOWN_AXES[role] and fits[role]]
    return RequestError(
        f"what the input {shown(name)} {shown(list(shape_of_value(value)))} ({dtype_of_value(value)}) is for can't be "
        f"guessed: say it with --input {shown(name)[1:-1]}=ROLE (by its shape and type: {', '.join(fitting) or 'none'};"
        f" {WHERE}); 'posexport verify' takes your own inputs too, --inputs FILE.npz."
    )
