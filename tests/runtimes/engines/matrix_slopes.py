"""The real child of the matrix, except that the ALiBi files it exports have slopes that are twice too steep."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import onnx
from mutants import initializer

from posexport.processes import serve
from posexport.verify.matrix import worker


def export(**request: Any) -> dict[str, Any]:
    done = SOUND(**request)
    model = onnx.load(request["path"])
    initializer("encoding.slopes", lambda values: values * 2)(model)
    onnx.save(model, request["path"])
    Path(f"{request['path']}.json").unlink()  # its sha256 would show that the file was changed
    return done


SOUND = functools.partial(worker.ACTIONS["export"])
worker.ACTIONS["export"] = export

if __name__ == "__main__":
    serve(worker.answer)
