"""The address of a Ray cluster: which addresses are valid, and whether something answers there.

Ray itself waits for minutes for a head that is gone, so a connection to its port is tried first.
"""

from __future__ import annotations

import os
import re
import socket

from posexport.errors import RequestError, RuntimeMissingError

CONNECT_SECONDS = 5.0
"""Seconds in which the head of a cluster must accept a connection."""

_ADDRESS = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def check_address(address: str, source: str = "--ray") -> None:
    """RequestError for text that is no address of a cluster; `source` names where it was given. Imports no Ray."""
    match = _ADDRESS.fullmatch(address)
    if address not in ("auto", "local") and not (match and 0 < int(match["port"]) < 2**16):
        raise RequestError(
            f"{source} is {address!r}: give the host and port of the cluster's head, such as head:6379, or auto or "
            "local."
        )


def check_answers(address: str) -> None:
    """RuntimeMissingError where nothing answers at an address, or `auto` finds no cluster."""
    origin = "the address given"
    if address == "auto":
        address, origin = _auto()
    match = _ADDRESS.fullmatch(address)
    if match is None:  # Ray starts this cluster, or finds it by itself
        return
    try:
        socket.create_connection((match["host"].strip("[]"), int(match["port"])), timeout=CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:  # UnicodeError for text that can't be the name of a host
        raise no_cluster(f"{address!r}, {origin}", getattr(error, "strerror", None) or str(error)) from None


def _auto() -> tuple[str, str]:
    """The address that Ray takes for `auto`, and where it comes from; `auto` again where Ray doesn't tell."""
    if given := os.environ.get("RAY_ADDRESS"):
        check_address(given, "RAY_ADDRESS")
        return given, "the address in RAY_ADDRESS"
    try:
        from ray._private.services import get_ray_address_from_environment as find
    except ImportError:  # Ray has no public function for it
        return "auto", ""
    try:
        return str(find("auto", None)), "the last one that was started on this machine"
    except ConnectionError:
        raise no_cluster("'auto'", "none runs on this machine") from None


def no_cluster(where: str, why: str) -> RuntimeMissingError:
    """The error for a cluster that does not answer."""
    return RuntimeMissingError(
        f"no Ray cluster answers at {where} ({why}): start one with 'ray start --head', give --ray the host and port "
        "of one that runs, or leave --ray out to run here."
    )
