"""Corners of chunks over a cache: causality lost and keys hidden for some lengths."""

from __future__ import annotations

from mutation.artifacts import Artifact
from mutation.corners.family import (
    Fault,
    Random,
    family,
    first_input,
    inputs_named,
    is_cached,
    log_uniform,
    on_input,
    on_visibility,
)
from mutation.inputs import REACH, Aim, Range
from mutation.surgery import Logits, Nodes


def _chunk_aims(low: int, high: int, past: int, batch: Range = (1, 2)) -> tuple[Aim, ...]:
    low, high = max(low, 1), min(high, REACH.chunk)
    return (Aim(batch=batch, seq=(low, max(low, high)), past=(past, past + 40), padding=("none",)),)


@family("chunk", "causality lost in a chunk over many keys")
def _chunk_causal(artifact: Artifact, random: Random) -> Fault | None:
    if not (artifact.spec.causal and is_cached(artifact)):
        return None
    most, keys = log_uniform(random, 2, 64), log_uniform(random, 16, 1500)

    def lost(at: Logits) -> str:
        nodes = at.nodes
        short = nodes.op("LessOrEqual", at.seq, nodes.const(most))
        several = nodes.op("GreaterOrEqual", at.seq, nodes.const(2))
        many = nodes.op("Greater", at.keys, nodes.const(keys))
        return nodes.all_of(short, several, many, nodes.op("Less", at.distance(), nodes.const(0)))

    return Fault(f"2 to {most} tokens, over {keys} keys", on_visibility(False, lost), _chunk_aims(2, most, keys))


@family("chunk", "causality lost in a long chunk")
def _long_chunk(artifact: Artifact, random: Random) -> Fault | None:
    if not (artifact.spec.causal and is_cached(artifact)):
        return None
    low, past = log_uniform(random, 8, 200), log_uniform(random, 1, 600)

    def lost(at: Logits) -> str:
        nodes = at.nodes
        long = nodes.op("GreaterOrEqual", at.seq, nodes.const(low))
        cached = nodes.op("GreaterOrEqual", nodes.op("Sub", at.keys, at.seq), nodes.const(past))
        return nodes.all_of(long, cached, nodes.op("Less", at.distance(), nodes.const(0)))

    return Fault(f"{low} tokens after {past}", on_visibility(False, lost), _chunk_aims(low, low + 60, past))


@family("chunk", "the next key seen in a chunk")
def _next_key(artifact: Artifact, random: Random) -> Fault | None:
    if not (artifact.spec.causal and is_cached(artifact)):
        return None
    low, past = log_uniform(random, 2, 120), log_uniform(random, 1, 1500)

    def seen(at: Logits) -> str:
        nodes = at.nodes
        long = nodes.op("GreaterOrEqual", at.seq, nodes.const(low))
        cached = nodes.op("GreaterOrEqual", nodes.op("Sub", at.keys, at.seq), nodes.const(past))
        return nodes.all_of(long, cached, nodes.op("Equal", at.distance(), nodes.const(-1)))

    return Fault(f"{low} tokens after {past}", on_visibility(False, seen), _chunk_aims(low, low + 40, past))


@family("chunk", "a cached key hidden from a chunk")
def _cached_key(artifact: Artifact, random: Random) -> Fault | None:
    if not is_cached(artifact) or artifact.spec.kv_cache == "shared":
        return None
    low, past = log_uniform(random, 1, 120), log_uniform(random, 1, 1000)
    last = bool(random.integers(2))

    def hidden(at: Logits) -> str:
        nodes = at.nodes
        long = nodes.op("GreaterOrEqual", at.seq, nodes.const(low))
        length = nodes.op("Sub", at.keys, at.seq)
        cached = nodes.op("GreaterOrEqual", length, nodes.const(past))
        chosen = nodes.op("Sub", length, nodes.const(1)) if last else nodes.const(0)
        return nodes.all_of(long, cached, nodes.op("Equal", at.key(), chosen))

    return Fault(
        f"the {'last' if last else 'first'}, {low} tokens after {past}",
        on_visibility(True, hidden),
        _chunk_aims(low, low + 40, past),
    )


@family("chunk", "new tokens read late")
def _reversed_chunk(artifact: Artifact, random: Random) -> Fault | None:
    """Over a cache, chunks of a length from a drawn one to about twice that are read one token late."""
    if not is_cached(artifact):
        return None
    low = log_uniform(random, 2, 100)
    high, past = 2 * low + 2, log_uniform(random, 1, 800)
    caches = inputs_named(artifact, "past_key")

    def change(nodes: Nodes, value: str) -> str:
        seq = nodes.size(value, 1)
        chosen = nodes.all_of(
            nodes.op("GreaterOrEqual", seq, nodes.const(low)),
            nodes.op("LessOrEqual", seq, nodes.const(high)),
            nodes.op("GreaterOrEqual", nodes.size(caches[0], 2), nodes.const(past)),
        )
        steps = nodes.steps(seq)
        late = nodes.op("Max", nodes.op("Sub", steps, nodes.const(1)), nodes.const(0))
        return nodes.op("Gather", value, nodes.op("Where", chosen, late, steps), axis=1)

    return Fault(
        f"{low} to {high} tokens after {past}", on_input(first_input(artifact), change), _chunk_aims(low, high, past)
    )
