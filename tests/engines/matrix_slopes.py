"""The real child of the matrix, but every file of ALiBi it exports has slopes that are twice too steep."""

from __future__ import annotations

import functools
from typing import Any

import onnx
from mutants import initializer

from posexport import matrix_worker
from posexport.runtimes.worker import serve


def export(**request: Any) -> dict[str, Any]:
    done = SOUND(**request)
    model = onnx.load(request["path"])
    initializer("encoding.slopes", lambda values: values * 2)(model)
    onnx.save(model, request["path"])
    return done


SOUND = functools.partial(matrix_worker.ACTIONS["export"])
matrix_worker.ACTIONS["export"] = export

if __name__ == "__main__":
    serve(matrix_worker.answer)
