"""Key heads that are repeated as a block: k0 k1 k0 k1 for four query heads, as by Tile.

Operators for attention repeat each key head before the next: k0 k0 k1 k1. So attention with key heads in blocks is
recognised, and rewritten, with as many key heads as query heads. Only its description gives the number of key heads
before they were repeated.
"""

from __future__ import annotations

from itertools import islice

from posexport.graphs.attention.absorbed import keeps_numbers
from posexport.graphs.attention.heads import Source
from posexport.graphs.attention.layouts import Sizes, factor, layouts_of
from posexport.graphs.attention.rotary import BARRIERS, MISSES
from posexport.graphs.view import View


def heads_before_tiles(view: View, source: Source, sizes: Sizes) -> int:
    """The number of heads of keys or values before they were repeated as a block.

    If they were not, it is that of `source`, which has these `sizes`.
    """
    flow, probe, (rows, heads, tokens, features) = view.flow, view.probe, sizes
    above = source.value
    for value in islice(flow.dominators(source.value), 1, MISSES + 2):
        if not all(keeps_numbers(flow, probe, node) for node in flow.between(value, above)):
            break
        above, replaced = value, probe.random_like(value)
        own, left = divmod(replaced.numel(), rows * tokens * features)
        if not left and own and own < heads and not heads % own:
            after = source.layout.to_heads(probe.through(value, [source.value], replaced)[0], sizes)
            for layout in layouts_of(tuple(replaced.shape), (rows, own, tokens, features)):
                before = layout.to_heads(replaced, (rows, own, tokens, features))
                if factor(after, before.repeat(1, heads // own, 1, 1)) == 1.0:
                    return own
        node = value.producer()
        if node is None or node.op_type in BARRIERS:
            break
    return heads
