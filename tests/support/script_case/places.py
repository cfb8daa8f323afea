"""A piece of state in one place, captured and put back in forks of one process: hundreds of pairs
of kind and place in a minute, where a job for each would take hours.

A short script runs three times: undisturbed; captured at each program point up to one, where it
ends; and again from its top, where the place is put back at the first program point.
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass

from tests.support import captured
from tests.support.script_case import assembly, parts
from tests.support.script_case.holders import FUNCTIONS, INLINE, held

USES = ["batch", "batch", "after", "late", "created"]
_SETUP = """\
§step = 0
§core = Core()
§model = §core
§optimizer = torch.optim.SGD(§core.parameters(), lr=0.1)
§scheduler = torch.optim.lr_scheduler.StepLR(§optimizer, 3)
§data = types.SimpleNamespace()
§loader = types.SimpleNamespace()
"""
_CORE = """
random.seed(5), np.random.seed(5), torch.manual_seed(5)
class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
    def forward(self, x):
        return self.first(x)
"""
_STYLES = {
    "main": """
def main():
    SETUP
    for e in range(2):
        for j in range(5):
            STEP
    FINAL
main()
""",
    "module": """
SETUP
for e in range(2):
    for j in range(5):
        STEP
FINAL
""",
    "trainer": """
class Trainer:
    def __init__(self):
        SETUP
    def turn(self):
        STEP
    def fit(self):
        for j in range(10):
            self.turn()
        FINAL
Trainer().fit()
""",
}


@dataclass(frozen=True)
class Place:
    """A kind of state in a holder, when it changes, the style of the loop, and the program point
    that is put back."""

    kind: str
    holder: str
    use: str
    style: str
    point: int


def drawn(seed: int) -> list[Place]:
    """Each kind in a local variable, in an attribute or container, and in a function."""
    rng = random.Random(seed)
    found = []
    for kind in assembly.KINDS:
        if kind in ("scheduler_alone", *assembly.KNOWN_GAPS):
            continue  # a scheduler is restored by the session
        # What a scheduler holds is restored by the session, not here.
        inline = [name for name in INLINE if name not in ("on_scheduler", *assembly.KNOWN_GAPS)]
        for holder in ("local", rng.choice(inline), rng.choice(list(FUNCTIONS))):
            use, style = rng.choice(USES), rng.choice(list(_STYLES))
            found.append(Place(kind, holder, use, style, rng.choice([2, 3, 6, 8])))
    return found


def source(place: Place) -> str:
    """The script. It calls point() at each program point and trace() with what it knows."""
    state = held(0, place.kind, assembly.KINDS[place.kind], place.holder)
    lines = assembly.stepped(state.lines)
    setup, step = _SETUP, "§step += 1\nnoise = 0.0\n"
    before = state.before or "pass"
    if place.use == "late":
        lines = "if §step > 4:\n" + textwrap.indent(lines, "    ")
    if place.use == "created":
        step += "if §step == 3:\n" + textwrap.indent(before, "    ") + "\n"
        lines = "if §step >= 3:\n" + textwrap.indent(lines, "    ")
    else:
        setup += before
    if place.use == "after":
        step += f"point()\n{lines}\ntrace(§step, noise)"
    else:
        step += f"{lines}\npoint()\ntrace(§step, noise)"
    rest = "random.random(), float(torch.rand(1)), np.random.rand()"
    final = f"noise = 0.0\n{assembly.stepped(state.lines)}\ntrace('end', noise, flat({state.dump}), {rest})"
    owner = "self." if place.style == "trainer" else ""
    body = {name: text.replace("§", owner) for name, text in (("SETUP", setup), ("STEP", step), ("FINAL", final))}
    head = parts.IMPORTS + parts.DIGEST + _CORE
    return "\n".join([head, state.top, assembly.placed(_STYLES[place.style], **body)])


def judge(place: Place) -> tuple[str, str]:
    """The verdict, as of `trial.CLASSES`, and what there is to say of it."""
    script = source(place)
    plain = captured.child(script, 0, b"")
    if "error" in plain or not plain["lines"] or plain["lines"][-1][0] != "end":
        return "unusable", str(plain.get("error"))
    seen = captured.child(script, place.point, b"", at_each=True)
    if "place" not in seen:
        return "CRASHED", f"capture: {seen.get('error')}"
    named = [f"{where} ({name}): {why}" for where, name, why in seen["uncaptured"]]
    restored = captured.child(script, 0, seen["place"])
    named += [f"{where} ({name}): {why}" for where, name, why in restored["problems"]]
    if "refused" in restored or not seen["exact"]:
        return "named", f"refused: {restored.get('refused', named)}"
    if "error" in restored:
        return "named" if named else "CRASHED", f"{restored['error']}; {named}"
    expected = plain["lines"][place.point - 1 :]
    if restored["lines"] == expected:
        return "unclaimed" if named else "exact", "; ".join(named)
    pairs = [(a, b) for a, b in zip(expected, restored["lines"], strict=False) if a != b]
    what = f"{pairs[0][1]} instead of {pairs[0][0]}"[:240] if pairs else "lines are missing"
    return ("named", "; ".join(named)) if named else ("SILENT", what)


def import_all() -> None:
    """What scripts import, once for all children."""
    import gc

    import torch
    import torch._dynamo
    import torch.optim.swa_utils
    import torch.quasirandom

    exec(parts.IMPORTS, {})
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    gc.freeze()
