"""An archive of functions compiled for an H200, so that a fresh clone compiles only changed ones.

    python tests/support/compiled_archive.py

runs the tests that compile for an H200, and packs the functions that these tests used.
"""

import argparse
import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "compiled"
ARCHIVE = ROOT / "tests" / "inspect" / "compiled.tar.xz"
COMMAND = "python tests/support/compiled_archive.py"


def unpack() -> None:
    """Write the archive's files to `FOLDER`, each of them atomically. Files that exist stay."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            path, file = FOLDER / member.name, archive.extractfile(member)
            if file and not path.exists():
                part = path.with_suffix(f".{os.getpid()}")
                part.write_bytes(file.read())
                os.utime(part, (0, 0))  # not used yet
                part.replace(path)


def pack(since: float) -> None:
    """Write an archive of the files of `FOLDER` that were used after the time `since`."""
    paths = sorted(path for path in FOLDER.glob("*.json") if path.stat().st_mtime >= since)
    if not paths:
        sys.exit("the tests used no compiled function; is jax's CUDA plugin installed?")
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in paths:
            member = tarfile.TarInfo(path.name)
            member.size = path.stat().st_size
            archive.addfile(member, io.BytesIO(path.read_bytes()))
    print(f"{ARCHIVE.relative_to(ROOT)}: {len(paths)} functions, {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    start = time.time()
    tests = [sys.executable, "-m", "pytest", "--dist=loadscope", "-m", "h200", "tests/inspect"]
    subprocess.run(tests, cwd=ROOT, check=True)
    pack(start)
