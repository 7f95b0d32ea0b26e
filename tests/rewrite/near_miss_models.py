"""Small hand-written graphs with everything that a near miss changes.

Each has two layers with 4 heads of size 8. The models `decoder` and `operators` have 2 key heads.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

Feeds = dict[str, np.ndarray]
HIDDEN, HEADS, KEY_HEADS, SIZE, LAYERS = 32, 4, 2, 8, 2
END = np.iinfo(np.int64).max

CONSTANTS = f"""
    axis0 = Constant <value = int64[1] {{0}}> ()
    axis1 = Constant <value = int64[1] {{1}}> ()
    axis2 = Constant <value = int64[1] {{2}}> ()
    axis3 = Constant <value = int64[1] {{3}}> ()
    four = Constant <value = int64[1] {{4}}> ()
    end = Constant <value = int64[1] {{{END}}}> ()
    zero = Constant <value = int64 {{0}}> ()
    one = Constant <value = int64 {{1}}> ()
    window = Constant <value = int64 {{5}}> ()
    nothing = Constant <value = float {{0}}> ()
    minus = Constant <value = float {{-1000000000}}> ()
    half = Constant <value = float {{0.45}}> ()
    cap = Constant <value = float {{4}}> ()
    small = Constant <value = float {{0.000001}}> ()
    far = Constant <value = int64 {{7}}> ()
    heads_split = Constant <value = int64[4] {{0, 0, 4, 8}}> ()
    keys_split = Constant <value = int64[4] {{0, 0, 2, 8}}> ()
    repeat = Constant <value = int64[5] {{1, 1, 2, 1, 1}}> ()
    repeated = Constant <value = int64[4] {{0, 4, -1, 8}}> ()
    merged = Constant <value = int64[3] {{0, 0, -1}}> ()
    frequencies = Constant <value = float[4] {{1, 0.5, 0.25, 0.125}}> ()
"""

ANGLES = """
    positions = Cast <to = 1> (position_ids)
    column = Unsqueeze (positions, axis2)
    angle = Mul (column, frequencies)
    angles = Concat <axis = -1> (angle, angle)
    wide = Unsqueeze (angles, axis1)
    cos = Cos (wide)
    sin = Sin (wide)
"""

MASK = """
    lengths = Shape (attention_mask)
    total = Gather <axis = 0> (lengths, one)
    tokens = Shape (input_ids)
    new = Gather <axis = 0> (tokens, one)
    past = Sub (total, new)
    keys = Range (zero, total, one)
    queries = Range (past, total, one)
    rows = Unsqueeze (queries, axis1)
    causal = LessOrEqual (keys, rows)
    oldest = Sub (rows, window)
    near = Greater (keys, oldest)
    allowed = And (causal, near)
    padding = Cast <to = 9> (attention_mask)
    padding2 = Unsqueeze (padding, axis1)
    padding3 = Unsqueeze (padding2, axis1)
    seen = And (allowed, padding3)
    mask = Where (seen, nothing, minus)
"""


def turned(name: str, source: str) -> str:
    """RoPE of the layout half."""
    return f"""
    {name}a = Slice ({source}, axis0, four, axis3, axis1)
    {name}b = Slice ({source}, four, end, axis3, axis1)
    {name}n = Neg ({name}b)
    {name}t = Concat <axis = -1> ({name}n, {name}a)
    {name}c = Mul ({source}, cos)
    {name}s = Mul ({name}t, sin)
    {name} = Add ({name}c, {name}s)
"""


def normed(layer: int) -> str:
    """The norm before a layer."""
    return f"""
    sq{layer} = Mul (x{layer}, x{layer})
    mean{layer} = ReduceMean <keepdims = 1> (sq{layer}, axis2)
    safe{layer} = Add (mean{layer}, small)
    root{layer} = Sqrt (safe{layer})
    h{layer} = Div (x{layer}, root{layer})
"""


def split(layer: int, name: str, shape: str) -> str:
    """A projection, split into heads."""
    return f"""
    {name}l{layer} = MatMul (h{layer}, w{name}{layer})
    {name}r{layer} = Reshape ({name}l{layer}, {shape})
    {name}{layer} = Transpose <perm = [0, 2, 1, 3]> ({name}r{layer})
"""


def joined(layer: int) -> str:
    """From the result of the attention to the input of the next layer."""
    return f"""
    back{layer} = Transpose <perm = [0, 2, 1, 3]> (y{layer})
    flat{layer} = Reshape (back{layer}, merged)
    out{layer} = MatMul (flat{layer}, wo{layer})
    x{layer + 1} = Add (x{layer}, out{layer})
"""


def decoder_layer(layer: int) -> str:
    """A layer with grouped heads, a rotation, a cache, a scale, a cap and a mask."""
    heads = split(layer, "q", "heads_split") + split(layer, "k", "keys_split") + split(layer, "v", "keys_split")
    caches = f"""
    present_key{layer} = Concat <axis = 2> (past_key{layer}, kk{layer})
    present_value{layer} = Concat <axis = 2> (past_value{layer}, v{layer})
"""
    repeats = "".join(
        f"""
    {kind}u{layer} = Unsqueeze (present_{kind}{layer}, axis2)
    {kind}e{layer} = Expand ({kind}u{layer}, repeat)
    {kind}f{layer} = Reshape ({kind}e{layer}, repeated)
"""
        for kind in ("key", "value")
    )
    core = f"""
    keyt{layer} = Transpose <perm = [0, 1, 3, 2]> (keyf{layer})
    raw{layer} = MatMul (qq{layer}, keyt{layer})
    scaled{layer} = Mul (raw{layer}, half)
    divided{layer} = Div (scaled{layer}, cap)
    tanh{layer} = Tanh (divided{layer})
    capped{layer} = Mul (tanh{layer}, cap)
    masked{layer} = Add (capped{layer}, mask)
    weights{layer} = Softmax <axis = -1> (masked{layer})
    y{layer} = MatMul (weights{layer}, valuef{layer})
"""
    rotations = turned(f"qq{layer}", f"q{layer}") + turned(f"kk{layer}", f"k{layer}")
    return normed(layer) + heads + rotations + caches + repeats + core + joined(layer)


def biased_layer(layer: int) -> str:
    """A layer with a bias table by distance, slopes by head, a triangular mask and sinks."""
    heads = "".join(split(layer, name, "heads_split") for name in "qkv")
    return f"""{normed(layer)}{heads}
    keyt{layer} = Transpose <perm = [0, 1, 3, 2]> (k{layer})
    raw{layer} = MatMul (q{layer}, keyt{layer})
    scaled{layer} = Mul (raw{layer}, half)
    sloped{layer} = Add (scaled{layer}, alibi)
    placed{layer} = Add (sloped{layer}, bias{layer})
    masked{layer} = Where (triangle, placed{layer}, minus)
    batch{layer} = Shape <start = 0, end = 1> (masked{layer})
    shape{layer} = Concat <axis = 0> (batch{layer}, sinkshape)
    length{layer} = Shape <start = 2, end = 3> (masked{layer})
    full{layer} = Concat <axis = 0> (shape{layer}, length{layer}, axis1)
    sunk{layer} = Expand (sinks, full{layer})
    all{layer} = Concat <axis = -1> (masked{layer}, sunk{layer})
    soft{layer} = Softmax <axis = -1> (all{layer})
    last{layer} = Constant <value = int64[1] {{-1}}> ()
    weights{layer} = Slice (soft{layer}, axis0, last{layer}, axis3)
    y{layer} = MatMul (weights{layer}, v{layer}){joined(layer)}
"""


BIASES = """
    sinkshape = Constant <value = int64[1] {4}> ()
    slopes = Constant <value = float[4, 1, 1] {0.5, 0.25, 0.125, 0.0625}> ()
    sinks = Constant <value = float[1, 4, 1, 1] {0.5, -0.25, 1, 0}> ()
    tokens = Shape (input_ids)
    total = Gather <axis = 0> (tokens, one)
    keys = Range (zero, total, one)
    rows = Unsqueeze (keys, axis1)
    distance = Sub (keys, rows)
    floats = Cast <to = 1> (distance)
    alibi = Mul (floats, slopes)
    centred = Add (distance, far)
    table = Identity (bias_table)
    byhead = Gather <axis = 0> (bias_table, centred)
    bias = Transpose <perm = [2, 0, 1]> (byhead)
    bias0 = Unsqueeze (bias, axis0)
    small_bias = Mul (bias0, half)
    bias1 = Identity (small_bias)
    square = ConstantOfShape <value = float[1] {1}> (both)
    lower = Trilu <upper = 0> (square, zero)
    triangle = Cast <to = 9> (lower)
"""


def operator_layer(layer: int) -> str:
    """A layer of opset 23's RotaryEmbedding and Attention."""
    heads = split(layer, "q", "heads_split") + split(layer, "k", "keys_split") + split(layer, "v", "keys_split")
    return f"""{normed(layer)}{heads}
    qq{layer} = RotaryEmbedding (q{layer}, cosine, sine)
    kk{layer} = RotaryEmbedding (k{layer}, cosine, sine)
    y{layer} = Attention <scale = 0.45> (qq{layer}, kk{layer}, v{layer}, mask){joined(layer)}
"""


def contrib_layer(layer: int) -> str:
    """A layer of com.microsoft operators: MultiHeadAttention in layer 0, GroupQueryAttention in layer 1."""
    projections = "".join(f"    {name}l{layer} = MatMul (h{layer}, w{name}{layer})\n" for name in "qkv")
    mha = f"""
    flat{layer} = com.microsoft.MultiHeadAttention <num_heads = 4, scale = 0.45> (ql{layer}, kl{layer}, vl{layer})
"""
    gqa = f"""
    flat{layer} = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 4, scale = 0.45>
        (ql{layer}, kl{layer}, vl{layer}, , , lengths_less_one, longest)
"""
    return f"""{normed(layer)}{projections}{gqa if layer else mha}
    out{layer} = MatMul (flat{layer}, wo{layer})
    x{layer + 1} = Add (x{layer}, out{layer})
"""


def parsed(name: str, body: str, inputs: str, outputs: str, opset: int, weights: dict[str, np.ndarray]) -> ir.Model:
    """A model from the text of its body and its weights."""
    domains = f'"" : {opset}, "com.microsoft" : 1'
    text = f"<ir_version: 10, opset_import: [{domains}]> {name} ({inputs}) => ({outputs}) {{{CONSTANTS}{body}}}"
    proto = onnx.parser.parse_model(text)
    for weight, array in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, weight))
    return ir.from_proto(proto)


def drawn_weights(key_heads: int) -> dict[str, np.ndarray]:
    """Random projections; the scores spread over a few units."""
    generator = np.random.default_rng(0)
    shapes = {"q": (HIDDEN, HEADS * SIZE), "k": (HIDDEN, key_heads * SIZE), "v": (HIDDEN, key_heads * SIZE)}
    shapes["o"] = (HEADS * SIZE, HIDDEN)
    weights = {
        f"w{name}{layer}": generator.normal(0, 0.3, shape) for layer in range(LAYERS) for name, shape in shapes.items()
    }
    weights["embedding"] = generator.normal(0, 1, (32, HIDDEN))
    return {name: array.astype(np.float32) for name, array in weights.items()}


EMBED = "    x0 = Gather (embedding, input_ids)\n"


def decoder() -> tuple[ir.Model, list[Feeds]]:
    """Two layers with caches; inputs of two rows, the second padded on the left, with 4 tokens after 6 or after 0."""
    caches = [f"past_{kind}{layer}" for layer in range(LAYERS) for kind in ("key", "value")]
    ids = "int64[batch, tokens] input_ids, int64[batch, total] attention_mask, int64[batch, tokens] position_ids"
    inputs = ", ".join([ids, *(f"float[batch, 2, past, 8] {name}" for name in caches)])
    presents = (f"float[batch, 2, total, 8] {name.replace('past', 'present')}" for name in caches)
    outputs = ", ".join([f"float[batch, tokens, 32] x{LAYERS}", *presents])
    body = EMBED + ANGLES + MASK + "".join(map(decoder_layer, range(LAYERS)))
    model = parsed("decoder", body, inputs, outputs, 18, drawn_weights(KEY_HEADS))
    return model, [decoder_feeds(4, past, caches) for past in (6, 0)]


def decoder_feeds(tokens: int, past: int, caches: list[str]) -> Feeds:
    """Inputs of a decoder with two rows, the second padded on the left."""
    generator = np.random.default_rng(past)
    mask = np.ones((2, past + tokens), np.int64)
    mask[1, : (past + tokens) // 3] = 0
    positions = np.maximum(mask.cumsum(1) - 1, 0)[:, past:]
    pasts = {name: generator.normal(0, 1, (2, KEY_HEADS, past, SIZE)).astype(np.float32) for name in caches}
    ids = generator.integers(0, 32, (2, tokens))
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **pasts}


def biased() -> tuple[ir.Model, list[Feeds]]:
    """Two layers with ALiBi, a table of biases by distance, a triangular mask and sinks; inputs of 6 tokens."""
    weights = drawn_weights(HEADS)
    weights["bias_table"] = np.random.default_rng(1).normal(0, 1, (16, HEADS)).astype(np.float32)
    sides = "    both = Concat <axis = 0> (side, side)\n"
    body = EMBED + "    side = Shape <start = 1, end = 2> (input_ids)\n" + sides + BIASES
    body += "".join(map(biased_layer, range(LAYERS)))
    inputs, outputs = "int64[batch, tokens] input_ids", f"float[batch, tokens, 32] x{LAYERS}"
    model = parsed("biased", body, inputs, outputs, 18, weights)
    return model, [{"input_ids": np.random.default_rng(2).integers(0, 32, (2, 6))}]


def operators() -> tuple[ir.Model, list[Feeds]]:
    """Two layers of opset 23's operators; inputs of 5 tokens."""
    mask = MASK.replace("And (allowed, padding3)", "And (near, padding3)")  # A fault can add causality.
    body = EMBED + mask + ANGLES.replace("wide = Unsqueeze (angles, axis1)", "").replace("(wide)", "(angle)")
    body = body.replace("cos = Cos", "cosine = Cos").replace("sin = Sin", "sine = Sin")
    body += "".join(map(operator_layer, range(LAYERS)))
    inputs = "int64[batch, tokens] input_ids, int64[batch, total] attention_mask, int64[batch, tokens] position_ids"
    outputs = f"float[batch, tokens, 32] x{LAYERS}"
    model = parsed("operators", body, inputs, outputs, 23, drawn_weights(KEY_HEADS))
    feeds = decoder_feeds(5, 0, [])
    return model, [feeds]


def contrib() -> tuple[ir.Model, list[Feeds]]:
    """MultiHeadAttention and GroupQueryAttention of com.microsoft; inputs of 5 tokens."""
    body = EMBED + "".join(map(contrib_layer, range(LAYERS)))
    weights = drawn_weights(HEADS)
    weights["lengths_less_one"] = np.array([4, 4], np.int32)
    weights["longest"] = np.array(5, np.int32)
    inputs, outputs = "int64[2, 5] input_ids", f"float[2, 5, 32] x{LAYERS}"
    model = parsed("contrib", body, inputs, outputs, 18, weights)
    return model, [{"input_ids": np.random.default_rng(2).integers(0, 32, (2, 5))}]


MODELS = {"decoder": decoder, "biased": biased, "operators": operators, "contrib": contrib}
