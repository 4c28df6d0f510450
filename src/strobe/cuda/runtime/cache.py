"""Files that run as machine code: where they are kept, who could have written them, and whether they are intact.

A file is named `<stem>-<hash of its content><suffix>`, so that one file says by itself that it is damaged or foreign. It
is published with an atomic rename. Nothing is locked: processes that share a disk cannot wait for one another. A file
that others could have written is never run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# A pipe in place of a file must not block. Windows has none of these flags.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


# ---- directories -----------------------------------------------------------------------------------------------------
def directory(*parts: str) -> Path | None:
    """The user's cache, or a directory inside it, made if need be. None if it cannot be made or others can write to
    it."""
    try:
        path = _root()
        _make_private(path, parents=True)
        for part in parts:
            path = path / part
            _make_private(path)
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return None
    return path


def _root() -> Path:
    if explicit := os.environ.get("STROBE_CACHE_DIR"):
        return Path(explicit).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "strobe"
    return Path.home() / ".cache" / "strobe"


def _make_private(path: Path, parents: bool = False) -> None:
    """Raises OSError if this is, or leads to, a directory that others can write to."""
    path.mkdir(mode=0o700, parents=parents, exist_ok=True)
    if (reason := _others_could_write(path.stat())) is not None:
        message = f"strobe ignores the cache directory {path}: {reason}"
        _warn_once(message)
        raise PermissionError(message)


def _others_could_write(status: os.stat_result) -> str | None:
    if not hasattr(os, "getuid"):
        return None
    if status.st_uid != os.getuid():
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & _OTHERS_WRITE:
        return "others may write to it; set STROBE_CACHE_DIR to a directory of your own, such as one inside it"
    return None


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


# ---- files -----------------------------------------------------------------------------------------------------------
def publish(place: Path, stem: str, suffix: str, content: bytes, *, mode: int = 0o600) -> Path:
    """Write a file that `intact` accepts, and return its path."""
    return write(place / f"{stem}-{_digest(content)}{suffix}", content, mode=mode)


def intact(place: Path, stem: str, suffix: str, *, private: bool = True) -> Iterator[tuple[Path, bytes]]:
    """The files in `place` that were published under names that begin with `stem`, if their content is what their name
    says. `private`: and if nobody else could have written them."""
    for path in named(place, stem, suffix):
        content = _read(path, private)
        if content is not None and path.name.endswith(f"-{_digest(content)}{suffix}"):
            yield path, content


def named(place: Path, stem: str, suffix: str) -> list[Path]:
    """The files in `place` that have such a name, intact or not."""
    try:
        names = os.listdir(place)
    except OSError:
        return []
    return [place / name for name in sorted(names) if name.startswith(f"{stem}-") and name.endswith(suffix)]


def write(path: Path, content: bytes, *, mode: int = 0o600) -> Path:
    """Write a file so that no reader ever sees a part of it. A directory of that name is moved aside."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        try:
            os.replace(temporary, path)
        except IsADirectoryError:
            os.rename(path, tempfile.mkdtemp(dir=path.parent, prefix=".displaced-"))
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _read(path: Path, private: bool) -> bytes | None:
    """None if it cannot be read, is no regular file, or, where it has to be private, is a link or can be written by
    others."""
    try:
        handle = os.open(path, _READ | (_NO_LINK if private else 0))
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or (private and _others_could_write(status) is not None):
            return None
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        return None
    finally:
        os.close(handle)
