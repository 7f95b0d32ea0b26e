"""The model of a checkpoint as a reference: what it can't compute is said in a sentence."""

from __future__ import annotations

import pytest
import torch

from posexport.errors import RequestError
from posexport.models.whole import Signature
from posexport.runtimes.checkpoint_module import CheckpointModule


def module() -> CheckpointModule:
    return CheckpointModule(
        reference="model",
        module=torch.nn.Embedding(3, 2),
        name="T5ForConditionalGeneration",
        signature=Signature(inputs={}, outputs={}, example={}, shapes={}),
        constants=frozenset(),
    )


def test_inputs_that_the_model_fails_on() -> None:
    """A table of distances that config.json makes too short ends a run with an IndexError of torch."""
    own = module()
    with pytest.raises(RequestError) as caught, own.running("running"):
        own.module(torch.tensor([3]))
    assert str(caught.value) == (
        "running T5ForConditionalGeneration of transformers fails (IndexError: index out of range in self)."
    )


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), RequestError("no.")]
)
def test_a_shortage_of_memory_stays_one(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, module().running("running"):
        raise error
    assert caught.value is error
