"""The messages about an unknown role, and about a role of a missing input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from graph_files import small_graph
from helpers import cli, refused

from posexport.errors import RequestError
from posexport.spec.input_roles import ROLES, check_input, check_role


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("tokens", "token_ids"),
        ("input_ids", "token_ids"),
        ("pixel_values", "images"),
        ("kv_cache", "past"),
        ("positions", "position_ids"),
        ("attention_maks", "attention_mask"),
        ("Token-IDs", "token_ids"),
        ("cross_past", "encoder_past"),
        ("one", "ones"),
    ],
)
def test_the_role_that_was_meant_is_named_with_its_meaning(given: str, meant: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_role("foo", given)
    assert f"unknown role {given!r} of the input 'foo': did you mean {meant!r} ({ROLES[meant]})" in str(caught.value)
    assert "'posexport list --roles'" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_role_like_no_other_points_at_all_of_them() -> None:
    with pytest.raises(RequestError) as caught:
        check_role("foo", "zzzz")
    assert "did you mean" not in str(caught.value) and "'posexport list --roles'" in str(caught.value)


def test_the_input_that_was_meant_is_named() -> None:
    inputs = ["Tokens", *(f"past_key_values.{layer}.key" for layer in range(40))]
    for name, role, hint in [
        ("tokns", "token_ids", "did you mean 'Tokens'? it has Tokens, past_key_values.0.key"),
        ("token_ids", "Tokens", "did you mean Tokens=token_ids?"),
        ("zzzz", "past", "no input of the file: it has Tokens"),
    ]:
        with pytest.raises(RequestError) as caught:
            check_input(name, role, inputs)
        assert hint in str(caught.value)
        assert "and 33 more, which 'posexport inspect' shows" in str(caught.value)
    check_input("Tokens", "token_ids", inputs)


@pytest.mark.parametrize("command", ["inspect", "verify", "rewrite", "compile", "bench"])
def test_commands_name_the_role_that_was_meant(command: str, tmp_path: Path) -> None:
    path = small_graph(tmp_path, "unknown")
    more = ("-o", tmp_path / "out.onnx") if command == "rewrite" else ()
    result = cli(command, path, *more, "--input", "foo=tokens")
    if result.exit_code == 3:
        pytest.skip("no builder of plans is installed")
    refused(result, "unknown role 'tokens' of the input 'foo': did you mean 'token_ids' (tokens of the vocabulary")


def test_an_input_that_is_not_there_is_told_by_inspect(tmp_path: Path) -> None:
    path = small_graph(tmp_path, "unknown")
    refused(cli("inspect", path, "--input", "fo=index"), "'fo', which is no input of the file: did you mean 'foo'?")
    refused(cli("inspect", path, "--input", "index=foo"), "did you mean foo=index?")


def test_an_unknown_input_gets_the_roles_that_its_shape_and_type_allow(tmp_path: Path) -> None:
    result = cli("verify", small_graph(tmp_path, "unknown"))
    assert result.exit_code == 2
    listed = re.search(r"by its shape and type: ([a-z_, ]+);", result.stderr)
    assert listed is not None, result.stderr
    roles = listed[1].split(", ")
    assert {"token_ids", "position_ids", "index", "attention_mask"} <= {*roles} < {*ROLES}
    assert not {"images", "past", "features", "cache_position", "boxes"} & {*roles}


def test_list_shows_every_role_with_its_meaning() -> None:
    shown = cli("list", "--roles").stdout
    assert all(f" {role} " in shown and meaning[:30] in shown for role, meaning in ROLES.items())
    assert json.loads(cli("list", "--roles", "--json").stdout) == {"roles": ROLES}
    refused(cli("list", "--roles", "--presets"), "drop one")
    for command in ("inspect", "verify", "rewrite", "compile", "bench", "tune", "plot"):
        assert "'posexport list --roles'" in " ".join(cli(command, "--help").stdout.split())
