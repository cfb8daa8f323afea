"""More kinds of state: tensors, arrays, random generators, iterators, objects of the standard library."""

from __future__ import annotations

from tests.support.script_case.kinds import Kind

TENSORS = {
    "tensor": Kind("torch.zeros(3)", "V.mul_(0.5).add_(k)", "V.sum().item()"),
    "tensor_anew": Kind("torch.zeros(3)", "V = V * 0.5 + k", "V[1].item()"),
    "tensor_scalar": Kind("torch.tensor(1.0)", "V = torch.minimum(V, torch.tensor(1.0 / k))", "V.item()"),
    "tensor_item": Kind("torch.zeros(5, dtype=torch.long)", "V[k % 5] += k", "V.max().item()"),
    "tensor_bool": Kind("torch.zeros(6, dtype=torch.bool)", "V[k % 6] = ~V[k % 6]", "V.sum().item()"),
    "tensor_bf16": Kind("torch.ones(4, dtype=torch.bfloat16)", "V.mul_(1.1)", "V[0].item()", "V.float()"),
    "tensor_grown": Kind("torch.zeros(0)", "V = torch.cat([V, torch.tensor([float(k)])])", "V.sum().item()"),
    "tensor_resized": Kind("torch.zeros(1)", "V.resize_(1 + k % 4).fill_(k)", "V.sum().item()"),
    "tensor_data": Kind("torch.zeros(2)", "V.data = V.data + k", "V[0].item()"),
    "tensor_views": Kind(
        "[torch.zeros(6)]", "V[:] = [V[0], V[0][2:4]]\nV[1].add_(k)", "V[0].sum().item()"
    ),
    "tensor_transposed": Kind("torch.arange(6.).view(2, 3).t()", "V.add_(k)", "V.sum().item()"),
    "tensor_list": Kind("[]", "V.append(torch.full((2,), k / 3))\ndel V[:-3]", "float(sum(t.sum() for t in V))"),
    "tensor_dict": Kind(
        "{'sum': torch.zeros(2)}", "V['sum'] += k\nV[f'x{k % 3}'] = torch.ones(1) * k", "float(sum(t.sum() for t in V.values()))"
    ),
    "tensor_graph": Kind(
        "torch.ones(2, requires_grad=True)", "with torch.no_grad(): V.add_(k)", "V.sum().item()", "V.detach()"
    ),
    "parameter_alone": Kind("nn.Parameter(torch.zeros(2))", "V.data.add_(k)", "V.sum().item()", "V.detach()"),
    "tensor_attr": Kind("torch.zeros(2)", "V.age = getattr(V, 'age', 0) + k", "V.age", "V.age"),
    "tensor_subclass": Kind("Tagged.of(0)", "V.add_(1)\nV.tag += k", "float(V.sum()) + V.tag", "(V.tag, float(V.sum()))",
        top="""
class Tagged(torch.Tensor):
    @staticmethod
    def of(tag):
        one = torch.zeros(2).as_subclass(Tagged)
        one.tag = tag
        return one
"""),
    "tensor_sparse": Kind(
        "torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (4,))", "V = V * 0.9", "V.to_dense().sum().item()", "V.to_dense()"
    ),
    "module_buffer": Kind("nn.BatchNorm1d(2)", "V(torch.full((3, 2), float(k)) + torch.arange(3.)[:, None])", "V.running_mean.sum().item()", "V.state_dict()"),
    "module_alone": Kind("nn.Linear(2, 1)", "with torch.no_grad(): V.weight.add_(k * 0.1)", "V.weight.sum().item()", "V.state_dict()"),
    "module_mode": Kind("nn.Dropout(0.5)", "V.train(k % 3 == 0)", "V.training", "V.training"),
    "module_p": Kind("nn.Dropout(0.5)", "V.p = 1 / (k + 1)", "V.p", "V.p"),
    "numpy": Kind("np.zeros(3)", "V *= 0.5\nV += k", "V.sum()"),
    "numpy_anew": Kind("np.zeros(3)", "V = V * 0.5 + k", "V[1]"),
    "numpy_item": Kind("np.zeros((2, 3), dtype=np.int64)", "V[k % 2, k % 3] += k", "V.max()"),
    "numpy_scalar": Kind("np.float32(1)", "V = V * np.float32(0.9) + np.float32(k)", "V"),
    "numpy_views": Kind("[np.zeros(6)]", "V[:] = [V[0], V[0][2:4]]\nV[1][0] += k", "V[0].sum()"),
    "numpy_object": Kind("np.array([None, 1], dtype=object)", "V[0] = k", "V[0]"),
    "numpy_structured": Kind("np.zeros(2, dtype=[('a', 'i4'), ('b', 'f8')])", "V['a'][k % 2] += k", "V['a'].sum()"),
    "numpy_masked": Kind("np.ma.zeros(4)", "V[k % 4] = k\nV.mask = [j == k % 3 for j in range(4)]", "V.sum()", "(V.data, V.mask)"),
    "numpy_strings": Kind("np.array(['a', 'b'], dtype='<U8')", "V[k % 2] = f's{k}'", "len(V[0])", "V.tolist()"),
    "numpy_dates": Kind("np.datetime64('2020-01-01')", "V = V + np.timedelta64(k, 'D')", "V.astype(int) % 97", "str(V)"),
    "numpy_memmap_like": Kind("np.frombuffer(bytearray(40), dtype=np.int64)", "V[k % 5] += k", "V.sum()"),
    "confusion": Kind("torch.zeros(3, 3, dtype=torch.long)", "V.index_put_((torch.tensor([k % 3]), torch.tensor([k % 2])), torch.tensor([1]), accumulate=True)", "(V.diag().sum() * 3 + V[0].sum()).item()"),
    "ema_dict": Kind("{'w': torch.zeros(2)}", "V['w'].lerp_(torch.full((2,), float(k)), 0.3)", "V['w'].sum().item()"),
    "tensor_dataset": Kind("torch.utils.data.TensorDataset(torch.arange(6.))", "V.tensors[0][k % 6] += k", "V[k % 6][0].item()", "V.tensors"),
    "torch_bits": Kind("torch.arange(8)", "V = V[torch.randperm(8)]", "V[0].item()"),
    "categorical": Kind("torch.distributions.Categorical(probs=torch.ones(4))", "V = torch.distributions.Categorical(probs=torch.arange(1., 5.) ** (k % 3))", "V.probs.max().item()", "V.probs"),
}

RANDOM = {
    "random_global": Kind("0", "V = random.random()", "V"),
    "numpy_global": Kind("0", "V = np.random.rand()", "V"),
    "torch_global": Kind("0", "V = torch.rand(1).item()", "V"),
    "random_object": Kind("random.Random(3)", "t = V.random()", "t * 30", "V.getstate()"),
    "random_gauss": Kind("random.Random(3)", "t = V.gauss(0, 1)", "t", "V.getstate()"),
    "numpy_generator": Kind("np.random.default_rng(3)", "t = V.normal()", "t", "V.bit_generator.state"),
    "numpy_philox": Kind("np.random.Generator(np.random.Philox(3))", "t = V.integers(9)", "t", "str(V.bit_generator.state)"),
    "numpy_mt": Kind("np.random.Generator(np.random.MT19937(3))", "t = V.random()", "t * 9", "str(V.bit_generator.state)"),
    "numpy_legacy": Kind("np.random.RandomState(3)", "t = V.randn()", "t", "str(V.get_state())"),
    "numpy_spawned": Kind("np.random.default_rng(3)", "t = V.spawn(1)[0].random()", "t * 9", "V.bit_generator.seed_seq.n_children_spawned"),
    "seed_sequence": Kind("np.random.SeedSequence(5)", "t = V.spawn(1)[0].generate_state(1)[0] % 31", "t", "V.n_children_spawned"),
    "torch_generator": Kind("torch.Generator().manual_seed(3)", "t = torch.rand(1, generator=V).item()", "t * 9", "V.get_state()"),
    "generators_by_name": Kind("{'a': random.Random(1), 'b': np.random.default_rng(2)}", "t = V['a'].random() + V['b'].random()", "t * 9", "(V['a'].getstate(), V['b'].bit_generator.state)"),
    "saved_random_state": Kind("random.getstate()", "random.setstate(V)\nt = random.random()\nV = random.getstate()", "t * 9"),
    "saved_torch_state": Kind("torch.get_rng_state()", "s = torch.get_rng_state()\ntorch.set_rng_state(V)\nt = torch.rand(1).item()\nV = torch.get_rng_state()\ntorch.set_rng_state(s)", "t * 9"),
    "sobol": Kind("torch.quasirandom.SobolEngine(2, scramble=True, seed=3)", "t = V.draw(1)[0, 0].item()", "t * 9", "V.num_generated"),
    "reseeded_generator": Kind("torch.Generator()", "if k % 4 == 1: V.manual_seed(k)\nt = torch.rand(1, generator=V).item()", "t * 9", "V.get_state()"),
    "generator_anew": Kind("random.Random(0)", "if k % 4 == 1: V = random.Random(k)\nt = V.random()", "t * 9", "V.getstate()"),
    "random_subclass": Kind("Counted(3)", "t = V.draw()", "t * 9 + V.drawn", "(V.drawn, V.getstate())", top="""
class Counted(random.Random):
    drawn = 0
    def draw(self):
        self.drawn += 1
        return self.random()
"""),
    "lcg": Kind("[1]", "V[0] = V[0] * 1103515245 + 12345 & 0x7FFFFFFF", "V[0] % 97"),
}

ITERATORS = {
    "generator": Kind("fibonacci()", "t = next(V)", "t", "t", top="""
def fibonacci():
    a, b = 0, 1
    while True:
        yield a
        a, b = b, (a + b) % 97
"""),
    "generator_pieces": Kind("pieces()", "t = next(V)", "t", "t", top="""
def pieces():
    n = 0
    while True:
        yield n
        n += 1
        if n % 3 == 0:
            yield -n
        for j in range(n % 4):
            yield j * 10
"""),
    "generator_send": Kind("echo()", "t = V.send(None if k == 1 else k)", "t", "t", top="""
def echo():
    total, got = 0, 0
    while True:
        got = yield total
        total = (total * 3 + (got or 0)) % 101
"""),
    "generator_delegates": Kind("outer()", "t = next(V)", "t", "t", top="""
def inner(n):
    for j in range(n):
        yield j + n
def outer():
    n = 1
    while True:
        yield from inner(n)
        n += 1
"""),
    "generator_with_random": Kind("shuffled()", "t = next(V)", "t", "t", top="""
def shuffled():
    rng = random.Random(7)
    while True:
        order = list(range(5))
        rng.shuffle(order)
        yield from order
"""),
    "generator_try": Kind("guarded()", "t = next(V)", "t", "t", top="""
def guarded():
    n = 0
    while True:
        try:
            n += 1
            if n % 4 == 0:
                raise KeyError(n)
            yield n
        except KeyError as error:
            yield -error.args[0]
"""),
    "expression": Kind("(j * j % 23 for j in itertools.count())", "t = next(V)", "t", "t"),
    "count": Kind("itertools.count(5, 3)", "t = next(V)", "t", "t"),
    "cycle": Kind("itertools.cycle([4, 1, 8])", "t = next(V)", "t", "t"),
    "cycle_generator": Kind("itertools.cycle(j * 2 for j in range(5))", "t = next(V)", "t", "t"),
    "chain": Kind("itertools.chain(range(3), itertools.count(40))", "t = next(V)", "t", "t"),
    "chain_from": Kind("itertools.chain.from_iterable([j, -j] for j in itertools.count())", "t = next(V)", "t", "t"),
    "islice": Kind("itertools.islice(itertools.count(), 1, None, 2)", "t = next(V)", "t", "t"),
    "accumulate": Kind("itertools.accumulate(itertools.count())", "t = next(V)", "t", "t"),
    "starmap": Kind("itertools.starmap(max, zip(itertools.count(), itertools.cycle([3, 9])))", "t = next(V)", "t", "t"),
    "takewhile": Kind("itertools.takewhile(lambda j: j < 99, itertools.count())", "t = next(V)", "t", "t"),
    "dropwhile": Kind("itertools.dropwhile(lambda j: j < 9, itertools.count())", "t = next(V)", "t", "t"),
    "pairwise": Kind("itertools.pairwise(j * j % 7 for j in itertools.count())", "t = sum(next(V))", "t", "t"),
    "permutations": Kind("itertools.permutations(range(5))", "t = next(V)[1]", "t", "t"),
    "combinations": Kind("itertools.combinations(range(9), 3)", "t = next(V)[1]", "t", "t"),
    "product": Kind("itertools.product(range(4), range(6))", "t = sum(next(V))", "t", "t"),
    "groupby": Kind("itertools.groupby(itertools.count(), lambda j: j // 2)", "t = next(V)[0]", "t", "t"),
    "tee": Kind("itertools.tee(itertools.count())", "t = next(V[0]) + (next(V[1]) if k % 2 else 0)", "t", "t"),
    "zip": Kind("zip(itertools.count(), itertools.cycle([2, 7, 7]))", "t = sum(next(V))", "t", "t"),
    "enumerate": Kind("enumerate(itertools.cycle([2, 7, 7]))", "t = sum(next(V))", "t", "t"),
    "map": Kind("map(lambda a: a * a % 29, itertools.count())", "t = next(V)", "t", "t"),
    "filter": Kind("filter(lambda a: a % 3, itertools.count())", "t = next(V)", "t", "t"),
    "list_iterator": Kind("iter([j * j % 31 for j in range(99)])", "t = next(V)", "t", "t"),
    "dict_iterator": Kind("iter({j * j: 0 for j in range(99)})", "t = next(V)", "t", "t"),
    "set_iterator": Kind("iter({j * j for j in range(99)})", "t = next(V)", "t", "t"),
    "string_iterator": Kind("iter('abcdefghijklmnopqrstuvwxyz' * 3)", "t = ord(next(V))", "t", "t"),
    "reversed": Kind("reversed(range(99))", "t = next(V)", "t", "t"),
    "reversed_list": Kind("reversed([j * j for j in range(99)])", "t = next(V)", "t", "t"),
    "sentinel": Kind("iter(random.Random(5).random, 2.0)", "t = next(V)", "t * 9", "t"),
    "tensor_iterator": Kind("iter(torch.arange(60.).split(2))", "t = next(V).sum().item()", "t", "t"),
    "numpy_iterator": Kind("iter(np.arange(90.))", "t = next(V)", "t", "t"),
    "ndenumerate": Kind("np.ndenumerate(np.arange(90.).reshape(9, 10))", "t = next(V)[1]", "t", "t"),
    "finditer": Kind("re.finditer(r'\\d+', ' '.join(map(str, range(90))))", "t = int(next(V)[0])", "t", "t"),
    "csv_reader": Kind("csv.reader([f'{j},{j * 2}' for j in range(90)])", "t = int(next(V)[1])", "t", "t"),
    "bytes_iterator": Kind("iter(bytes(range(90)))", "t = next(V)", "t", "t"),
    "struct_iterator": Kind("struct.iter_unpack('<h', bytes(range(200)))", "t = next(V)[0]", "t % 11", "t"),
    "memoryview_iterator": Kind("iter(memoryview(bytes(range(90))))", "t = next(V)", "t", "t"),
    "deque_iterator": Kind("iter(collections.deque(range(90)))", "t = next(V)", "t", "t"),
    "array_iterator": Kind("iter(array.array('i', range(90)))", "t = next(V)", "t", "t"),
    "items_iterator": Kind("iter({j: j * 3 for j in range(90)}.items())", "t = sum(next(V))", "t", "t"),
    "module_parameters": Kind("itertools.cycle(nn.Linear(2, 2).parameters())", "t = next(V).numel()", "t", "t"),
    "tokenizer": Kind("iter(ShiftedLexer('a 1 b 2 ' * 20))", "t = len(next(V))", "t", "t", top="""
class ShiftedLexer:
    def __init__(self, text):
        self.words, self.at = text.split(), 0
    def __iter__(self):
        while self.at < len(self.words):
            self.at += 1
            yield self.words[self.at - 1] * (self.at % 5)
"""),
    "coroutine": Kind("ticking()", "t = V.send(None)", "t", "t", top="""
class Yielded:
    def __init__(self, n):
        self.n = n
    def __await__(self):
        yield self.n
async def ticking():
    n = 0
    while True:
        await Yielded(n)
        n = (n * 2 + 1) % 37
"""),
}

LIBRARY = {
    "queue": Kind("queue.Queue()", "V.put(k * 3 % 7)\nt = V.get() if V.qsize() > 2 else 0", "t + V.qsize()", "list(V.queue)"),
    "priority_queue": Kind("queue.PriorityQueue()", "V.put(k * 3 % 7)\nt = V.get() if V.qsize() > 2 else 0", "t + V.qsize()", "list(V.queue)"),
    "simple_queue": Kind("queue.SimpleQueue()", "V.put(k * 3 % 7)\nt = V.get() if V.qsize() > 2 else 0", "t + V.qsize()", "V.qsize()"),
    "config_parser": Kind("configparser.ConfigParser()", "V.read_dict({'a': {'n': str(k), f'k{k % 3}': '1'}})", "len(V['a']) + V.getint('a', 'n')", "dict(V['a'])"),
    "event": Kind("threading.Event()", "(V.set if k % 3 else V.clear)()", "V.is_set()", "V.is_set()"),
    "semaphore": Kind("threading.Semaphore(50)", "V.acquire()", "V._value", "V._value"),
    "lock_held": Kind("threading.Lock()", "(V.release if V.locked() else V.acquire)()", "V.locked()", "V.locked()"),
    "thread_local": Kind("threading.local()", "V.n = getattr(V, 'n', 0) + k", "V.n", "V.n"),
    "context_var": Kind("contextvars.ContextVar('n', default=0)", "V.set(V.get() + k)", "V.get()", "V.get()"),
    "mp_value": Kind("multiprocessing.Value('i', 0)", "V.value += k", "V.value", "V.value"),
    "mp_array": Kind("multiprocessing.Array('d', 3)", "V[k % 3] += k", "V[0]", "list(V)"),
    "ctypes": Kind("ctypes.c_int(0)", "V.value += k", "V.value", "V.value"),
    "ctypes_array": Kind("(ctypes.c_int * 4)()", "V[k % 4] += k", "V[1]", "list(V)"),
    "ctypes_struct": Kind("Packed()", "V.a += k\nV.b = V.a / 2", "V.a + V.b", "(V.a, V.b)", top="""
class Packed(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]
"""),
    "hashlib": Kind("hashlib.sha256()", "V.update(bytes([k]))", "V.digest()[0]", "V.hexdigest()"),
    "compressor": Kind("zlib.compressobj()", "t = len(V.compress(bytes([k]) * 9) + V.flush(zlib.Z_SYNC_FLUSH))", "t", "t"),
    "decoder": Kind("codecs.getincrementaldecoder('utf-8')()", "t = V.decode(bytes([195, 169])[k % 2:k % 2 + 1]) if k % 2 == 0 or V.getstate()[0] else ''", "len(t)", "V.getstate()"),
    "sqlite": Kind("sqlite3.connect(':memory:')", "V.execute('create table if not exists t (n)')\nV.execute('insert into t values (?)', (k,))", "V.execute('select sum(n) from t').fetchone()[0]", "V.execute('select count(*) from t').fetchone()"),
    "etree": Kind("ET.Element('root')", "ET.SubElement(V, 'a').text = str(k)\nV.set('n', str(k))", "len(V) + int(V.get('n'))", "ET.tostring(V)"),
    "logger_counter": Kind("Counting()", "V.handle(k)", "V.n", "V.n", top="""
class Counting(logging.Handler):
    n = 0
    def handle(self, record):
        self.n += record
"""),
    "filter_object": Kind("OncePer()", "V.filter(k)", "len(V.seen)", "V.seen", top="""
class OncePer(logging.Filter):
    def __init__(self):
        super().__init__()
        self.seen = []
    def filter(self, record):
        self.seen.append(record)
        return True
"""),
    "thread_subclass": Kind("Worker()", "V.jobs += k", "V.jobs", "V.jobs", top="""
class Worker(threading.Thread):
    jobs = 0
"""),
    "namespace_type": Kind("type('Made', (), {'n': 0})", "V.n += k", "V.n", "V.n"),
    "module_made": Kind("types.ModuleType('made')", "V.n = getattr(V, 'n', 0) + k", "V.n", "V.n"),
    "mapping_proxy": Kind("types.MappingProxyType({'n': []})", "V['n'].append(k)", "sum(V['n'])", "list(V['n'])"),
    "weak_value_dict": Kind("WeakBag()", "V.move(k)", "sum(V.items.values())", "sorted(V.items.items())", top="""
class WeakBag:
    class Cell:
        def __init__(self, n):
            self.n = n
        def __add__(self, other):
            return self.n + other
        __radd__ = __add__
    def __init__(self):
        self.items = {}
        self.kept = weakref.WeakValueDictionary()
    def move(self, k):
        self.items[k % 3] = k
        self.kept[k % 3] = self
"""),
    "weak_set": Kind("Members()", "V.move(k)", "len(V.alive)", "len(V.alive)", top="""
class Members:
    class One:
        pass
    def __init__(self):
        self.alive, self.held = weakref.WeakSet(), []
    def move(self, k):
        one = Members.One()
        self.alive.add(one)
        self.held.append(one)
        if k % 3 == 0:
            self.alive.discard(self.held.pop(0))
"""),
    "mmap": Kind("mmap.mmap(-1, 64)", "V[k % 64] = k", "sum(V[:])", "V[:]"),
    "shared_memory": Kind("torch.zeros(4).share_memory_()", "V[k % 4] += k", "V.sum().item()"),
    "file_written": Kind("tempfile.TemporaryFile('w+')", "V.write(f'{k},')\nV.flush()", "V.tell()", "V.tell()"),
    "future": Kind("None", "t = V.result() if V is not None else 0\nV = POOL.submit(pow, k, 2)", "t", "V.result()", top="""
POOL = concurrent.futures.ThreadPoolExecutor(1)
"""),
    "lru_cache": Kind("memoized", "t = V(k // 3)", "t + CALLS[0]", "CALLS[0]", top="""
CALLS = [0]
@functools.lru_cache(maxsize=None)
def memoized(n):
    CALLS[0] += 1
    return n
"""),
    "single_dispatch": Kind("describe", "V.register(KINDS_[k % 3], lambda x: k)", "V(1) + V('')", "V(1)", top="""
KINDS_ = [int, str, float]
@functools.singledispatch
def describe(x):
    return 0
"""),
    "template": Kind("string.Template('$a')", "V.template = V.template + '$b' * (k % 2)", "len(V.template)", "V.template"),
    "struct_time": Kind("time.gmtime(0)", "V = time.gmtime(calendar.timegm(V) + 3600 * k)", "V.tm_hour", "tuple(V)"),
    "deque_of_tensors": Kind("collections.deque(maxlen=3)", "V.append(torch.full((2,), float(k)))", "float(sum(t.sum() for t in V))", "list(V)"),
    "pool_thread": Kind("Prefetch()", "t = V.next()", "t", "t", top="""
class Prefetch:
    def __init__(self):
        self.box, self.n = queue.Queue(1), 0
        threading.Thread(target=self.run, daemon=True).start()
    def run(self):
        while True:
            self.box.put(self.n)
            self.n += 3
    def next(self):
        return self.box.get() % 50
"""),
    "child_process": Kind("Child()", "t = V.ask(k)", "t", "t", top="""
class Child:
    def __init__(self):
        self.pipe, other = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self.serve, args=(other,), daemon=True)
        self.process.start()
    @staticmethod
    def serve(pipe):
        total = 0
        while True:
            total = (total * 3 + pipe.recv()) % 101
            pipe.send(total)
    def ask(self, k):
        self.pipe.send(k)
        return self.pipe.recv()
"""),
    "environ": Kind("os.environ", "V['CASE_N'] = str(int(V.get('CASE_N', '0')) + k)", "int(V['CASE_N'])", "V['CASE_N']"),
    "decimal_context": Kind("decimal.getcontext()", "V.prec = 5 + k % 9", "decimal.Decimal(1) / 7 * 50", "V.prec"),
    "seen_warnings": Kind("{}", "V.update({('x', k % 4): True})", "len(V)"),
    "sys_attribute": Kind("sys", "V.case_n = getattr(V, 'case_n', 0) + k", "V.case_n", "V.case_n"),
    "torch_attribute": Kind("torch", "V.case_n = getattr(V, 'case_n', 0) + k", "V.case_n", "V.case_n"),
    "recursion_limit": Kind("sys", "V.setrecursionlimit(2000 + k)", "V.getrecursionlimit() % 50", "V.getrecursionlimit()"),
    "graph_library_like": Kind("collections.defaultdict(dict)", "V[k % 4][k % 3] = V[k % 3]", "len(V) + len(V[k % 4])", "sorted(V)"),
    "textwrapper": Kind("io.TextIOWrapper(io.BytesIO(b''.join(b'%d\\n' % j for j in range(90))))", "t = int(V.readline())", "t", "t"),
    "string_reader": Kind("io.StringIO(''.join(f'{j}\\n' for j in range(90)))", "t = int(next(V))", "t", "t"),
    "random_sampler_iterator": Kind("iter(torch.utils.data.RandomSampler(range(90), generator=torch.Generator().manual_seed(1)))", "t = next(V)", "t", "t"),
    "torch_dict": Kind("nn.ParameterDict({'a': nn.Parameter(torch.zeros(1))})", "V['a'].data.add_(k)", "V['a'].item()", "{n: p.detach() for n, p in V.items()}"),
    "buffer_dict": Kind("nn.Module()", "V.register_buffer('b', torch.full((2,), float(k)))", "V.b.sum().item()", "V.b"),
    "scheduler_alone": Kind("torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 2, 0.7)", "V.optimizer.step()\nV.step()", "V.get_last_lr()[0]", "V.state_dict()"),
    "profile": Kind("torch.autograd.profiler.record_function('x')", "V.n = getattr(V, 'n', 0) + k", "V.n", "V.n"),
    "averager": Kind("torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1))", "V.module.weight.data.add_(k)\nV.update_parameters(V.module)", "V.n_averaged.item()", "V.state_dict()"),
    "tensor_queue": Kind("[torch.zeros(4, 2), 0]", "V[0][V[1]] = k\nV[1] = (V[1] + 1) % 4", "V[0].sum().item() + V[1]"),
    "user_string": Kind("collections.UserString('a')", "V = collections.UserString(str(V)[-5:] + 'bc'[k % 2])", "sum(map(ord, str(V)))", "str(V)"),
    "bisect": Kind("[]", "bisect.insort(V, k * 7 % 19)", "V[len(V) // 2]"),
    "statistics_normal": Kind("statistics.NormalDist(0, 1)", "V = V + statistics.NormalDist(k, 1)", "V.mean + V.variance", "(V.mean, V.variance)"),
    "ipaddress": Kind("ipaddress.ip_address('10.0.0.1')", "V = V + k", "int(V) % 91", "str(V)"),
    "uuid": Kind("uuid.UUID(int=5)", "V = uuid.UUID(int=V.int + k)", "V.int", "str(V)"),
    "match": Kind("re.match(r'.', 'a')", "V = re.match(r'.{%d}' % (k % 4), 'abcdef')", "V.end()", "V.group()"),
    "pattern": Kind("re.compile('a')", "V = re.compile('a{%d}' % (k % 4))", "len(V.pattern)", "V.pattern"),
    "code_namespace": Kind("{'n': 0}", "exec(f'n = n + {k}', V)", "V['n']", "V['n']"),
    "generator_in_dict": Kind("{'g': itertools.count(2)}", "t = next(V['g'])", "t", "t"),
    "iterator_list": Kind("[iter(range(90)), iter(range(40, 130))]", "t = next(V[k % 2])", "t", "t"),
}
