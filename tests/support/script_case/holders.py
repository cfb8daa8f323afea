"""Places in which a script may keep a piece of state.

In the texts, # stands for the number of the piece, § for the owner of the loop's variables ("self."
in a trainer class, else nothing), V as in `kinds`.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from tests.support.script_case.kinds import Kind

# Name → (definitions at the top, statements before the loop, the place V, the place as dumped).
INLINE: dict[str, tuple[str, str, str, str]] = {
    "local": ("", "§v# = BEGIN", "§v#", ""),
    "in_list": ("", "§v# = [0, BEGIN]", "§v#[1]", ""),
    "in_dict": ("", "§v# = {'s': BEGIN}", "§v#['s']", ""),
    "nested": ("", "§v# = {'a': [0, {'b': BEGIN}]}", "§v#['a'][1]['b']", ""),
    "two_names": ("", "§v# = [BEGIN]\n§w# = {'same': §v#}", "§v#[0]", "§w#['same'][0]"),
    "in_tuple": ("", "§v# = (types.SimpleNamespace(s=BEGIN), 1)", "§v#[0].s", ""),
    "namespace": ("", "§v# = types.SimpleNamespace(s=BEGIN)", "§v#.s", ""),
    "chain_map": ("", "§v# = collections.ChainMap({'s': BEGIN}, {})", "§v#['s']", ""),
    "user_dict": ("", "§v# = collections.UserDict(s=BEGIN)", "§v#['s']", ""),
    "defaultdict": ("", "§v# = collections.defaultdict(list, s=BEGIN)", "§v#['s']", ""),
    "object_array": ("", "§v# = collections.deque([BEGIN])", "§v#[0]", ""),
    "on_model": ("", "§model.s# = BEGIN", "§model.s#", ""),
    "on_core": ("", "§core.s# = BEGIN", "§core.s#", ""),
    "on_layer": ("", "§core.first.s# = BEGIN", "§core.first.s#", ""),
    "on_parameter": ("", "§core.first.weight.s# = BEGIN", "§core.first.weight.s#", ""),
    "on_optimizer": ("", "§optimizer.s# = BEGIN", "§optimizer.s#", ""),
    "in_group": ("", "§optimizer.param_groups[0]['s#'] = BEGIN", "§optimizer.param_groups[0]['s#']", ""),
    "in_defaults": ("", "§optimizer.defaults['s#'] = BEGIN", "§optimizer.defaults['s#']", ""),
    "on_scheduler": ("", "§scheduler.s# = BEGIN", "§scheduler.s#", ""),
    "on_loader": ("", "§loader.s# = BEGIN", "§loader.s#", ""),
    "on_data": ("", "§data.s# = BEGIN", "§data.s#", ""),
    "on_criterion": (
        "class Criterion#(nn.MSELoss):\n    pass\n",
        "§crit# = Criterion#()\n§crit#.s = BEGIN",
        "§crit#.s",
        "",
    ),
    "on_function": ("def helper#():\n    return 0\nhelper#.s = BEGIN", "", "helper#.s", ""),
    "on_class": ("class Box#:\n    s = BEGIN\n", "", "Box#.s", ""),
    "on_base_class": ("class Base#:\n    s = BEGIN\nclass Box#(Base#):\n    pass\n", "", "Base#.s", "Box#.s"),
    "on_nested_class": ("class Outer#:\n    class Inner:\n        s = BEGIN\n", "", "Outer#.Inner.s", ""),
    "on_instance": ("class Box#:\n    pass\nBOX# = Box#()\nBOX#.s = BEGIN", "", "BOX#.s", ""),
    "in_slot": (
        "class Box#:\n    __slots__ = ('s', '__weakref__')\nBOX# = Box#()\nBOX#.s = BEGIN", "", "BOX#.s", ""
    ),
    "registry": ("REGISTRY# = {}\n", "REGISTRY#['s'] = BEGIN", "REGISTRY#['s']", ""),
    "global_list": ("STACK# = [BEGIN]\n", "", "STACK#[-1]", ""),
    "on_partial": ("PARTIAL# = functools.partial(max, 1)\nPARTIAL#.s = BEGIN", "", "PARTIAL#.s", ""),
    "on_thread": ("THREAD# = threading.Thread(target=print)\nTHREAD#.s = BEGIN", "", "THREAD#.s", ""),
    "on_logger": ("LOGGER# = logging.getLogger('case#')\nLOGGER#.s = BEGIN", "", "LOGGER#.s", ""),
    "on_exception": ("ERROR# = ValueError()\nERROR#.s = BEGIN", "", "ERROR#.s", ""),
    "on_stack": ("STACK# = contextlib.ExitStack()\nSTACK#.s = BEGIN", "", "STACK#.s", ""),
    "on_random": ("RANDOM# = random.Random(1)\nRANDOM#.s = BEGIN", "", "RANDOM#.s", ""),
    "on_enum": ("class Kinds#(enum.Enum):\n    ONE = 1\nKinds#.ONE.s = BEGIN", "", "Kinds#.ONE.s", ""),
    "on_tensor": ("TENSOR# = torch.zeros(1)\nTENSOR#.s = BEGIN", "", "TENSOR#.s", ""),
    "on_module_type": (
        "MADE# = types.ModuleType('made#')\nMADE#.s = BEGIN", "", "MADE#.s", ""
    ),
    "on_event": ("EVENT# = threading.Event()\nEVENT#.s = BEGIN", "", "EVENT#.s", ""),
    "on_counter": ("COUNTER# = collections.Counter()\nCOUNTER#.s = BEGIN", "", "COUNTER#.s", ""),
    "on_future": (
        "FUTURE# = concurrent.futures.Future()\nFUTURE#.set_result(0)\nFUTURE#.s = BEGIN", "", "FUTURE#.s", ""
    ),
    "on_weak_key": ("WEAK# = weakref.WeakKeyDictionary()\n", "WEAK#[§core] = BEGIN", "WEAK#[§core]", ""),
    "by_id": ("IDS# = {}\n", "IDS#[id(§core)] = BEGIN", "IDS#[id(§core)]", ""),
    "by_parameter": ("", "§v# = {§core.first.weight: BEGIN}", "§v#[§core.first.weight]", ""),
    "thread_local": ("LOCAL# = threading.local()\n", "LOCAL#.s = BEGIN", "LOCAL#.s", ""),
    "frozen": (
        "@dataclasses.dataclass(frozen=True)\nclass Frozen#:\n    box: dict\n",
        "§v# = Frozen#({'s': BEGIN})",
        "§v#.box['s']",
        "",
    ),
    "deep": ("", "§v# = [[[[[[[[[[[[[[[BEGIN]]]]]]]]]]]]]]]", "§v#" + "[0]" * 15, ""),
    "in_made_class": (
        "def made#():\n    class Box:\n        s = BEGIN\n    return Box\nBOX# = made#()\n", "", "BOX#.s", ""
    ),
    "on_sys_module": (
        "sys.modules['case_module#'] = types.ModuleType('case_module#')\nimport case_module#\ncase_module#.s = BEGIN",
        "",
        "case_module#.s",
        "",
    ),
    "on_bound_args": ("", "§v# = functools.partial(dict, s=BEGIN)", "§v#.keywords['s']", ""),
    "in_mapping_proxy": ("UNDER# = {'s': BEGIN}\nPROXY# = types.MappingProxyType(UNDER#)\n", "", "UNDER#['s']", "PROXY#['s']"),
    "on_dunder_dict": ("class Box#:\n    pass\nBOX# = Box#()\nBOX#.__dict__['s'] = BEGIN", "", "BOX#.__dict__['s']", ""),
    "on_autograd": (
        "class Scale#(torch.autograd.Function):\n    s = BEGIN\n", "", "Scale#.s", ""
    ),
    "on_lambda": ("LAMBDA# = lambda: 0\nLAMBDA#.s = BEGIN", "", "LAMBDA#.s", ""),
    "on_method": (
        "class Box#:\n    def act(self):\n        return 0\nBox#.act.s = BEGIN", "", "Box#.act.s", ""
    ),
    "in_list_of_pairs": ("", "§v# = [('other', [0]), ('s', [BEGIN])]", "dict(§v#)['s'][0]", ""),
    "in_iterated_object": (
        "class Bag#:\n    def __init__(self, *things):\n        self.things = list(things)\n    def __getitem__(self, at):\n        return self.things[at]\n    def __setitem__(self, at, thing):\n        self.things[at] = thing\n",
        "§v# = Bag#(0, BEGIN)",
        "§v#[1]",
        "",
    ),
}

# Name → definitions of tick#(k) and dump#().
FUNCTIONS = {
    "global": """
G# = BEGIN
def tick#(k):
    global G#
    CHANGE{G#}
    return READ{G#}
def dump#():
    return DUMP{G#}
""",
    "closure": """
def make#():
    v = BEGIN
    def tick(k):
        nonlocal v
        CHANGE{v}
        return READ{v}
    def dump():
        return DUMP{v}
    return tick, dump
tick#, dump# = make#()
""",
    "default_argument": """
def tick#(k, box=[BEGIN]):
    CHANGE{box[0]}
    return READ{box[0]}
def dump#():
    return DUMP{tick#.__defaults__[0][0]}
""",
    "keyword_default": """
def tick#(k, *, box={'s': BEGIN}):
    CHANGE{box['s']}
    return READ{box['s']}
def dump#():
    return DUMP{tick#.__kwdefaults__['box']['s']}
""",
    "function_attribute": """
def tick#(k):
    CHANGE{tick#.s}
    return READ{tick#.s}
tick#.s = BEGIN
def dump#():
    return DUMP{tick#.s}
""",
    "callable_object": """
class Ticker#:
    def __init__(self):
        self.s = BEGIN
    def __call__(self, k):
        CHANGE{self.s}
        return READ{self.s}
tick# = Ticker#()
def dump#():
    return DUMP{tick#.s}
""",
    "bound_method": """
class Ticker#:
    def __init__(self):
        self.s = BEGIN
    def turn(self, k):
        CHANGE{self.s}
        return READ{self.s}
tick# = Ticker#().turn
def dump#():
    return DUMP{tick#.__self__.s}
""",
    "class_method": """
class Ticker#:
    s = BEGIN
    @classmethod
    def turn(cls, k):
        CHANGE{cls.s}
        return READ{cls.s}
tick# = Ticker#.turn
def dump#():
    return DUMP{Ticker#.s}
""",
    "partial_box": """
def turn#(box, k):
    CHANGE{box[0]}
    return READ{box[0]}
tick# = functools.partial(turn#, [BEGIN])
def dump#():
    return DUMP{tick#.args[0][0]}
""",
    "generator_frame": """
def run#():
    v = BEGIN
    k = yield 0
    while True:
        CHANGE{v}
        k = yield READ{v}
RUN# = run#()
next(RUN#)
tick# = RUN#.send
def dump#():
    return None
""",
    "decorated": """
def counting#(function):
    v = BEGIN
    @functools.wraps(function)
    def inner(k):
        nonlocal v
        CHANGE{v}
        return READ{v} + function(k)
    inner.look = lambda: DUMP{v}
    return inner
@counting#
def tick#(k):
    return 0.0
def dump#():
    return tick#.look()
""",
    "callbacks": """
class Callback#:
    def __init__(self):
        self.s = BEGIN
    def on_step(self, k):
        CHANGE{self.s}
        return READ{self.s}
CALLBACKS# = [Callback#()]
def tick#(k):
    return sum(one.on_step(k) for one in CALLBACKS#)
def dump#():
    return DUMP{CALLBACKS#[0].s}
""",
    "made_class": """
def make#():
    class Ticker:
        s = BEGIN
        def turn(self, k):
            CHANGE{Ticker.s}
            return READ{Ticker.s}
    return Ticker, Ticker().turn
TICKER#, tick# = make#()
def dump#():
    return DUMP{TICKER#.s}
""",
    "property_holder": """
class Ticker#:
    def __init__(self):
        self._s = BEGIN
    @property
    def s(self):
        return self._s
    @s.setter
    def s(self, value):
        self._s = value
    def turn(self, k):
        CHANGE{self.s}
        return READ{self.s}
TICKER# = Ticker#()
def tick#(k):
    return TICKER#.turn(k)
def dump#():
    return DUMP{TICKER#.s}
""",
    "event_system": """
class Engine#:
    def __init__(self):
        self.handlers = collections.defaultdict(list)
        self.state = types.SimpleNamespace(s=BEGIN)
    def on(self, event):
        return lambda handler: self.handlers[event].append(handler)
    def fire(self, event, *arguments):
        return sum(handler(self, *arguments) for handler in self.handlers[event])
ENGINE# = Engine#()
@ENGINE#.on("step")
def turn#(engine, k):
    CHANGE{engine.state.s}
    return READ{engine.state.s}
def tick#(k):
    return ENGINE#.fire("step", k)
def dump#():
    return DUMP{ENGINE#.state.s}
""",
    "weak_callback": """
class Ticker#:
    def __init__(self):
        self.s = BEGIN
    def turn(self, k):
        CHANGE{self.s}
        return READ{self.s}
TICKER# = Ticker#()
METHOD# = weakref.WeakMethod(TICKER#.turn)
def tick#(k):
    return METHOD#()(k)
def dump#():
    return DUMP{TICKER#.s}
""",
    "other_thread": """
BOX# = [BEGIN]
def turn#(k, out):
    CHANGE{BOX#[0]}
    out.append(READ{BOX#[0]})
def tick#(k):
    out = []
    thread = threading.Thread(target=turn#, args=(k, out))
    thread.start()
    thread.join()
    return out[0]
def dump#():
    return DUMP{BOX#[0]}
""",
    "pool": """
POOL# = concurrent.futures.ThreadPoolExecutor(1)
BOX# = {'s': BEGIN}
def turn#(k):
    CHANGE{BOX#['s']}
    return READ{BOX#['s']}
def tick#(k):
    return POOL#.submit(turn#, k).result()
def dump#():
    return DUMP{BOX#['s']}
""",
    "coroutine_step": """
class Ticker#:
    def __init__(self):
        self.s = BEGIN
    async def turn(self, k):
        CHANGE{self.s}
        return READ{self.s}
TICKER# = Ticker#()
def tick#(k):
    coroutine = TICKER#.turn(k)
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
def dump#():
    return DUMP{TICKER#.s}
""",
    "context_manager": """
class Scope#:
    def __init__(self):
        self.s = BEGIN
    def __enter__(self):
        return self
    def __exit__(self, *error):
        return False
    def turn(self, k):
        CHANGE{self.s}
        return READ{self.s}
SCOPE# = Scope#()
def tick#(k):
    with SCOPE# as scope:
        return scope.turn(k)
def dump#():
    return DUMP{SCOPE#.s}
""",
    "module_object": """
class Ticker#(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = BEGIN
    def forward(self, k):
        CHANGE{self.s}
        return READ{self.s}
tick# = Ticker#()
def dump#():
    return DUMP{tick#.s}
""",
    "closure_list": """
def make#():
    box = [BEGIN]
    def turn(k):
        CHANGE{box[0]}
        return READ{box[0]}
    return {"turn": turn, "dump": lambda: DUMP{box[0]}}
TABLE# = make#()
def tick#(k):
    return TABLE#["turn"](k)
def dump#():
    return TABLE#["dump"]()
""",
    "meta_attribute": """
class Meta#(type):
    s = BEGIN
class Owner#(metaclass=Meta#):
    @classmethod
    def turn(cls, k):
        CHANGE{Meta#.s}
        return READ{Meta#.s}
tick# = Owner#.turn
def dump#():
    return DUMP{Meta#.s}
""",
    "super_chain": """
class Low#:
    def __init__(self):
        self.s = BEGIN
    def turn(self, k):
        CHANGE{self.s}
        return READ{self.s}
class High#(Low#):
    calls = 0
    def turn(self, k):
        type(self).calls += 1
        return super().turn(k) + self.calls
TICKER# = High#()
def tick#(k):
    return TICKER#.turn(k)
def dump#():
    return DUMP{TICKER#.s}
""",
}


@dataclass(frozen=True)
class State:
    """One piece of state in the text of a script.

    Attributes:
        name: kind and holder.
        top: definitions at the top.
        before: statements before the loop.
        lines: statements in the loop: they change the state and add to `noise`.
        dump: expression of the final digest.
        function: whether tick#(k) exists and may be called from anywhere.
    """

    number: int
    name: str
    top: str
    before: str
    lines: str
    dump: str
    function: bool


def _replaced(text: str, kind: Kind) -> str:
    """With CHANGE{V}, READ{V} and DUMP{V} written out."""
    out = []
    for line in text.split("\n"):
        start = line[: len(line) - len(line.lstrip())]
        while (at := min((i for w in ("CHANGE{", "READ{", "DUMP{") if (i := line.find(w)) >= 0), default=-1)) >= 0:
            brace = line.index("{", at)
            end = line.index("}", brace)
            word, place = line[at:brace], line[brace + 1 : end]
            if word == "CHANGE":
                line = textwrap.indent(_at(kind.change, place), start)
                break
            chosen = kind.read if word == "READ" else kind.dump or "V"
            if word == "DUMP" and chosen == "t":
                chosen = "None"
            expression = _at(chosen, place)
            line = line[:at] + (f"float({expression})" if word == "READ" else f"({expression})") + line[end + 1 :]
        out.append(line)
    return "\n".join(out)


def _at(text: str, place: str) -> str:
    return re.sub(r"\bV\b", lambda _: place, text)


def held(number: int, kind_name: str, kind: Kind, holder: str) -> State:
    """A piece of state of this kind in this place."""
    name = f"{kind_name} in {holder}"

    def filled(text: str) -> str:
        return text.replace("BEGIN", kind.begin).replace("#", str(number))

    if holder in INLINE:
        top, before, place, dumped = INLINE[holder]
        place = filled(place)
        dumped = filled(dumped) or place
        change = _at(kind.change, place)
        lines = f"{change}\nnoise += float({_at(kind.read, place)})"
        dump = "None" if kind.dump == "t" else _at(kind.dump or "V", dumped)
        return State(number, name, kind.top + filled(top), filled(before), lines, dump, False)
    text = filled(_replaced(FUNCTIONS[holder], kind))
    return State(number, name, kind.top + text, "", f"noise += tick{number}(§step)", f"dump{number}()", True)
