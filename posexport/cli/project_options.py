"""The option that names a project's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

project_option: Callable[..., Any] = click.option(
    "--project", "project_file", metavar="FILE", help="the project's file  [default: the nearest, here or above]"
)
