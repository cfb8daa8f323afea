"""Kinds of state that a training script may keep: how it begins, changes and is read.

In the texts, V stands for the place that a holder gives it, k for the number of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.learning import ASIDE


@dataclass(frozen=True)
class Kind:
    """One kind of state.

    Attributes:
        begin: an expression.
        change: statements, one a line; they may assign V.
        read: an expression that gives a number.
        dump: what the final digest reads; "" for V itself.
        top: definitions at the top of the script.
    """

    begin: str
    change: str
    read: str
    dump: str = ""
    top: str = ""


_WEIGHED = "sum(a * (j + 1) for j, a in enumerate({}))"

PLAIN = {
    "int": Kind("0", "V = (V * 3 + k) % 101", "V"),
    "float": Kind("0.5", "V = V * 0.9 + k % 7", "V"),
    "bool": Kind("False", "V = not V if k % 3 == 0 else V", "V"),
    "none_then_best": Kind("None", "V = min(V, k * 7 % 13) if V is not None else k * 7 % 13", "V"),
    "big_int": Kind("1", "V = (V * 6364136223846793005 + k) % (1 << 190)", "V % 97"),
    "complex": Kind("1 + 0j", "V = V * 1j + k", "V.real - V.imag"),
    "str": Kind("''", "V = (V + chr(97 + k % 26))[-12:]", "sum(map(ord, V))"),
    "bytes": Kind("b''", "V = (V + bytes([k % 200]))[-7:]", "sum(V)"),
    "bytearray": Kind("bytearray(b'ab')", "V.append(k * 3 % 256)", "sum(V)"),
    "list": Kind("[]", "V.append(k * 7 % 11)\nif len(V) > 6: V.pop(0)", _WEIGHED.format("V")),
    "list_anew": Kind("[]", "V = V[-4:] + [k * k % 17]", _WEIGHED.format("V")),
    "list_swapped": Kind(
        "list(range(300))", "V[k % 300], V[k * 37 % 300] = V[k * 37 % 300], V[k % 300]", "V[k % 9]"
    ),
    "list_of_lists": Kind(
        "[[], []]", "V[k % 2].append(k)\nV[0], V[1] = V[1], V[0]", "len(V[0]) - 2 * len(V[1])"
    ),
    "dict": Kind(
        "{'a': [], 'b': {'c': 0}}",
        "V['a'].append(k)\nV['b']['c'] += k\nV[k % 5] = k",
        "V['b']['c'] + len(V['a']) + sum(x for x in V if isinstance(x, int))",
    ),
    "dict_order": Kind(
        "{}", "V.pop(k % 4, None)\nV[k % 4] = k", _WEIGHED.format("V"), "list(V.items())"
    ),
    "deque": Kind(
        "collections.deque(maxlen=4)",
        "V.append(k * 5 % 7)\nV.rotate(1)",
        _WEIGHED.format("V"),
    ),
    "heap": Kind(
        "[(9, 9)]",
        "heapq.heappush(V, (k * 7 % 13, k))\nif len(V) > 5: heapq.heappop(V)",
        "V[0][0] + V[-1][1]",
    ),
    "set": Kind("{1, 5}", "V.add(k * 11 % 31)\nif len(V) > 7: V.pop()", "sum(V)", "list(V)"),
    "frozenset": Kind(
        "frozenset()", "V = frozenset(sorted(V | {k * 3 % 19})[-5:])", "sum(V)", "sorted(V)"
    ),
    "tuple": Kind("(0, 1)", "V = (V[1], (V[0] + V[1] + k) % 89)", "V[0]"),
    "ordered_dict": Kind(
        "collections.OrderedDict((j, 0) for j in range(3))",
        "V.move_to_end(k % 3)\nV[k % 3] += k",
        _WEIGHED.format("V.values()"),
        "list(V.items())",
    ),
    "defaultdict": Kind(
        "collections.defaultdict(list)", "V[k % 3].append(k)", "sum(map(len, V.values())) + len(V[k % 3])"
    ),
    "defaultdict_lambda": Kind("collections.defaultdict(lambda: 3)", "V[k % 4] += k", "V[k % 4]"),
    "counter": Kind("collections.Counter()", "V.update([k % 3, k % 2])", "V.most_common(1)[0][1]"),
    "chain_map": Kind(
        "collections.ChainMap({}, {'a': 1})",
        "V['a'] = V['a'] + k\nif k == 4: V = V.new_child()",
        "V['a'] + len(V.maps)",
        "[dict(m) for m in V.maps]",
    ),
    "user_dict": Kind("collections.UserDict(a=0)", "V['a'] += k", "V['a']"),
    "user_list": Kind("collections.UserList()", "V.append(k)", "sum(V)"),
    "namespace": Kind("types.SimpleNamespace(a=0)", "V.a += k\nV.last = k", "V.a + V.last"),
    "argparse": Kind("argparse.Namespace(patience=3)", "V.patience -= k % 3 - 1", "V.patience"),
    "array": Kind("array.array('i', [0, 1])", "V.append((V[-1] + V[-2] + k) % 1009)", "V[-1]"),
    "fraction": Kind("fractions.Fraction(1, 3)", "V = (V + fractions.Fraction(k, 7)) % 5", "V"),
    "decimal": Kind("decimal.Decimal(1)", "V = V / 3 + k", "V"),
    "date": Kind(
        "datetime.datetime(2020, 1, 1)", "V += datetime.timedelta(hours=k)", "V.hour + V.day", "str(V)"
    ),
    "path": Kind("pathlib.PurePosixPath('a')", "V = V.parent / f'b{k}' / 'c'", "len(str(V))", "str(V)"),
    "bounded_stats": Kind(
        "{'n': 0, 'mean': 0.0, 'm2': 0.0}",
        "V['n'] += 1\nd = k * 7 % 5 - V['mean']\nV['mean'] += d / V['n']\nV['m2'] += d * (k - V['mean'])",
        "V['mean'] + V['m2']",
    ),
    "string_io": Kind("io.StringIO()", "V.write(f'{k},')", "len(V.getvalue())", "V.getvalue()"),
    "bytes_io": Kind(
        "io.BytesIO(bytes(range(200)))", "t = V.read(3)", "V.tell() + t[0]", "V.tell()"
    ),
    "sliced": Kind("slice(0, 1)", "V = slice(V.start + 1, V.stop + k)", "V.stop - V.start", "str(V)"),
    "range": Kind("range(3)", "V = range(V.start + 1, V.stop + k)", "len(V)", "str(V)"),
    "set_of_tuples": Kind("{(0, 0)}", "V.add((k % 3, k % 5))", "len(V)", "sorted(V)"),
    "nested_tuple": Kind("([], {})", "V[0].append(k)\nV[1][k % 3] = k", "sum(V[0]) + sum(V[1].values())"),
    "hash_number": Kind("0", "V = zlib.crc32(bytes([k]), V)", "V % 89"),
}

OWN = {
    "own": Kind("Own()", "V.move(k)", "V.value()", top="""
class Own:
    def __init__(self):
        self.n, self.past, self._peak = 0, [], float("-inf")
    def move(self, k):
        self.n += k
        self.past.append(self.n % 7)
        self._peak = max(self._peak, self.past[-1])
    def value(self):
        return self.n + self._peak + len(self.past)
"""),
    "own_slots": Kind("OwnSlots()", "V.a += k\nV.late = k", "V.a + V.late", top="""
class OwnSlots:
    __slots__ = ("a", "late")
    def __init__(self):
        self.a = 0
"""),
    "dataclass": Kind("Meter()", "V.total += k\nV.seen.append(k)", "V.total / len(V.seen)", top="""
@dataclasses.dataclass
class Meter:
    total: float = 0.0
    seen: list = dataclasses.field(default_factory=list)
"""),
    "dataclass_slots": Kind("SlotMeter()", "V.total += k", "V.total", top="""
@dataclasses.dataclass(slots=True)
class SlotMeter:
    total: float = 0.0
"""),
    "frozen_dataclass": Kind("Frozen()", "V = dataclasses.replace(V, n=V.n + k)", "V.n", top="""
@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int = 0
"""),
    "namedtuple": Kind("Point(0, 1.0)", "V = V._replace(a=V.a + k, b=V.b * 0.9)", "V.a + V.b", top="""
Point = collections.namedtuple("Point", "a b")
"""),
    "enum": Kind(
        "Phase.WARM", "V = [Phase.WARM, Phase.MAIN, Phase.COOL][k // 2 % 3]", "V.value", "V.name",
        top="""
class Phase(enum.Enum):
    WARM, MAIN, COOL = 1, 5, 9
"""),
    "int_enum_flag": Kind("Flags(0)", "V = V ^ Flags(1 << k % 3)", "V.value", "V.value", top="""
class Flags(enum.Flag):
    A, B, C = 1, 2, 4
"""),
    "dict_subclass": Kind("Bag()", "V[k % 3] = k\nV.hits += 1", "V.hits + sum(V.values())", "(V.hits, dict(V))",
        top="""
class Bag(dict):
    hits = 0
"""),
    "list_subclass": Kind("Stack()", "V.append(k)\nV.top = max(V)", "V.top + len(V)", "(V.top, list(V))", top="""
class Stack(list):
    top = 0
"""),
    "int_subclass": Kind("Count(0)", "V = Count(V + k)", "V + 0", "int(V)", top="""
class Count(int):
    pass
"""),
    "property": Kind("Guarded()", "V.n = V.n + k", "V.n", top="""
class Guarded:
    def __init__(self):
        self._n = 0
    @property
    def n(self):
        return self._n
    @n.setter
    def n(self, value):
        self._n = value % 53
"""),
    "setattr_denied": Kind("Sealed()", "V.bump(k)", "V.n", top="""
class Sealed:
    def __init__(self):
        self.__dict__["n"] = 0
    def __setattr__(self, name, value):
        raise AttributeError(name)
    def bump(self, k):
        self.__dict__["n"] += k
"""),
    "getattr_dynamic": Kind("Config()", "V.lr = V.lr + k", "V.lr + V.other", "V.data", top="""
class Config:
    def __init__(self):
        object.__setattr__(self, "data", {"lr": 1, "other": 2})
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None
    def __setattr__(self, name, value):
        self.data[name] = value
"""),
    "own_pickle": Kind("Pickled()", "V.n += k\nV.cache[k] = 1", "V.n + len(V.cache)", top="""
class Pickled:
    def __init__(self):
        self.n, self.cache = 0, {}
    def __getstate__(self):
        return {"n": self.n}
    def __setstate__(self, state):
        self.n, self.cache = state["n"], {}
"""),
    "eq_and_hash": Kind("Keyed(1)", "V.n += k", "V.n", top="""
class Keyed:
    def __init__(self, n):
        self.n = n
    def __eq__(self, other):
        return isinstance(other, Keyed)
    def __hash__(self):
        return 7
"""),
    "linked_list": Kind("None", "V = Link(k, V)", "V.n + (V.next.n if V.next else 0)",
        "[n.n for n in chain_of(V)]", top="""
class Link:
    def __init__(self, n, next):
        self.n, self.next = n, next
def chain_of(link):
    while link:
        yield link
        link = link.next
"""),
    "tree_with_parents": Kind("Tree(None, 0)", "V.grow(k)", "V.total()", "V.total()", top="""
class Tree:
    def __init__(self, parent, n):
        self.parent, self.n, self.kids = parent, n, []
    def grow(self, k):
        place = self
        while len(place.kids) > 1:
            place = place.kids[k % 2]
        place.kids.append(Tree(place, k))
    def total(self):
        return self.n + 2 * sum(kid.total() + kid.parent.n for kid in self.kids)
"""),
    "lru": Kind("Lru(3)", "V.put(k % 5, k)\nV.get(k % 3)", "sum(V.items)", "list(V.items.items())", top="""
class Lru:
    def __init__(self, size):
        self.size, self.items = size, collections.OrderedDict()
    def get(self, key):
        if key in self.items:
            self.items.move_to_end(key)
    def put(self, key, value):
        self.items[key] = value
        if len(self.items) > self.size:
            self.items.popitem(last=False)
"""),
    "object_keys": Kind("{Node(0): 0}", "V[Node(k)] = k\nfor one in list(V)[:-3]: del V[one]",
        "sum(one.n * j for one, j in V.items())", "[(one.n, j) for one, j in V.items()]", top="""
class Node:
    def __init__(self, n):
        self.n = n
"""),
    "weak_values": Kind("WeakPair()", "V.move(k)", "V.value()", "V.value()", top="""
class WeakPair:
    class Item:
        n = 0
    def __init__(self):
        self.held = WeakPair.Item()
        self.weak = weakref.ref(self.held)
    def move(self, k):
        self.weak().n += k
    def value(self):
        return self.held.n
"""),
    "switched_function": Kind("low", "V = high if k % 4 > 1 else low", "V(3)", "V.__name__", top="""
def low(x):
    return x
def high(x):
    return x * 5
"""),
    "switched_lambda": Kind("CHOICES[0]", "V = CHOICES[k % 3]", "V(2)", "V(2)", top="""
CHOICES = [lambda x: x, lambda x: x * 3, lambda x: -x]
"""),
    "switched_class": Kind("Small", "V = Large if k % 3 else Small", "V.size", "V.__name__", top="""
class Small:
    size = 1
class Large:
    size = 4
"""),
    "changed_class": Kind("Calm()", "V.__class__ = Wild if k % 4 > 1 else Calm", "V.size", "V.size", top="""
class Calm:
    size = 1
class Wild:
    size = 4
"""),
    "bound_method": Kind("Machine().idle", "V = V(k)", "V.__self__.n", "(V.__name__, V.__self__.n)", top="""
class Machine:
    n = 0
    def idle(self, k):
        self.n += k
        return self.busy if k % 2 else self.idle
    def busy(self, k):
        self.n -= 1
        return self.idle
"""),
    "partial": Kind("functools.partial(scaled, [0])", "V.args[0].append(k)", "V(k)", "V.args", top="""
def scaled(box, k, by=1):
    return sum(box) * by + k
"""),
    "partial_anew": Kind("functools.partial(scaled2, 0)", "V = functools.partial(scaled2, V(k), by=k % 3)", "V(1)",
        "(V.args, V.keywords)", top="""
def scaled2(base, k, by=1):
    return (base + k * by) % 71
"""),
    "closure_made": Kind("adder(0)", "V = adder(V(k) % 61)", "V(0)", "V(0)", top="""
def adder(base):
    return lambda k: base + k
"""),
    "cached_property": Kind("Lazy()", "V.turn(k)", "V.seen", "(V.seen, V.n)", top="""
class Lazy:
    n = 1
    @functools.cached_property
    def seen(self):
        return self.n * 3
    def turn(self, k):
        self.n += k
        if k % 5 == 0:
            self.__dict__.pop("seen", None)
"""),
    "private_names": Kind("Private()", "V.bump(k)", "V.peek()", "V.peek()", top="""
class Private:
    def __init__(self):
        self.__n = 0
    def bump(self, k):
        self.__n += k
    def peek(self):
        return self.__n
"""),
    "descriptor": Kind("Described()", "V.n = V.n + k", "V.n", "V.n", top="""
class Stored:
    def __set_name__(self, owner, name):
        self.name = "_stored_" + name
    def __get__(self, one, owner=None):
        return self if one is None else one.__dict__.get(self.name, 0)
    def __set__(self, one, value):
        one.__dict__[self.name] = value % 67
class Described:
    n = Stored()
"""),
    "weak_key_descriptor": Kind("Outside()", "V.n = V.n + k", "V.n", "V.n", top="\n" + ASIDE + """\
class Outside:
    n = Aside()
"""),
    "singleton": Kind("Single()", "Single().n += k", "Single().n", "Single().n", top="""
class Single:
    _one = None
    n = 0
    def __new__(cls):
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one
"""),
    "metaclass": Kind("Registered", "V.count += k", "V.count", "V.count", top="""
class Meta(type):
    count = 0
class Registered(metaclass=Meta):
    pass
"""),
    "exception_kept": Kind("ValueError(0)", "V.args = (V.args[0] + k,)\nV.note = k", "V.args[0] + V.note", "(V.args, V.note)"),
    "replay_buffer": Kind("Replay(16)", "V.push(k)", "V.sample()", "V.rows", top="""
class Replay:
    def __init__(self, size):
        self.rows, self.at, self.size, self.rng = [], 0, size, random.Random(3)
    def push(self, k):
        row = (k, torch.full((2,), float(k)))
        if len(self.rows) < self.size:
            self.rows.append(row)
        else:
            self.rows[self.at] = row
        self.at = (self.at + 1) % self.size
    def sample(self):
        return sum(float(row[1].sum()) for row in self.rng.choices(self.rows, k=3))
"""),
    "sum_tree": Kind("SumTree(8)", "V.set(k % 8, k * 3 % 11)", "V.nodes[1]", "V.nodes", top="""
class SumTree:
    def __init__(self, n):
        self.n, self.nodes = n, np.zeros(2 * n)
    def set(self, at, value):
        at += self.n
        self.nodes[at] = value
        while at > 1:
            at //= 2
            self.nodes[at] = self.nodes[2 * at] + self.nodes[2 * at + 1]
"""),
    "early_stop": Kind("EarlyStop(3)", "V(k * 7 % 10)", "V.bad + (V.best or 0)", top="""
class EarlyStop:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.stop = patience, None, 0, False
    def __call__(self, loss):
        if self.best is None or loss < self.best:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
            self.stop = self.stop or self.bad >= self.patience
"""),
    "abc_generic": Kind("Typed()", "V.add(k)", "V.sum", top="""
T_ = typing.TypeVar("T_")
class Typed(typing.Generic[T_], abc.ABC):
    def __init__(self):
        self.sum = 0
    def add(self, k):
        self.sum += k
"""),
    "iterator_class": Kind("Walk()", "t = next(V)", "V.at", top="""
class Walk:
    def __init__(self):
        self.at = 0
    def __iter__(self):
        return self
    def __next__(self):
        self.at = (self.at * 5 + 3) % 64
        return self.at
"""),
}
