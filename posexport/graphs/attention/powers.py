"""Exponentials of a softmax that is written out, and the number that may stand beside their sum.

    exp(x)    2^x, which is exp(x log 2)
    c + sum(exp(x))    exp(-m) + sum(exp(x - m)), which is exp(-m) (1 + sum(exp(x)))

A softmax whose sum has a number c more has a sink: one more logit, log(c), without a value.
"""

from __future__ import annotations

import math

import attrs
import onnx_ir as ir

from posexport.graphs.attention.behind import IN_ORDER, KEEPS_ORDER, PASSED, above, behind, stored_number


@attrs.frozen(kw_only=True)
class Power:
    """A node that computes exp(factor * exponent)."""

    node: ir.Node
    exponent: ir.Value
    factor: float = 1.0


@attrs.frozen(kw_only=True)
class Beside:
    """What is added to a sum of exponentials: `number` to `sums`. It is `weight`, or `weight` times exp(-`level`).

    `level` is subtracted from the logits `whole`, and `less` is the result; all three are None if nothing is.
    """

    weight: float
    number: ir.Value
    sums: ir.Value
    level: ir.Value | None = None
    whole: ir.Value | None = None
    less: ir.Value | None = None


def power_of(node: ir.Node | None) -> Power | None:
    """The exponential that a node computes; None for other nodes."""
    if node is None or node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type == "Exp":
        return Power(node=node, exponent=node.inputs[0])
    if node.op_type != "Pow" or node.inputs[1] is None:
        return None
    base = stored_number(behind(node.inputs[0], PASSED))
    if base is None or base <= 0.0 or base == 1.0 or not math.isfinite(base):
        return None
    return Power(node=node, exponent=node.inputs[1], factor=math.log(base))


def power_above(value: ir.Value | None) -> Power | None:
    """The exponential that a value is, perhaps in another dtype."""
    return None if value is None else power_of(behind(value, PASSED).producer())


def parted(total: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """The two values whose sum a divisor is: what may be a sum of exponentials, and what is added to it."""
    added = above(total, "Add", KEEPS_ORDER)
    if added is None or added.inputs[0] is None or added.inputs[1] is None:
        return None
    one, other = added.inputs
    if one is None or other is None:
        return None
    return (one, other) if above(one, "ReduceSum", KEEPS_ORDER) is not None else (other, one)


def beside(sums: ir.Value, number: ir.Value, power: Power) -> Beside | None:
    """What `number` adds to the `sums` of exponentials of this kind; None if it is not a weight of a sink."""
    weight = stored_number(behind(number, PASSED))
    if weight is not None:
        return Beside(weight=weight, number=number, sums=sums) if 0.0 < weight < math.inf else None
    own, less = power_of(behind(number, IN_ORDER).producer()), above(power.exponent, "Sub")
    level = None if own is None or own.factor != power.factor else _negated(own.exponent)
    if level is None or less is None or less.inputs[0] is None or less.inputs[1] is None:
        return None
    if behind(level, IN_ORDER) is not behind(less.inputs[1], IN_ORDER):
        return None
    return Beside(
        weight=1.0, number=number, sums=sums, level=less.inputs[1], whole=less.inputs[0], less=less.outputs[0]
    )


def _negated(value: ir.Value) -> ir.Value | None:
    """The value that another one is minus of: Neg(m), 0 - m, or m times -1; None for other values."""
    node = behind(value, IN_ORDER).producer()
    if node is None or node.op_type not in ("Neg", "Sub", "Mul"):
        return None
    if node.op_type == "Neg":
        return node.inputs[0]
    neutral = 0.0 if node.op_type == "Sub" else -1.0
    if stored_number(node.inputs[0]) == neutral:
        return node.inputs[1]
    return node.inputs[0] if node.op_type == "Mul" and stored_number(node.inputs[1]) == neutral else None
