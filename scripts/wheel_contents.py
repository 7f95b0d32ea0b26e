"""Build the wheel and compare it with the source: it must contain every module and preset, and nothing else.

If pyproject.toml does not list a subpackage, the wheel lacks it although the editable install still works.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def expected() -> set[str]:
    """The files that the wheel must contain, as paths inside it."""
    homes = {"posexport": "posexport", "models": "posexport/models", "custom_ops": "posexport/custom_ops"}
    return {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, inside in homes.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
    }


def problems(names: set[str]) -> list[str]:
    """What is wrong with a wheel that contains the files `names`; empty if nothing is."""
    held = {name for name in names if ".dist-info/" not in name}
    missing = [f"the wheel lacks {name}" for name in sorted(expected() - held)]
    return missing + [f"the wheel holds {name}, which is no part of posexport" for name in sorted(held - expected())]


def main() -> int:
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would also pack the files of an earlier build
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, str(ROOT)]
        done = subprocess.run(build, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stdout[-2000:] + done.stderr[-2000:])
            return 1
        (wheel,) = Path(folder).glob("*.whl")
        lines = problems(set(zipfile.ZipFile(wheel).namelist()))
    sys.stderr.writelines(f"Error: {line}\n" for line in lines)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
