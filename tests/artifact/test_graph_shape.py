"""The longest path of a graph."""

from __future__ import annotations

from posexport.artifact.graph_shape import longest_path


class Node:
    def __init__(self, op_type: str, given: list[str], gives: list[str]) -> None:
        self.op_type, self.input, self.output, self.domain = op_type, given, gives, ""


def test_the_chain_is_the_longest_path_from_input_to_output() -> None:
    nodes = [
        Node("Const", [], ["c"]), Node("A", ["x", "c"], ["a"]), Node("B", ["a"], ["b"]), Node("C", ["x", "b"], ["y"]),
        Node("Aside", ["y"], ["z"]),
    ]  # fmt: skip
    assert longest_path(nodes, "x", "y") == ("A", "B", "C")
    assert longest_path(nodes, "nowhere", "y") == ()


def test_an_output_or_input_that_is_left_out_is_on_no_path() -> None:
    nodes = [Node("A", ["x"], ["a", ""]), Node("B", ["c", ""], ["y"])]
    assert longest_path(nodes, "x", "a") == ("A",)
    assert longest_path(nodes, "x", "y") == ()
