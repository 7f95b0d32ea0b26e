"""Roles and axes of inputs by the names that exporters write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graph_signatures import Signature, graph_of
from onnx import helper

from posexport.errors import RequestError
from posexport.graphs.axes import multiple_of
from posexport.graphs.roles import ROLES, roles_of
from posexport.graphs.sizes import fitted, shape_of

CACHE: list[int | str] = ["batch", 2, "past", 4]

OPTIMUM: Signature = {
    "input_ids": (["batch_size", "sequence_length"], "int64"),
    "attention_mask": (["batch_size", "past_sequence_length + sequence_length"], "int64"),
    "position_ids": (["batch_size", "sequence_length"], "int64"),
    "past_key_values.0.key": (["batch_size", 2, "past_sequence_length", 4], "fp32"),
    "past_key_values.0.value": (["batch_size", 2, "past_sequence_length", 4], "fp32"),
    "use_cache_branch": ([1], "bool"),
}
SEQ2SEQ: Signature = {
    "decoder_input_ids": (["batch", "seq"], "int64"),
    "input_ids": (["batch", "source"], "int64"),
    "attention_mask": (["batch", "source"], "int64"),
    "past_key_values.0.decoder.key": (CACHE, "fp32"),
    "past_key_values.0.encoder.value": (["batch", 2, "source", 4], "fp32"),
}
GROUPED: Signature = {
    "inputs_embeds": (["b", "s", 8], "fp16"),
    "seqlens_k": (["b"], "int32"),
    "total_sequence_length": ([], "int32"),
    "past_key_0": (["b", 1, "p", 4], "fp16"),
}
FLUX: Signature = {
    "hidden_states": (["batch", "image", 8], "fp32"),
    "encoder_hidden_states": (["batch", "text", 8], "fp32"),
    "img_ids": ([1, "image", 3], "fp32"),
    "txt_ids": ([1, "text", 3], "fp32"),
    "start_pos": ([], "int64"),
}
JOINT: Signature = {
    "img": (["batch", "n", 8], "fp32"),
    "txt": (["batch", "t", 8], "fp32"),
    "img_ids": (["batch", "n", 3], "fp32"),
}
TRANSFORMER: Signature = {"src": (["s", "batch", 8], "fp32"), "tgt": (["t", "batch", 8], "fp32")}
STREAMING: Signature = {
    "chunk": (["batch", "seq", 8], "fp32"),
    "att_cache": (["batch", 4, "cached", 16], "fp32"),
    "cnn_cache": (["batch", 8, 7], "fp32"),
    "padding": (["batch", "seq"], "bool"),
}
TOKENS_FIRST: Signature = {
    "input_ids": (["batch", "seq"], "int64"),
    "position_ids": (["batch", 2, "seq"], "int64"),
    "past_key": (["past", "batch", 4, 8], "fp32"),
    "mems.0": (["memory", "batch", 32], "fp32"),
    "past_value": (["batch", 4, "past", 8], "fp32"),
}
EMFORMER: Signature = {
    "utterance": (["s1", "s9", 32], "fp32"),
    "right_context": (["s2", "s9", 32], "fp32"),
    "mems": (["s3", "s9", 32], "fp32"),
}
PACKED: Signature = {"x": (["seq", 8], "fp32"), "cu_window_seqlens": (["windows"], "int32")}

KNOWN: dict[str, tuple[Signature, dict[str, tuple[str, tuple[object, ...]]]]] = {
    "flux": (
        FLUX,
        {
            "img_ids": ("position_ids", (1, "seq", "axes")),
            "txt_ids": ("position_ids", (1, "encoder", "axes")),
            "start_pos": ("past_length", ()),
        },
    ),
    "joint attention": (
        JOINT,
        {
            "img": ("features", ("batch", "seq", 8)),
            "txt": ("encoder_features", ("batch", "encoder", 8)),
            "img_ids": ("position_ids", ("batch", "seq", "axes")),
        },
    ),
    "torch's Transformer": (
        TRANSFORMER,
        {"src": ("encoder_features", ("encoder", "batch", 8)), "tgt": ("features", ("seq", "batch", 8))},
    ),
    "caches with tokens first": (
        TOKENS_FIRST,
        {
            "position_ids": ("position_ids", ("batch", "axes", "seq")),
            "past_key": ("past", ("past", "batch", 4, 8)),
            "mems.0": ("past", ("past", "batch", 32)),
            "past_value": ("past", ("batch", 4, "past", 8)),
        },
    ),
    "streaming, tokens first": (
        EMFORMER,
        {
            "utterance": ("features", ("seq", "batch", 32)),
            "right_context": ("features", ("seq", "batch", 32)),
            "mems": ("past", ("past", "batch", 32)),
        },
    ),
    "fixed tokens first": (
        {"memory": ([12, "s3", 8], "fp32"), "mask": (["s3", 6, 3, 4], "fp32")},
        {
            "memory": ("encoder_features", ("encoder", "batch", 8)),
            "mask": ("attention_mask", ("batch", 6, "seq", "total")),
        },
    ),
    "fairseq": (
        {"query": (["s1", "s9", 8], "fp32"), "prev_key": (["s9", 4, "s2", 8], "fp32")},
        {"query": ("features", ("seq", "batch", 8)), "prev_key": ("past", ("batch", 4, "past", 8))},
    ),
    "packed sequences": (PACKED, {"cu_window_seqlens": ("segments", ("dim windows",))}),
    "streaming": (
        STREAMING,
        {
            "att_cache": ("past", ("batch", 4, "past", 16)),
            "cnn_cache": ("state", ("batch", 8, 7)),
            "padding": ("padding_mask", ("batch", "seq")),
        },
    ),
    "optimum": (
        OPTIMUM,
        {
            "input_ids": ("token_ids", ("batch", "seq")),
            "attention_mask": ("attention_mask", ("batch", "total")),
            "position_ids": ("position_ids", ("batch", "seq")),
            "past_key_values.0.key": ("past", ("batch", 2, "past", 4)),
            "past_key_values.0.value": ("past", ("batch", 2, "past", 4)),
            "use_cache_branch": ("use_cache", (1,)),
        },
    ),
    "encoder and decoder": (
        SEQ2SEQ,
        {
            "decoder_input_ids": ("token_ids", ("batch", "seq")),
            "input_ids": ("encoder_token_ids", ("batch", "encoder")),
            "attention_mask": ("encoder_attention_mask", ("batch", "encoder")),
            "past_key_values.0.decoder.key": ("past", ("batch", 2, "past", 4)),
            "past_key_values.0.encoder.value": ("encoder_past", ("batch", 2, "encoder", 4)),
        },
    ),
    "genai": (
        GROUPED,
        {
            "inputs_embeds": ("features", ("batch", "seq", 8)),
            "seqlens_k": ("last_key", ("batch",)),
            "total_sequence_length": ("total_length", ()),
            "past_key_0": ("past", ("batch", 1, "past", 4)),
        },
    ),
    "tokens of several kinds": (
        {
            "input_ids": (["batch", "sequence"], "int64"),
            "token_type_ids": (["batch", "sequence", 7], "int64"),
            "global_attention_mask": (["batch", "sequence"], "int64"),
            "task_inputs": (["batch", 16], "int64"),
        },
        {
            "input_ids": ("token_ids", ("batch", "seq")),
            "token_type_ids": ("token_type_ids", ("batch", "seq", 7)),
            "global_attention_mask": ("mask", ("batch", "seq")),
            "task_inputs": ("index", ("batch", 16)),
        },
    ),
    "numbers of tokens": (
        {
            "x": (["b", "s", 8], "fp32"),
            "src_lengths": (["b"], "int64"),
            "prefix_len": (["b"], "int64"),
            "attention_mask": (["b", "s"], "int64"),
        },
        {"src_lengths": ("lengths", ("batch",)), "prefix_len": ("prefix_length", ("batch",))},
    ),
    "torch, lists and unlike names of one dimension": (
        {
            "input_ids": (["s10", "s70"], "int64"),
            "attention_mask": (["s43", "s53"], "int64"),
            "past_keys_0": (["s10", "2", "s69", "4"], "fp32"),
            "past_values_0": (["s10", "2", "s89", "4"], "fp32"),
            "cache_position": (["s70"], "int64"),
        },
        {
            "attention_mask": ("attention_mask", ("batch", "total")),
            "past_keys_0": ("past", ("batch", 2, "past", 4)),
            "past_values_0": ("past", ("batch", 2, "past", 4)),
            "cache_position": ("cache_position", ("seq",)),
        },
    ),
    "an encoder whose mask has the name of its tokens": (
        {
            "input_ids": (["n", "length"], "int64"),
            "attention_mask": (["n", "length"], "int64"),
            "token_type_ids": (["n", "length"], "int64"),
        },
        {
            "attention_mask": ("attention_mask", ("batch", "seq")),
            "token_type_ids": ("token_type_ids", ("batch", "seq")),
        },
    ),
    "positions that are no whole numbers": (
        {"x": (["b", "s", 8], "fp32"), "position_ids": (["b", "s"], "fp32")},
        {"x": ("features", ("batch", "seq", 8)), "position_ids": ("position_ids", ("batch", "seq"))},
    ),
    "several axes of positions": (
        {"inputs_embeds": (["b", "s", 8], "fp32"), "position_ids": ([3, "b", "s"], "int64")},
        {"position_ids": ("position_ids", ("axes", "batch", "seq"))},
    ),
    "several axes of positions, last": (
        {"hidden_states": (["b", "s", 8], "fp32"), "position_ids": (["b", "s", 2], "int64")},
        {"position_ids": ("position_ids", ("batch", "seq", "axes"))},
    ),
    "masks that are added": (
        {"x1": (["b", "s", 8], "fp32"), "attention_mask": (["b", 1, "s", "t"], "fp32"), "past.0": (CACHE, "fp32")},
        {"x1": ("features", ("batch", "seq", 8)), "attention_mask": ("attention_mask", ("batch", 1, "seq", "total"))},
    ),
    "caches whose tokens lie before the heads, or last": (
        {
            "ids": (["b", "s"], "int64"),
            "past_key.0": (["b", "p", 2, 4], "fp32"),
            "past_value.0": (["b", 2, 4, "p"], "fp32"),
            "past_0": ([2, "b", 2, "p", 4], "fp32"),
        },
        {
            "ids": ("token_ids", ("batch", "seq")),
            "past_key.0": ("past", ("batch", "past", 2, 4)),
            "past_value.0": ("past", ("batch", 2, 4, "past")),
            "past_0": ("past", (2, "batch", 2, "past", 4)),
        },
    ),
    "pictures and sound": (
        {
            "pixel_values": ([-1, 3, "h", "w"], "fp32"),
            "input_features": (["b", 80, 3000], "fp32"),
            "data": ([1, 3, 8, 8], "fp32"),
        },
        {
            "pixel_values": ("images", ("batch", 3, "height", "width")),
            "input_features": ("audio", ("batch", 80, "frames")),
            "data": ("images", ("batch", 3, "height", "width")),
        },
    ),
    "points of a picture, as SAM takes them": (
        {
            "image_embeddings": (["b", 8, 4, 4], "fp32"),
            "input_labels": (["b", 1, "n"], "int64"),
            "point_labels": (["b", "n"], "fp32"),
        },
        {"input_labels": ("mask", ("batch", "seq", "dim n")), "point_labels": ("mask", ("batch", "dim n"))},
    ),
    "posexport's shared cache": (
        {
            "hidden_states": (["batch", "seq", 8], "fp32"),
            "attention_mask": (["batch", "max_seq"], "int64"),
            "write_indices": (["batch"], "int64"),
            "past_key": (["batch", 2, "max_seq", 4], "fp32"),
        },
        {
            "attention_mask": ("attention_mask", ("batch", "slots")),
            "write_indices": ("write_indices", ("batch",)),
            "past_key": ("past", ("batch", 2, "slots", 4)),
        },
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_names_and_shapes_tell_roles_and_axes(name: str, tmp_path: Path) -> None:
    signature, expected = KNOWN[name]
    roles = roles_of(graph_of(tmp_path, signature))
    assert list(roles) == list(signature)
    assert {name: (roles[name].kind, roles[name].axes) for name in expected} == expected


def test_an_axis_of_rows_and_heads_is_a_multiple_of_the_rows(tmp_path: Path) -> None:
    """torch uses such a name if a model caches keys as [rows*heads, size, tokens], as BLOOM did."""
    signature: Signature = {
        "hidden_states": (["s7", "s2", 32], "fp32"),
        "past_key_values.0.key": (["4*s7", 8, "s5"], "fp32"),
        "past_key_values.0.value": (["4*s7", "s5", 8], "fp32"),
        "other": (["3*foo", "s9", 2], "fp32"),  # a name that no other dimension has
    }
    roles = roles_of(graph_of(tmp_path, signature))
    axes = {name: role.axes for name, role in roles.items()}
    assert axes["past_key_values.0.key"] == ("4*batch", 8, "past")
    assert axes["past_key_values.0.value"] == ("4*batch", "past", 8)
    assert axes["other"] == ("batch", "seq", 2)
    for batch in (1, 3):
        sizes = fitted(roles, {"batch": batch, "past": 5})
        assert shape_of(roles["past_key_values.0.key"], sizes) == (4 * batch, 8, 5)


def test_a_multiple_of_thousands_of_digits_is_none() -> None:
    """Python refuses to convert them to an int."""
    assert multiple_of("12*s7") == (12, "s7")
    assert multiple_of(f"{'9' * 5000}*s7") is None


@pytest.mark.parametrize("name", ["present_key.0", "pk0", "output_1.0.key"])
def test_a_cache_that_comes_out_as_long_is_written_into(tmp_path: Path, name: str) -> None:
    signature: Signature = {"input_ids": (["b", "s"], "int64"), "past_key.0": (["b", 2, 16, 4], "fp32")}
    present: Signature = {name: (["b", 2, 16, 4], "fp32")}
    nodes = [helper.make_node("Identity", ["past_key.0"], [name])]
    assert roles_of(graph_of(tmp_path, signature, present, nodes))["past_key.0"].axes == ("batch", 2, "slots", 4)
    grown: Signature = {name: (["b", 2, 20, 4], "fp32")}
    assert roles_of(graph_of(tmp_path, signature, grown, nodes))["past_key.0"].axes == ("batch", 2, "past", 4)
    joined = [
        helper.make_node("Concat", ["past_key.0", "past_key.0"], [name], axis=2)
    ]  # whatever the name of its length
    assert roles_of(graph_of(tmp_path, signature, present, joined))["past_key.0"].axes == ("batch", 2, "past", 4)


def test_integers_that_nothing_tells_are_asked_for(tmp_path: Path) -> None:
    graph = graph_of(tmp_path, {"foo": (["b", "s"], "int64")})
    with pytest.raises(RequestError, match=r"'foo' \['b', 's'\] \(int64\) is for can't be guessed.*--input foo=ROLE"):
        roles_of(graph)
    assert roles_of(graph, {"foo": "token_ids"})["foo"].kind == "token_ids"


def test_integers_that_are_looked_up_are_tokens(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gather", ["table", "foo read"], ["rows"])]
    table = {"table": np.zeros((11, 3), np.float32)}
    role = roles_of(graph_of(tmp_path, {"foo": (["b", "s"], "int64")}, nodes=nodes, weights=table))["foo"]
    assert (role.kind, role.rows) == ("token_ids", 11)
    pairs: Signature = {"foo": (["b", "s", "s"], "int64"), "x": (["b", "s", 8], "fp32")}
    role = roles_of(graph_of(tmp_path, pairs, nodes=nodes, weights=table))["foo"]
    assert (role.kind, role.rows, role.axes) == ("index", 11, ("batch", "seq", "seq"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bar": "token_ids"}, "--input gives a role to 'bar', which is no input"),
        ({"foo": "tokens"}, "unknown role 'tokens' of the input 'foo'.*token_ids"),
        (
            {"foo": "past"},
            r"--input foo=past doesn't fit: the input has 2 dimensions \['b', 's'\], that role takes 3, 4",
        ),
    ],
)
def test_wrong_roles_are_refused(given: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        roles_of(graph_of(tmp_path, {"foo": (["b", "s"], "int64")}), given)


def test_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'words' holds texts, which can't be drawn"):
        roles_of(graph_of(tmp_path, {"words": (["b"], "text")}), {"words": "index"})


def test_every_role_has_a_place_in_the_tables() -> None:
    from posexport.graphs.axes import KNOWN_AXES
    from posexport.graphs.draw import MAKERS

    assert set(ROLES) == set(KNOWN_AXES) == set(MAKERS)


def test_masks_of_an_encoder_and_its_decoder_by_what_they_do() -> None:
    """Keras names masks that show keys padding masks."""
    text = """<ir_version: 10, opset_import: ["" : 18]> g (
        int64[b, s] encoder_token_ids, int64[b, s] encoder_padding_mask,
        int64[b, t] decoder_token_ids, int64[b, t] decoder_padding_mask) => (y, z)
        <float low = {-1e9}, float zero = {0}> {
        e = Cast<to = 9>(encoder_padding_mask) y = Where(e, zero, low)
        d = Cast<to = 9>(decoder_padding_mask) z = Where(d, zero, low)
    }"""
    roles = roles_of(ir.serde.deserialize_model(onnx.parser.parse_model(text)))
    assert [role.kind for role in roles.values()] == [
        *("encoder_token_ids", "encoder_attention_mask", "token_ids", "attention_mask")
    ]
