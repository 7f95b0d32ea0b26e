"""ONNX Runtime in Python: decode over shared caches, bound once and written in place.

    posexport export --encoding rope --causal --kv-cache shared --form contrib --target ort -o block.onnx
    python ort_decode.py block.onnx

It needs numpy and onnxruntime (or onnxruntime-gpu) only. The caches are buffers of `room` places, or of the fixed
number of a model that was exported with --max-seq. `write_indices` says where the new tokens go, so no step copies or
grows a cache. It takes any form and any encoding of one axis with --kv-cache shared, in fp32 or fp16 (numpy has no
bf16), without --padding-mask: there is one sequence, so nothing is padded. It exits with code 3 where the --device is
missing.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before the import, which otherwise writes files and sends them

import onnxruntime as ort

NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class Decoder:
    """One sequence. Feed its tokens in any pieces: a prompt of many, then one at a time."""

    def __init__(self, model: str | Path, room: int, device: str = "cpu") -> None:
        providers = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider"]}[device]
        try:
            self.session = ort.InferenceSession(str(model), providers=providers)
        except Exception as error:  # ONNX Runtime's errors have no common base class of their own
            raise ValueError(f"{model} can't be opened: {' '.join(str(error).split())}") from None
        if self.session.get_providers()[0] != providers[0]:
            raise RuntimeError(f"{providers[0]} can't be loaded here")
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        if "write_indices" not in self.inputs:
            raise ValueError(f"{model} has no shared caches: export it with --causal --kv-cache shared")
        if "attention_mask" in self.inputs:
            raise ValueError(f"{model} takes an attention_mask, which one sequence doesn't need: drop --padding-mask")
        if self.inputs["hidden_states"].type not in NUMPY:
            raise ValueError(f"{model} takes {self.inputs['hidden_states'].type}: export it with --dtype fp32 or fp16")
        self.device, self.room, self.length = device, room, 0
        self.dtype = NUMPY[self.inputs["hidden_states"].type]
        self.binding = self.session.io_binding()
        self.caches = []
        for name, value in self.inputs.items():
            if name.startswith("past_"):  # [batch, heads, places, head_dim]
                _, heads, places, width = value.shape
                if isinstance(places, int):
                    self.room = places  # the model has a fixed number
                cache = ort.OrtValue.ortvalue_from_numpy(np.zeros([1, heads, self.room, width], self.dtype), device, 0)
                self.binding.bind_ortvalue_input(name, cache)
                self.binding.bind_ortvalue_output(name.replace("past_", "present_", 1), cache)
                self.caches.append(cache)

    def feed(self, states: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The block's output [tokens, hidden] for the next tokens' states [tokens, hidden]."""
        count = len(states)
        if self.length + count > self.room:
            raise ValueError(f"{self.length} + {count} tokens don't fit into {self.room} places")
        places = np.arange(self.length, self.length + count, dtype=np.int64)
        # A file with consecutive positions takes the first of them.
        first_alone = "position_ids" in self.inputs and self.inputs["position_ids"].shape[1] == 1
        arrays = {
            "hidden_states": states[None].astype(self.dtype),
            "position_ids": places[None, :1] if first_alone else places[None],
            "write_indices": places[:1],
        }
        for name, array in arrays.items():
            if name in self.inputs:  # the encoding `none` takes no positions
                self.binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array, self.device, 0))
        self.binding.bind_output("output", "cpu")  # a new one for each piece; bound after the caches
        self.session.run_with_iobinding(self.binding)
        self.length += count
        output: np.ndarray[Any, Any] = self.binding.get_outputs()[len(self.caches)].numpy()[0]
        return output


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode with caches that are written in place.")
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=16, help="tokens that come at once")
    parser.add_argument("--steps", type=int, default=8, help="tokens that follow, one by one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    total = options.prompt + options.steps
    try:
        if not Path(options.model).is_file():
            raise ValueError(f"{options.model} does not exist: make it with posexport export")
        if options.prompt < 1 or options.steps < 0:
            raise ValueError("give a --prompt of at least 1 token and no negative --steps")
        decoder = Decoder(options.model, total, options.device)
        hidden = decoder.inputs["hidden_states"].shape[-1]
        states = np.random.default_rng(0).standard_normal((total, hidden))  # a model would have its embeddings here
        decoder.feed(states[: options.prompt])
        for place in range(options.prompt, total):
            output = decoder.feed(states[place : place + 1])
            print(f"token {place}: output {output.shape} of norm {np.linalg.norm(output.astype(np.float64)):.6f}")
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as reason:
        print(f"not run: {reason}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
