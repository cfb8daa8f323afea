"""Which modules are the script's own."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reft._state import own


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]
    own._projects_in.cache_clear()


def install(folder: Path, name: str, source: object) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("from . import part\n")
    (folder / name / "part.py").write_text("seen = 0\n")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"{name}/__init__.py,sha256=x,20\n{name}/part.py,,\n{name}-1.0.dist-info/RECORD,,\n")
    if source is not None:
        text = source if isinstance(source, str) else json.dumps(source)
        (info / "direct_url.json").write_text(text)
    importlib.import_module(name)


def test_a_package_that_was_installed_from_a_folder_is_the_scripts(packages: Path, tmp_path: Path) -> None:
    install(packages, "project", {"url": f"file://{tmp_path}", "dir_info": {}})
    assert own.is_own("project") and own.is_own("project.part")


@pytest.mark.parametrize(
    "source",
    [
        None,  # from an index
        {"url": "file:///croot/work/that/is/gone", "dir_info": {}},  # by conda
        {"url": "file:///tmp/a-1.0-py3-none-any.whl", "archive_info": {}},
        {"url": "https://example.com/a.git", "vcs_info": {}},
        "[]",
        "{",
        {"url": 1, "dir_info": {}},
    ],
)
def test_other_packages_are_not(packages: Path, source: object) -> None:
    install(packages, "foreign", source)
    assert not own.is_own("foreign") and not own.is_own("foreign.part")


def test_a_folder_with_a_name_like_it_is_none_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-site-packages-tools"
    folder.mkdir()
    (folder / "tool_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    importlib.import_module("tool_of_mine")
    assert own.is_own("tool_of_mine") and not own.is_own("json.decoder") and not own.is_own("pytest")
    del sys.modules["tool_of_mine"]
