"""What the analysis of code says of it."""

from __future__ import annotations

import pytest

from reft._continuation.bytecode import reads_in


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(m): return m.eval(), m.modules(), vars(m), m.__dict__", {"vars"}),
        ("def f(): return globals()['x']", {"globals"}),
        ("import sys\ndef f(): return sys.modules['__main__']", {"sys", "sys.modules"}),
        ("def f():\n    import __main__\n    return __main__.x", {"import __main__"}),
        ("def f(g): return g.__globals__['x']", {".__globals__"}),
        ("def f(): return [hash(word) for word in words]", {"hash", "words"}),
        ("class A:\n    def __hash__(self): return hash(self.a)", {"__name__"}),
        ("class A:\n    def bucket(self): return hash(self.a)", {"__name__", "hash"}),
        ("def f(o): return o.hash, o.hash()", set()),
    ],
)
def test_names_that_code_reads(source: str, expected: set[str]) -> None:
    assert reads_in(compile(source, "<test>", "exec")) == expected
