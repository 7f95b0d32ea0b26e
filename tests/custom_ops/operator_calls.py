"""Calls of every operator: arguments with tensors of batch B, queries S and keys T, and the dimensions that vary."""

from __future__ import annotations

from typing import Any

import torch

from posexport import custom_ops

B, S, T, N, H = 2, 5, 8, 4, 6

DYNAMIC = {name: torch.export.Dim(name) for name in ("batch", "seq", "total", "keys", "length")}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


# operator: (arguments with tensors of batch B, queries S and keys T; which dimensions of each input vary)
Q, K, ONE = {0: "batch", 1: "seq"}, {0: "batch", 1: "total"}, {0: "batch"}
MASKS: list[tuple[bool, int]] = [(False, 0), (True, 0), (False, 2), (True, 3)]
TOKENS = [normal(B, S, N * H), normal(B, S, N * H) / H, normal(B, S, N * 3)]
STATE = normal(B, N, H, 3)
DECAYS, SHARES = normal(B, S, N).abs(), normal(B, S, N).sigmoid()
CALLS: dict[str, tuple[Any, list[Any], list[dict[int, str]]]] = {
    "sinusoids": (custom_ops.sinusoids, [whole(-99, 99, B, S), torch.tensor([1.0, 0.1]), 1.5], [Q, {}]),
    "sinusoids-2-axes": (custom_ops.sinusoids, [whole(0, 99, B, S, 2), normal(2, 3), 1.0], [Q, {}]),
    "pairs": (custom_ops.pair_features, [normal(B, S, 3), normal(B, S, 3), True], [Q, Q]),
    "pairs-half": (custom_ops.pair_features, [normal(B, S, 3), normal(B, S, 3), False], [Q, Q]),
    "rotate": (custom_ops.rotate, [normal(B, S, N * H), normal(B, S, 3), normal(B, S, 3), H, True, [3]], [Q] * 3),
    "rotate-part": (custom_ops.rotate, [normal(B, S, N * H), normal(B, S, 2), normal(B, S, 2), H, True, [2]], [Q] * 3),
    "rotate-half": (custom_ops.rotate, [normal(B, S, N * H), normal(B, S, 2), normal(B, S, 2), H, False, [2]], [Q] * 3),
    "rotate-groups": (
        custom_ops.rotate,
        [normal(B, S, N * 8), normal(B, S, 4), normal(B, S, 4), 8, False, [2, 2]],
        [Q] * 3,
    ),
    "rotate-runs": (custom_ops.rotate, [normal(B, S, N * 8), *(normal(B, S, 4),) * 2, 8, False, [1, 3]], [Q] * 3),
    "rotate-own": (custom_ops.rotate, [normal(B, S, N * H), *(normal(B, S, N, 3),) * 2, H, True, [3]], [Q] * 3),
    "by-heads": (custom_ops.angles_by_heads, [normal(B, S, 6), 2], [Q]),
    "rotate-features": (custom_ops.rotate_features, [normal(B, S, N * H), *(normal(B, S, 4),) * 2, H], [Q] * 3),
    "exact": (custom_ops.exact_sinusoids, [whole(0, 2**24, B, S), whole(0, 2**50, 2, 3), 1.5], [Q, {}]),
    "exact-2-axes": (custom_ops.exact_sinusoids, [whole(0, 9, B, S, 2), whole(0, 2**48, 2, 2, 3), 1.0], [Q, {}]),
    "by-length": (custom_ops.length_frequencies, [whole(0, 9, B, S), normal(3), normal(3) + 1, 5], [Q, {}, {}]),
    "ntk": (custom_ops.ntk_frequencies, [whole(0, 99, B, S), torch.rand(3), 100.0, 4.0, 20, 6], [Q, {}]),
    "grid": (custom_ops.grid_sinusoids, [whole(0, 9, B, S, 2), normal(2, 3), [], 2], [Q, {}]),
    "grid-given": (custom_ops.grid_sinusoids, [whole(0, 9, B, S, 2), normal(2, 3), [9, 7], 0], [Q, {}]),
    "powers": (custom_ops.position_powers, [whole(0, 99, B, S), normal(3) / 100, True], [Q, {}]),
    "temperature": (custom_ops.position_temperature, [normal(B, S, N * H), whole(0, 99, B, S), 8, 0.3], [Q, Q]),
    "prefix": (custom_ops.keep_prefix, [normal(B, S, 3), normal(B, S, 3), 2], [Q, Q]),
    "alibi_bias": (custom_ops.alibi_bias, [whole(-9, 9, B, S), whole(-9, 9, B, T), torch.rand(N), None], [Q, K, {}]),
    "alibi-ahead": (
        custom_ops.alibi_bias,
        [whole(-9, 9, B, S), whole(-9, 9, B, T), torch.rand(N), torch.rand(N) + 1],
        [Q, K, {}, {}],
    ),
    "grid-bias": (custom_ops.grid_bias, [whole(0, 9, B, S, 2), whole(0, 9, B, T, 2), torch.rand(N), True], [Q, K, {}]),
    "kerple": (
        custom_ops.kerple_bias,
        [whole(0, 9, B, S), whole(0, 9, B, T), normal(N), normal(N).flip(0), True],
        [Q, K, {}, {}],
    ),
    "cosine": (
        custom_ops.cosine_bias,
        [whole(-9, 9, B, S), whole(-9, 9, B, T), torch.rand(N), normal(3), None, True],
        [Q, K, {}, {}],
    ),
    "cosine-exact": (
        custom_ops.cosine_bias,
        [whole(0, 9, B, S), whole(0, 9, B, T), torch.rand(N), None, whole(0, 2**40, 2, 3), False],
        [Q, K, {}, {}],
    ),
    "fire": (
        custom_ops.fire_bias,
        [
            *(whole(0, 9, B, S), whole(0, 9, B, T), torch.tensor(0.3), torch.tensor(0.7)),
            *(normal(8, 1), normal(8), normal(N, 8), normal(N), 5.0),
        ],
        [Q, K, *({},) * 6],
    ),
    "window": (custom_ops.window_bias, [whole(0, 3, B, S, 2), whole(0, 3, B, T, 2), normal(25, N), 3], [Q, K, {}]),
    "window-order": (custom_ops.window_order_bias, [normal(25, N), normal(B, S, N * H), 3], [{}, Q]),
    "window-table": (custom_ops.window_table, [normal(25, 2), normal(8, 2), normal(8), normal(N, 8)], [{}] * 4),
    "cosine-heads": (custom_ops.cosine_heads, [normal(B, S, N * H), normal(N, 1, 1) + 4, H], [Q, {}]),
    "offset-score": (
        custom_ops.offset_score,
        [normal(B, S, N * H), whole(0, 9, B, S), whole(0, 9, B, T), normal(6, H), 2, 3, 0.3],
        [Q, Q, K, {}],
    ),
    "offset-values": (
        custom_ops.offset_values,
        [
            *(
                normal(B, S, N * H),
                normal(B, T, 2 * H),
                normal(B, N, S, T),
                torch.ones(B, T).long().tril(2),
                None,
                None,
            ),
            *(whole(0, 9, B, S), whole(0, 9, B, T), normal(6, H), N, 2, 0.3, True, 0, 0, 0.0, 2, 3),
        ],
        [Q, K, {0: "batch", 2: "seq", 3: "total"}, K, Q, K, {}],
    ),
    "difference-bias": (
        custom_ops.difference_bias,
        [normal(1, N, 1, S + T), normal(B, S, N * H), False],
        [{3: "length"}, Q],
    ),
    "difference-score": (
        custom_ops.difference_score,
        [normal(B, S, N * H), normal(N, 5, H), whole(0, 5, 1, S + T), N, 0.3, False],
        [Q, {}, {1: "length"}],
    ),
    "difference-score-shared": (
        custom_ops.difference_score,
        [normal(B, S, N * H), normal(1, 5, H), whole(0, 5, B, S + T), N, 0.3, False],
        [Q, {}, {0: "batch", 1: "length"}],
    ),
    "difference-disentangled": (
        custom_ops.difference_disentangled_score,
        [
            *(normal(B, S, N * H), normal(B, T, N * H), whole(0, 5, 7), normal(N, 5, H), normal(N, 5, H).flip(0)),
            *(None, None, N, 0.3, False, False),
        ],
        [Q, K, {}, {}, {}],
    ),
    "difference-disentangled-of-keys": (
        custom_ops.difference_disentangled_score,
        [
            normal(B, S, N * H),
            normal(B, T, N * H),
            whole(0, 5, 7),
            normal(N, 5, H),
            None,
            None,
            None,
            N,
            0.3,
            False,
            False,
        ],
        [Q, K, {}, {}],
    ),
    "difference-disentangled-whole": (
        custom_ops.difference_disentangled_score,
        [
            *(normal(B, 1, N * H), normal(B, 1, N * H), whole(0, 5, 7), normal(N, 5, H), normal(N, 5, H).flip(0)),
            *(normal(B, N, T, H), None, N, 0.3, False, True),
        ],
        [ONE, ONE, {}, {}, {}, {0: "batch", 2: "total"}],
    ),
    "difference-disentangled-cached": (
        custom_ops.difference_disentangled_score,
        [
            *(normal(B, S, N * H), normal(B, S, N * H), whole(0, 5, 7), normal(N, 5, H), normal(N, 5, H).flip(0)),
            *(normal(B, N, T, H), None, N, 0.3, False, False),
        ],
        [Q, Q, {}, {}, {}, {0: "batch", 2: "total"}],
    ),
    "difference-disentangled-shared": (
        custom_ops.difference_disentangled_score,
        [
            *(normal(B, S, N * H), normal(B, S, N * H), whole(0, 5, 7), normal(N, 5, H), normal(N, 5, H).flip(0)),
            *(normal(B, N, T, H), torch.tensor([0, 3]), N, 0.3, False, False),
        ],
        [Q, Q, {}, {}, {}, {0: "batch", 2: "total"}, ONE],
    ),
    **{
        f"difference-disentangled-of-one-query{name}": (
            custom_ops.difference_disentangled_score,
            [
                *(normal(B, 1, N * H), normal(B, 1, N * H), rows, normal(N, 3, H), key_table),
                *(normal(B, N, T, H), indices, N, 0.3, True, False),
            ],
            [ONE, ONE, {}, {}, *([] if key_table is None else [{}]), {0: "batch", 2: "total"}, ONE],
        )
        for name, rows, key_table, indices in (
            ("", torch.tensor([0, 1, 2]), normal(N, 3, H).flip(0), None),
            ("-and-keys", torch.tensor([1, 0, 2, 1]), None, None),
            # the query's own key and distant keys share a table row, as if later keys did not matter
            ("-shared", torch.tensor([2, 0, 1, 2]), normal(N, 3, H).flip(0), torch.tensor([0, T - 1])),
            ("-and-keys-shared", torch.tensor([2, 0, 1, 2]), None, torch.tensor([0, T - 1])),
            ("-by-a-large-table", torch.tensor([2, *[0, 1] * T, 2]), None, None),
        )
    },
    "difference-relative": (
        custom_ops.difference_relative_score,
        [
            *(normal(B, S, N * H), whole(0, 9, 1, S + T), *(normal(1, 1, 4),) * 2, *(normal(1, 128, 4),) * 2),
            *(normal(N, H), normal(N * H, 8), 0.3, False),
        ],
        [Q, {1: "length"}, *[{}] * 6],
    ),
    "difference-values": (
        custom_ops.difference_values,
        [
            *(normal(B, S, N * H), normal(B, T, 2 * H), None, torch.ones(B, T).long().triu(6), None, None),
            *(normal(3, H), N, 2, 0.3, True, 0, 0, 0.0),
        ],
        [Q, K, K, {}],
    ),
    "difference-values-of-a-large-table": (
        custom_ops.difference_values,
        [
            *(normal(B, S, N * H), normal(B, 2, T, H), None, None, normal(N), torch.tensor([0, 3])),
            *(normal(T + 4, H), N, 2, 0.3, True, 0, 0, 0.0),
        ],
        [Q, {0: "batch", 2: "total"}, {}, {0: "batch"}, {}],
    ),
    "disentangled": (
        custom_ops.disentangled_score,
        [
            *(normal(B, S, N * H), normal(B, T, N * H), whole(0, 9, B, S), whole(0, 9, B, T), whole(0, 6, 9)),
            *(normal(N * H, 6), normal(N * H, 6).flip(0), None, None, N, 0.3, False),
        ],
        [Q, K, Q, K, {}, {}, {}],
    ),
    "disentangled-whole": (
        custom_ops.disentangled_score,
        [
            *(normal(B, S, N * H), normal(B, T, N * H), whole(0, 9, B, S), whole(0, 9, B, T), whole(0, 6, 9)),
            *(normal(N * H, 6), normal(N * H, 6).flip(0), None, None, N, 0.3, True),
        ],
        [Q, K, Q, K, {}, {}, {}],
    ),
    "disentangled-shared": (
        custom_ops.disentangled_score,
        [
            *(normal(B, S, N * H), normal(B, S, N * H), whole(0, 9, B, S), whole(0, 9, B, T), whole(0, 6, 9)),
            *(normal(N * H, 6), normal(N * H, 6).flip(0), normal(B, N, T, H), torch.tensor([0, 3]), N, 0.3, False),
        ],
        [Q, Q, Q, K, {}, {}, {}, {0: "batch", 2: "total"}, {0: "batch"}],
    ),
    **{
        f"disentangled-of-one-query{name}": (
            custom_ops.disentangled_score,
            [
                *(normal(B, 1, N * H), normal(B, 1, N * H), *at, torch.tensor([3, 3, 2, 1, 0, 0, 0]), None),
                *(normal(N * H, 4), normal(B, N, T, H), indices, N, 0.3, False),
            ],
            [ONE, ONE, ONE, {0: "batch", 1: "keys"}, {}, {}, {0: "batch", 2: "total"}, ONE],
        )
        for name, at, indices in (
            ("", (torch.tensor([[T], [T + 4]]), torch.arange(T + 1).expand(B, -1)), None),
            (
                "-shared",
                (torch.tensor([[T - 1], [T - 3]]), torch.arange(T).expand(B, -1)),
                torch.tensor([T - 1, T - 3]),
            ),
            ("-whose-rows-are-alike", (whole(0, 1, B, 1), whole(0, 1, B, T)), torch.tensor([0, T - 1])),
            ("-whose-rows-are-any", (whole(0, 5, B, 1), whole(0, 5, B, T)), torch.tensor([3, T - 1])),
        )
    },
    "contextual": (
        custom_ops.contextual_score,
        [normal(B, S, N * H), normal(B, T, 2 * H), None, None, normal(H, 4), N, 2, 0.3, True, 0, 0],
        [Q, K, {}],
    ),
    "cached-keys": (
        custom_ops.cached_keys,
        [normal(B, 2, T, H), normal(B, S, 2 * H), None, 2],
        [{0: "batch", 2: "total"}, Q],
    ),
    "relative_bias": (
        custom_ops.relative_bias,
        [whole(-9, 9, B, S), whole(-9, 9, B, T), normal(6, N), whole(0, 6, 11), 5],
        [Q, K, {}, {}],
    ),
    "relative_score": (
        custom_ops.relative_score,
        [
            *(normal(B, S, N * H), whole(-9, 9, B, S), whole(-9, 9, B, T), normal(N, H), normal(N * H, 8)),
            *(normal(4), None, 0.3),
        ],
        [Q, Q, K, {}, {}, {}],
    ),
    "relative_score-exact": (
        custom_ops.relative_score,
        [
            *(normal(B, S, N * H), whole(0, 9, B, S), whole(0, 9, B, T), normal(N, H), normal(N * H, 8)),
            *(None, whole(0, 2**40, 2, 4), 0.3),
        ],
        [Q, Q, K, {}, {}, {}],
    ),
    "relative_table_score": (
        custom_ops.relative_table_score,
        [
            normal(B, S, N * H),
            whole(-9, 9, B, S),
            whole(-9, 9, B, T),
            normal(N, H),
            normal(N * H, 8),
            normal(9, 8),
            0.3,
        ],
        [Q, Q, K, {}, {}, {}],
    ),
}
CALLS |= {
    f"attend-{'bias' if bias else 'plain'}-{causal}-{window}-{kv}": (
        custom_ops.attend,
        [
            *(normal(B, S, N * H), normal(B, T, kv * H), normal(B, T, kv * H)),
            normal(B, N, S, T) if bias else None,
            *(None, None, N, kv, 0.3, causal, window, 0, 0.0),
        ],
        [Q, K, K, {0: "batch", 2: "seq", 3: "total"}],
    )
    for causal, window in MASKS
    for bias, kv in ((True, 2), (False, N))
}
SUM = {0: "batch", 1: "keys"}  # the number of cached and new keys
PAST, FIRST = {0: "batch", 2: "total"}, {0: "batch"}
NEW = [normal(B, S, N * H), normal(B, S, 2 * H), normal(B, S, 2 * H)]
OLD = [normal(B, T, 2 * H), normal(B, T, 2 * H).flip(0)]
BUFFERS = [normal(B, 2, T, H), normal(B, 2, T, H).flip(0)]
PADDED = torch.tensor([[0] * 3 + [1] * (T + S - 3), [0] * (T + S)])
"""A row with padding on the left, and a row that is only padding."""
CALLS |= {
    f"masked-{causal}-{window}": (
        custom_ops.attend,
        [NEW[0], *OLD, None, PADDED[:, :T], None, N, 2, 0.3, causal, window, 0, 0.0],
        [Q, K, K, K],
    )
    for causal, window in MASKS
}
CALLS |= {
    "capped-with-sinks": (
        custom_ops.attend,
        [NEW[0], *OLD, normal(B, N, S, T), PADDED[:, :T], normal(N), N, 2, 1.0, True, 0, 0, 2.0],
        [Q, K, K, {0: "batch", 2: "seq", 3: "total"}, K, {}],
    ),
    "cached": (
        custom_ops.attend_cached,
        [*NEW, *BUFFERS, normal(B, N, S, T + S), PADDED, None, N, 2, 0.3, True, 0, 0, 0.0],
        [Q, Q, Q, PAST, PAST, {0: "batch", 2: "seq", 3: "keys"}, SUM],
    ),
    "cached-window": (
        custom_ops.attend_cached,
        [*NEW, *BUFFERS, None, None, normal(N), N, 2, 0.3, False, 4, 0, 3.0],
        [Q, Q, Q, PAST, PAST, {}],
    ),
    "shared": (
        custom_ops.attend_shared,
        [*NEW, *BUFFERS, torch.tensor([3, 1]), None, PADDED[:, :T], None, N, 2, 0.3, False, 0, 0, 0.0],
        [Q, Q, Q, PAST, PAST, FIRST, K],
    ),
    "shared-window": (
        custom_ops.attend_shared,
        [*NEW, *BUFFERS, torch.tensor([0, 2]), normal(B, N, S, T), None, normal(N), N, 2, 0.3, True, 3, 0, 0.0],
        [Q, Q, Q, PAST, PAST, FIRST, {0: "batch", 2: "seq", 3: "total"}, {}],
    ),
    "linear-gated-delta": (custom_ops.linear_attention, [*TOKENS, STATE, -DECAYS, SHARES], [Q, Q, Q, ONE, Q, Q]),
    "linear-delta": (custom_ops.linear_attention, [*TOKENS, STATE, None, SHARES], [Q, Q, Q, ONE, Q]),
    "linear-gated": (
        custom_ops.linear_attention,
        [*TOKENS, STATE, -normal(B, S, N * H).abs(), None],
        [Q, Q, Q, ONE, Q],
    ),
    "linear": (custom_ops.linear_attention, [*TOKENS, STATE, None, None], [Q, Q, Q, ONE]),
    "head_norm": (custom_ops.head_norm, [normal(B, S, N * H), normal(H), H, 1e-3], [Q, {}]),
}
PLACES = whole(0, 99, B, S)
CALLS |= {
    "places": (custom_ops.key_positions, [PLACES, BUFFERS[0], None, None], [Q, PAST]),
    "places-masked": (custom_ops.key_positions, [PLACES, BUFFERS[0], None, PADDED], [Q, PAST, SUM]),
    "places-shared": (custom_ops.key_positions, [PLACES, BUFFERS[0], torch.tensor([3, 1]), None], [Q, PAST, FIRST]),
    "places-shared-masked": (
        custom_ops.key_positions,
        [PLACES, BUFFERS[0], torch.tensor([3, 1]), PADDED[:, :T]],
        [Q, PAST, FIRST, K],
    ),
}
