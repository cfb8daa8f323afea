"""Which folders this user can trust: the rules of sshd's StrictModes, as in `safe_files.h`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def problem(folder: Path) -> str:
    """Why another user could replace `folder` or a folder above it; "" if none can.

    Each must belong to this user or to the system (the owner of /), and be writable by its owner
    alone, or be sticky as /tmp is. Folders that do not exist yet are left out.
    """
    for path in dict.fromkeys((folder.absolute(), Path(os.path.realpath(folder)))):
        for part in (*reversed(path.parents), path):
            if found := _problem_of(part):
                return found
    return ""


def is_of_user(folder: Path) -> bool:
    """Whether it is a folder of this user, and no link to one."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _problem_of(part: Path) -> str:
    try:
        info = part.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{part}: {error.strerror}"
    trusted = (0, os.geteuid(), os.stat("/").st_uid)
    if info.st_uid not in trusted:
        return f"{part} belongs to user {info.st_uid}"
    if stat.S_ISLNK(info.st_mode):
        return ""
    if info.st_mode & _OTHERS_WRITE and not info.st_mode & stat.S_ISVTX:
        return f"{part} is writable by other users"
    return ""
