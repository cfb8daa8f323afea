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


def make_private(folder: Path) -> None:
    """Makes a directory for this user alone, and in the same way each missing one above it.

    `Path.mkdir` gives missing parents the mode of the umask: with 002, the user's group could
    write there, and `problem` would refuse them. Other processes may make the same ones meanwhile.

    Raises:
        OSError: one of them cannot be made, or is no directory.
    """
    for part in (*reversed(folder.parents), folder):
        try:
            part.mkdir(mode=0o700)
        except OSError:  # of one that exists, too, on a file system that is read-only
            if not os.path.isdir(part):
                raise


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
