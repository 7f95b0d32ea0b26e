"""torch.compile loads code from a folder. Another user could have created that folder first."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from posexport.errors import RequestError
from posexport.runtimes import compile_cache
from posexport.runtimes.compile_cache import VARIABLE, claim_compile_cache

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no such folder for all")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "torchinductor_me"
    monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.default_cache_dir", lambda: str(place))
    monkeypatch.setenv(VARIABLE, str(place))  # torch sets it on import
    return place


def test_the_folder_is_for_its_user_alone(folder: Path) -> None:
    claim_compile_cache()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    claim_compile_cache()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_planted_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    folder.symlink_to("theirs")
    with pytest.raises(RequestError, match=VARIABLE):
        claim_compile_cache()


def test_another_users_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    other = os.geteuid() + 1
    monkeypatch.setattr(compile_cache.os, "geteuid", lambda: other)
    with pytest.raises(RequestError, match="belongs to somebody else"):
        claim_compile_cache()


def test_a_folder_that_was_named_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(folder.with_name("mine")))
    claim_compile_cache()
    assert not folder.exists()
