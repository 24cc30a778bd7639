"""What commands print, and the files that they write: refused before the work, whole or not there at all."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def tell(text: str) -> None:
    """Print ``text``. That its reader has gone away (``| head``) is no error, and changes no exit status."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at its end goes there


def unwritable(path: Path, folders: bool = False) -> str | None:
    """Return why ``path`` cannot become a file, or None. It tries, and leaves nothing but ``folders``, if asked for.

    A full disk is noticed, one that has little room left is not.
    """
    if path.is_dir():
        return "it is a folder"
    try:
        if folders:
            path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent, buffering=0) as file:
            file.write(bytes(4096))  # a full disk still has names to give
            return None
    except OSError as e:
        return e.strerror or str(e)


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``; an error leaves what was there before, and no draft."""
    draft = path.with_name(path.name + ".part")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
