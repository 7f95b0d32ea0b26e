"""The address of a Ray cluster: what may be given, and whether anything answers there.

Ray itself waits for minutes for a head that is gone, so whether its port is open is asked first.
"""

from __future__ import annotations

import os
import re
import socket

from posexport.errors import RequestError, RuntimeMissingError

ANSWER = 5.0
"""Seconds in which the head of a cluster must take a connection."""

_ADDRESS = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def check_address(address: str, said: str = "--ray") -> None:
    """RequestError for what can't be the address of a cluster; `said` names where it was given. JobResources no Ray."""
    found = _ADDRESS.fullmatch(address)
    if address not in ("auto", "local") and not (found and 0 < int(found["port"]) < 2**16):
        raise RequestError(
            f"{said} is {address!r}: give the host and port of the cluster's head, such as head:6379, or auto or local."
        )


def check_answers(address: str) -> None:
    """RuntimeMissingError where nothing answers at an address, or `auto` finds no cluster."""
    where = "the address given"
    if address == "auto":
        address, where = _auto()
    found = _ADDRESS.fullmatch(address)
    if found is None:  # one that Ray starts, or that it finds by itself
        return
    try:
        socket.create_connection((found["host"].strip("[]"), int(found["port"])), timeout=ANSWER).close()
    except (OSError, UnicodeError) as error:  # the latter for what can't be a host's name
        raise silent(f"{address!r}, {where}", getattr(error, "strerror", None) or str(error)) from None


def _auto() -> tuple[str, str]:
    """The address that Ray takes for `auto`, and what it is; `auto` again where Ray doesn't tell."""
    if given := os.environ.get("RAY_ADDRESS"):
        check_address(given, "RAY_ADDRESS")
        return given, "the address in RAY_ADDRESS"
    try:
        from ray._private.services import get_ray_address_from_environment as find
    except ImportError:  # no public function of Ray's says it
        return "auto", ""
    try:
        return str(find("auto", None)), "the last one that was started on this machine"
    except ConnectionError:
        raise silent("'auto'", "none runs on this machine") from None


def silent(where: str, why: str) -> RuntimeMissingError:
    """The error for a cluster that can't be had."""
    return RuntimeMissingError(
        f"no Ray cluster answers at {where} ({why}): start one with 'ray start --head', give --ray the host and port "
        "of one that runs, or leave --ray out to run here."
    )
