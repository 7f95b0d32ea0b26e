"""The size of the images that a model reads: from its configuration, or from the preprocessor's file beside it.

preprocessor_config.json     {"size": {"height": 384, "width": 384}}, {"size": {"shortest_edge": 224}}, {"size": 224}
                             {"crop_size": ...} in the same forms, if the preprocessor crops after it has resized
                             {"size": 800, "max_size": 1333}: the shorter side and the maximum of the longer side
processor_config.json        the same in "image_processor"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posexport.errors import RequestError
from posexport.files import is_there
from posexport.jsondata import is_whole, read_json

GUESSED = 224
"""The height and width in a file if nothing says them."""

_MOST = 2**14

Size = tuple[int, int]
"""Height and width."""


def image_size(config: Any, folder: Path | None) -> Size | None:
    """The size by a configuration of transformers, or by the preprocessor in the checkpoint's folder; None where
    neither says one, as where images are scaled to a shorter and a longer side."""
    config = of_pictures(config)
    found = _pair(getattr(config, "image_size", None) or getattr(config, "crop_size", None))
    if found is not None:
        return found
    data = {} if folder is None else preprocessor(folder)
    data = data["image_processor"] if isinstance(data.get("image_processor"), dict) else data
    if data.get("crop_size") is not None and data.get("do_center_crop", True):
        return _pair(data["crop_size"])
    if data.get("size") is None:  # a head on a backbone, such as VitPose
        return _pair(getattr(getattr(config, "backbone_config", None), "image_size", None))
    return None if is_whole(data.get("max_size")) else _pair(data.get("size"))  # max_size limits the longer side


def preprocessor(folder: Path) -> dict[str, Any]:
    """The object in the file of a checkpoint's preprocessor. Empty if there is none."""
    return _object(folder / "preprocessor_config.json") or _object(folder / "processor_config.json")


def of_pictures(config: Any) -> Any:
    """The part of a configuration that is that of the encoder of images."""
    encoder = getattr(config, "encoder", None)
    part = getattr(config, "vision_config", None) or getattr(config, "image_config", None)
    return part or (encoder if hasattr(encoder, "to_dict") else config)


def _object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Empty if the file is missing, unreadable or not an object."""
    try:
        data = read_json(path) if is_there(path) else None
    except (OSError, ValueError, RequestError):
        data = None
    return data if isinstance(data, dict) else {}


def _pair(size: object) -> Size | None:
    if isinstance(size, dict):
        if {"height", "width"} <= size.keys():
            size = [size["height"], size["width"]]
        else:
            size = size.get("shortest_edge") if size.get("longest_edge") is None else None
    sides: list[Any] = list(size) if isinstance(size, list | tuple) else [size, size]
    if len(sides) != 2 or not all(is_whole(side) and 0 < side <= _MOST for side in sides):
        return None
    return sides[0], sides[1]
