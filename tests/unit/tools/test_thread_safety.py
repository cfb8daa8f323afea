"""The step thread-safety fails on a lock that was dropped and on an annotation that was removed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tools.devtools import lint

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
SOURCE = """
#include "intercept/base/mutex.h"

class Counter {
 public:
  void add() EXCLUDES(mutex_) {
    const reft::MutexLock lock(mutex_);
    addLocked();
  }
  int total() EXCLUDES(mutex_) {
    const reft::MutexLock lock(mutex_);
    return total_;
  }

 private:
  void addLocked() REQUIRES(mutex_) { ++total_; }

  reft::Mutex mutex_;
  int total_ GUARDED_BY(mutex_) = 0;
};

int main() {
  Counter counter;
  counter.add();
  return counter.total();
}
"""


def unsafe(folder: Path, source: str) -> list[str]:
    """What the step finds in a build tree with this source."""
    path = folder / "counter.cc"
    path.write_text(source)
    command = f"clang++ -std=c++20 -I{ROOT} -o counter.o -c {path}"
    entries = [{"directory": str(folder), "command": command, "file": str(path)}]
    (folder / "compile_commands.json").write_text(json.dumps(entries))
    return lint.unsafe_sources(folder)


def test_a_class_that_keeps_its_rule_passes(tmp_path: Path) -> None:
    assert unsafe(tmp_path, SOURCE) == []


def test_a_dropped_lock_fails(tmp_path: Path) -> None:
    head, lock, tail = SOURCE.rpartition("    const reft::MutexLock lock(mutex_);\n")
    assert lock
    (text,) = unsafe(tmp_path, head + tail)
    assert "reading variable 'total_' requires holding mutex 'mutex_'" in text


def test_a_removed_annotation_fails(tmp_path: Path) -> None:
    assert SOURCE.count(" REQUIRES(mutex_)") == 1
    (text,) = unsafe(tmp_path, SOURCE.replace(" REQUIRES(mutex_)", ""))
    assert "writing variable 'total_' requires holding mutex 'mutex_'" in text
