"""Puts the parts of a random training script together. All of it follows from (seed, number)."""

from __future__ import annotations

import random
import re
import symtable
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.script_case import kinds, kinds_more, parts
from tests.support.script_case.holders import FUNCTIONS, INLINE, State, held
from tests.support.script_case.kinds import Kind

KINDS: dict[str, Kind] = {
    **kinds.PLAIN, **kinds.OWN, **kinds_more.TENSORS, **kinds_more.RANDOM, **kinds_more.ITERATORS, **kinds_more.LIBRARY,
}  # fmt: skip
GROUPS = [kinds.PLAIN, kinds.OWN, kinds_more.TENSORS, kinds_more.RANDOM, kinds_more.ITERATORS, kinds_more.LIBRARY]
STEPS = 12
# Gaps that docs/resume.md lists, and state that no snapshot of a process can have.
KNOWN_GAPS = {"on_enum", "lru_cache", "environ", "pool_thread", "child_process", "sys_attribute", "torch_attribute", "lock_held", "numpy_structured", "file_written"}
# What is named wherever it stands: a script with one of these shows nothing of its other pieces.
NAMED = {
    *("memoryview_iterator", "array_iterator", "deque_iterator", "takewhile", "dropwhile", "pairwise", "permutations"),
    *("combinations", "groupby", "tee", "finditer", "csv_reader", "struct_iterator", "numpy_iterator", "ndenumerate"),
    *("tensor_subclass", "tensor_sparse", "numpy_object", "int_subclass", "random_subclass", "sqlite", "etree", "hashlib"),
    *("compressor", "coroutine", "mmap", "queue", "priority_queue", "simple_queue", "future", "decimal_context", "match"),
    *("ctypes_struct", "pattern", "deep", "on_future", "string_reader", "textwrapper", "tensor_iterator"),
}  # fmt: skip

# Where a piece of state changes. The last are for functions alone.
USES = ["batch", "batch", "after", "third", "late", "epoch", "unread", "created_late"]
HOOKS = [
    "forward", "pre_hook", "forward_hook", "backward_pre_hook", "grad_hook", "post_accumulate", "step_pre", "step_post",
    "item", "collate", "lambda_lr", "comm_hook", "saved_tensors", "sampler", "thread",
]  # fmt: skip
STYLES = ["module", "main", "main", "trainer", "trainer", "nested", "while", "generator", "asyncio", "thread", "scoped", "enumerate", "zip"]
UPDATES = ["plain", "plain", "plain", "accumulate", "scaler", "closure", "two_optimizers", "clip", "ema", "freeze", "lbfgs"]

HELPERS = """
def nudge(function, by=0.05):
    return 1 + by * math.tanh(float(function(CLOCK[0])) * 0.01)
def drift(optimizer, function):
    with torch.no_grad():
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(nudge(function))
def drift_one(p, function):
    if p.grad is not None:
        p.grad.mul_(nudge(function))
def averaged(model):
    for p in model.parameters():
        if p.grad is not None and not hasattr(p, "to_local"):
            dist.all_reduce(p.grad)
            p.grad /= WORLD
def comm_hook(function):
    def hook(state, bucket):
        buffer = bucket.buffer() / WORLD * nudge(function)
        dist.all_reduce(buffer)
        future = torch.futures.Future()
        future.set_result(buffer)
        return future
    return hook
def in_thread(function, k):
    out = []
    thread = threading.Thread(target=lambda: out.append(float(function(k))))
    thread.start()
    thread.join()
    return out[0]
"""


@dataclass
class Choice:
    """What a script is made of; all that `text` needs.

    Attributes:
        states: (kind, holder, use) of each piece.
    """

    model: str = "mlp"
    wrap: str = "manual"
    optimizer: str = "sgd"
    scheduler: str = "step"
    loader: str = "sequential"
    style: str = "main"
    update: str = "plain"
    states: list[tuple[str, str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        words = [self.model, self.wrap, self.optimizer, self.scheduler, self.loader, self.style, self.update]
        return " ".join([*words, *(f"[{k} in {h}, {u}]" for k, h, u in self.states)])


def draw(seed: int, number: int, most: int = 6) -> Choice:
    """Case `number` of a campaign."""
    rng = random.Random(f"{seed}:{number}")
    choice = Choice(
        model=rng.choice(list(parts.MODELS)),
        wrap=rng.choice(["ddp", "ddp", "ddp_static", "manual", "manual", "fsdp"]),
        optimizer=rng.choice(list(parts.OPTIMIZERS)),
        scheduler=rng.choice(list(parts.SCHEDULERS)),
        loader=rng.choice(list(parts.LOADERS)),
        style=rng.choice(STYLES),
        update=rng.choice(UPDATES),
    )
    if choice.wrap == "ddp_static" and choice.update == "lbfgs":
        choice.wrap = "ddp"
    if choice.update == "freeze":
        choice.wrap = "manual"
    if choice.wrap == "fsdp":  # needs elementwise optimizers and plain modules
        choice.model = rng.choice(["mlp", "dropout", "counting"])
        choice.optimizer = rng.choice(["sgd", "adamw", "adam"])
        choice.update = rng.choice(["plain", "ema", "accumulate"])
    if choice.update == "scaler":
        choice.optimizer = rng.choice(["sgd", "adam", "rmsprop"])
    if choice.loader in ("workers", "persistent", "iterable_workers") and choice.style == "thread":
        choice.style = "main"
    for _ in range(rng.randrange(3, most + 1)):
        group = rng.choice(GROUPS)
        left_out = KNOWN_GAPS if rng.random() < 0.04 else KNOWN_GAPS | NAMED
        kind = rng.choice([name for name in group if name not in left_out])
        if rng.random() < 0.55:
            holder, use = rng.choice([name for name in INLINE if name not in left_out]), rng.choice(USES)
        else:
            holder, use = rng.choice(list(FUNCTIONS)), rng.choice(USES + HOOKS + HOOKS)
        if holder == "on_loader" and choice.loader == "list":
            holder = "local"
        choice.states.append((kind, holder, use))
    return choice


def text(choice: Choice, title: str = "") -> str:
    """The script, complete."""
    states = [held(n, k, KINDS[k], h) for n, (k, h, _) in enumerate(choice.states)]
    uses = [u for _, _, u in choice.states]
    head = [f'"""{title or choice}"""', parts.PRELUDE, HELPERS]
    for kind_name in dict.fromkeys(k for k, _, _ in choice.states):
        if top := KINDS[kind_name].top:
            head.append(top)
    for state, (kind_name, _, _) in zip(states, choice.states, strict=True):
        head.append(state.top.removeprefix(KINDS[kind_name].top))
    calls = {use: [f"tick{s.number}" for s, u in zip(states, uses, strict=True) if u == use and s.function] for use in HOOKS}
    forward = "\n".join(f"x = x * nudge({name})" for name in calls["forward"]) or "pass"
    head.append(placed(parts.MODELS[choice.model], FORWARD=forward))
    item = "\n".join(f"x = x * nudge({name})" for name in calls["item"]) or "pass"
    head.append(placed(parts.DATA, ITEM=item))
    samplers = parts.SAMPLERS
    for name in calls["sampler"]:
        samplers += f"\n_in_order = random.Random.randrange\ndef _turned(self, n):\n    return (_in_order(self, n) + int({name}(CLOCK[0])) % 3) % n\nOwnSampler_turn = _turned\n"
    head += [samplers, parts.OWN_OPTIMIZER, parts.OWN_SCHEDULE]
    collate = ""
    if calls["collate"]:
        head.append(parts.COLLATE.replace("(1 + 0.1 * (self.batches % 3))", " * ".join(["(1 + 0.1 * (self.batches % 3))", *(f"nudge({n})" for n in calls["collate"])])))
        collate = ", collate_fn=Collate()"
    if choice.loader == "own_loader" or choice.loader in ("list", "generator_function"):
        collate = ""
    body = _Body(choice, states, uses, calls, collate)
    return "\n".join([*head, _loop(choice.style, body)])


def placed(template: str, **pieces: str) -> str:
    """With pieces of code in place of lines that are their names, indented as those lines."""
    out = []
    for line in template.split("\n"):
        word = line.strip()
        out.append(textwrap.indent(pieces[word], line[: len(line) - len(word)]) if word in pieces else line)
    return "\n".join(out)


class _Body:
    """The four blocks of a script's loop, with § for the owner of its variables."""

    def __init__(self, choice: Choice, states: Sequence[State], uses: Sequence[str], calls: dict[str, list[str]], collate: str) -> None:
        loader, self.epoch = parts.LOADERS[choice.loader]
        scheduler = parts.SCHEDULERS[choice.scheduler]
        if calls["lambda_lr"]:
            scheduler = f"torch.optim.lr_scheduler.LambdaLR(§optimizer, lambda e: {' * '.join(f'nudge({n}, 0.5)' for n in calls['lambda_lr'])})"
        size = "16 * WORLD" if choice.loader == "distributed" else "24" if choice.loader == "iterable_buffered" else "16"
        optimizer = parts.OPTIMIZERS[choice.optimizer]
        setup = ["§step, §carry, §history, §total = 0, 0.0, [], 0.0", f"§data = Items({size})", "§core = Core()", parts.WRAPS[choice.wrap]]
        if choice.update == "lbfgs":
            optimizer = "torch.optim.LBFGS(§core.parameters(), lr=0.1, max_iter=2, history_size=3)"
        if choice.update == "two_optimizers":
            optimizer = "torch.optim.SGD(§core.first.parameters(), lr=0.05, momentum=0.5)"
        setup.append(f"§optimizer = {optimizer}")
        if choice.update == "two_optimizers":
            setup.append("§second = torch.optim.Adam([p for n, p in §core.named_parameters() if not n.startswith('first')], lr=0.01)")
        setup += [f"§scheduler = {scheduler}", f"§loader = {loader.replace('COLLATE', collate)}"]
        if choice.update == "scaler":
            setup.append("§scaler = torch.amp.GradScaler('cpu', init_scale=64.0, growth_interval=3)")
        if choice.update == "ema":
            setup.append("§ema = copy.deepcopy(§core.state_dict()) if True else None")
        if choice.update == "freeze":
            setup.append("§core.first.requires_grad_(False)")
        setup.append("torch.manual_seed(50 + RANK)")
        step = ["§step += 1", "CLOCK[0] = §step", "noise = 0.0"]
        after, epoch_end, final = [], [], []
        dumps = ["model=[§core.state_dict(), [list(b) for b in §core.named_buffers()], vars_of(§core)]", "opt=§optimizer.state_dict()",
                 "sched=vars_of(§scheduler)", "history=§history", "step=[§step, §carry, §total]", "rng=[random.random(), np.random.rand(), torch.rand(1)]"]  # fmt: skip
        if choice.update == "ema":
            dumps.append("ema=§ema")
        if choice.update == "two_optimizers":
            dumps.append("second=§second.state_dict()")
        if choice.update == "scaler":
            dumps.append("scaler=§scaler.state_dict()")
        for state, use in zip(states, uses, strict=True):
            lines, k = state.lines, str(state.number)
            if use == "created_late":
                if state.before:
                    step.append(f"if §step == 3:\n{textwrap.indent(state.before, '    ')}")
                    lines = f"if §step >= 3:\n{textwrap.indent(lines, '    ')}"
            elif state.before:
                setup.append(state.before)
            lines = stepped(lines)
            if use in ("batch", "created_late"):
                step.append(lines)
            elif use == "after":
                after.append(lines)
            elif use == "third":
                step.append(f"if §step % 3 == 0:\n{textwrap.indent(lines, '    ')}")
            elif use == "late":
                step.append(f"if §step > 4:\n{textwrap.indent(lines, '    ')}")
            elif use == "epoch":
                epoch_end.append(lines)
            elif use == "unread":
                step.append(f"kept = noise\n{lines}\nnoise = kept")
            elif use == "thread":
                step.append(f"noise += in_thread(tick{k}, §step)")
            elif use == "sampler":
                step.append(f"noise += tick{k}(§step)")
            setup += _hook(use, f"tick{k}")
            if use == "comm_hook" and not choice.wrap.startswith("ddp"):
                step.append(f"noise += tick{k}(§step)")
            final.append(f"noise = 0.0\n{stepped(state.lines)}\nn{k} = noise")
            dumps += [f"s{k}={state.dump}", f"n{k}=n{k}"]
        if not choice.wrap.startswith("ddp"):
            setup = [line for line in setup if "register_comm_hook" not in line]
        step.append("x = x * (1 + 0.05 * math.tanh(noise * 0.01) + 0.05 * §carry)")
        step.append(_update(choice))
        step.append("§scheduler.step()")
        step.append("§total = §total * 0.9 + loss.item()")
        if after:
            step.append("\n".join(["noise = 0.0", *after, "§carry = math.tanh(noise * 0.01)"]))
        step.append("§history.append(loss.item())\nsay(§step, loss, ids)")
        self.setup, self.step = "\n".join(setup), "\n".join(step)
        self.epoch_end = "\n".join(["noise = 0.0", *epoch_end, "§carry = §carry * 0.5 + 0.1 * math.tanh(noise * 0.01)"])
        self.final = "\n".join([*final, f"final({', '.join(dumps)})", "dist.destroy_process_group()"])


def stepped(lines: str) -> str:
    """Kinds call the number of the step k."""
    return re.sub(r"\bk\b", "§step", lines)


def _hook(use: str, tick: str) -> list[str]:
    return {
        "pre_hook": [f"§core.first.register_forward_pre_hook(lambda m, a: (a[0] * nudge({tick}),))"],
        "forward_hook": [f"§core.last.register_forward_hook(lambda m, a, o: o * nudge({tick}))"],
        "backward_pre_hook": [f"§core.last.register_full_backward_pre_hook(lambda m, g: (g[0] * nudge({tick}),))"],
        "grad_hook": [f"§core.last.bias.register_hook(lambda g: g * nudge({tick}))"],
        "post_accumulate": [f"§core.last.bias.register_post_accumulate_grad_hook(lambda p: drift_one(p, {tick}))"],
        "step_pre": [f"§optimizer.register_step_pre_hook(lambda o, a, k: drift(o, {tick}))"],
        "step_post": [f"§optimizer.register_step_post_hook(lambda o, a, k: §history.append({tick}(CLOCK[0])))"],
        "comm_hook": [f"§model.register_comm_hook(None, comm_hook({tick}))"],
        "saved_tensors": [],
    }.get(use, [])


def _update(choice: Choice) -> str:
    """From the inputs to the end of the optimizer's step."""
    average = [] if choice.wrap.startswith("ddp") or choice.wrap == "fsdp" else ["averaged(§core)"]
    loss = "loss = F.mse_loss(§model(x), y)"
    if choice.update in ("lbfgs", "closure"):
        return "\n".join([
            "def closure():", "    §optimizer.zero_grad()", "    loss = F.mse_loss(§model(x), y)", "    loss.backward()",
            *("    " + line for line in average), "    return loss", "loss = §optimizer.step(closure)",
        ])  # fmt: skip
    lines = [loss]
    if choice.update == "accumulate":
        lines += ["(loss / 2).backward()", "if §step % 2 == 0:"]
        return "\n".join([*lines, *("    " + line for line in [*average, "§optimizer.step()", "§optimizer.zero_grad()"])])
    if choice.update == "freeze":
        lines = ["if §step == 5:", "    §core.first.requires_grad_(True)", *lines]
    if choice.update == "scaler":
        return "\n".join([*lines, "§optimizer.zero_grad()", "§scaler.scale(loss).backward()", *average,
                          "§scaler.unscale_(§optimizer)", "nn.utils.clip_grad_norm_(§core.parameters(), 1.0)", "§scaler.step(§optimizer)", "§scaler.update()"])  # fmt: skip
    lines += ["§optimizer.zero_grad(set_to_none=§step % 2 == 0)"]
    if choice.update == "two_optimizers":
        lines.append("§second.zero_grad()")
    lines += ["loss.backward()", *average]
    if choice.update == "clip":
        lines.append("§total += nn.utils.clip_grad_norm_(§core.parameters(), 0.5).item()")
    lines.append("§optimizer.step()")
    if choice.update == "two_optimizers":
        lines.append("§second.step()")
    if choice.update == "ema":
        lines += ["with torch.no_grad():", "    for name, value in §core.state_dict().items():",
                  "        if value.is_floating_point(): §ema[name].lerp_(value, 0.1)"]  # fmt: skip
    return "\n".join(lines)


def _nonlocal(setup: str, inner: str) -> str:
    """The statement that an inner function needs to assign the outer one's variables."""

    def assigned(code: str) -> set[str]:
        table = symtable.symtable("def f():\n" + textwrap.indent(code, "    "), "f", "exec")
        (function,) = table.get_children()
        return {name.get_name() for name in function.get_symbols() if name.is_local()}

    names = sorted(assigned(setup) & assigned(inner))
    return f"nonlocal {', '.join(names)}" if names else "pass"


def _loop(style: str, body: _Body) -> str:
    owner = "self." if style == "trainer" else ""
    setup, epoch, step, epoch_end, final = (
        text.replace("§", owner) for text in (body.setup, body.epoch or "pass", body.step, body.epoch_end, body.final)
    )
    extra = """
def vars_of(one):
    return {n: v for n, v in sorted(vars(one).items()) if isinstance(v, (int, float, list, collections.deque))}
"""
    full = f"step >= {STEPS}"
    template = _STYLES[style]
    pieces = {"SETUP": setup, "EPOCH": epoch, "STEP": step, "EPOCH_END": epoch_end, "FINAL": final}
    if style == "nested":
        pieces["NONLOCAL"] = _nonlocal(setup, step)
        pieces["NONLOCAL_EPOCH"] = _nonlocal(setup, epoch_end)
    return extra + placed(template, **pieces).replace("FULL", owner + full)


_STYLES = {
    "module": """
SETUP
for epoch in range(99):
    EPOCH
    for ids, x, y in loader:
        STEP
        if FULL:
            break
    EPOCH_END
    if FULL:
        break
FINAL
""",
    "main": """
def main():
    SETUP
    for epoch in range(99):
        EPOCH
        for ids, x, y in loader:
            STEP
            if FULL:
                break
        EPOCH_END
        if FULL:
            break
    FINAL
if __name__ == "__main__":
    main()
""",
    "trainer": """
class Trainer:
    def __init__(self):
        SETUP
    def train_step(self, ids, x, y):
        STEP
        return FULL
    def train_epoch(self, epoch):
        EPOCH
        over = False
        for ids, x, y in self.loader:
            over = self.train_step(ids, x, y)
            if over:
                break
        EPOCH_END
        return over
    def fit(self):
        for epoch in range(99):
            if self.train_epoch(epoch):
                break
        FINAL
Trainer().fit()
""",
    "nested": """
def main():
    SETUP
    def train_step(ids, x, y):
        NONLOCAL
        STEP
        return FULL
    def end_of_epoch():
        NONLOCAL_EPOCH
        EPOCH_END
    for epoch in range(99):
        EPOCH
        for batch in loader:
            if train_step(*batch):
                break
        end_of_epoch()
        if FULL:
            break
    FINAL
main()
""",
    "while": """
def main():
    SETUP
    epoch = 0
    EPOCH
    batches = iter(loader)
    while True:
        try:
            ids, x, y = next(batches)
        except StopIteration:
            EPOCH_END
            epoch += 1
            EPOCH
            batches = iter(loader)
            ids, x, y = next(batches)
        STEP
        if FULL:
            break
    FINAL
main()
""",
    "generator": """
def batches(loader):
    for epoch in itertools.count():
        for batch in loader:
            yield epoch, batch
def main():
    SETUP
    last = 0
    for epoch, (ids, x, y) in batches(loader):
        if epoch != last:
            EPOCH_END
            last = epoch
        STEP
        if FULL:
            break
    FINAL
main()
""",
    "asyncio": """
import asyncio
async def main():
    SETUP
    for epoch in range(99):
        EPOCH
        for ids, x, y in loader:
            await asyncio.sleep(0)
            STEP
            if FULL:
                break
        EPOCH_END
        if FULL:
            break
    FINAL
asyncio.run(main())
""",
    "thread": """
def main():
    SETUP
    for epoch in range(99):
        EPOCH
        for ids, x, y in loader:
            STEP
            if FULL:
                break
        EPOCH_END
        if FULL:
            break
    FINAL
training = threading.Thread(target=main)
training.start()
training.join()
""",
    "scoped": """
@contextlib.contextmanager
def scope(box):
    box.append(1)
    try:
        yield box
    finally:
        box.append(-1)
def main():
    SETUP
    entered = []
    with contextlib.ExitStack() as stack, torch.autograd.set_detect_anomaly(False):
        box = stack.enter_context(scope(entered))
        for epoch in range(99):
            EPOCH
            try:
                for ids, x, y in loader:
                    with scope(box):
                        STEP
                    if FULL:
                        break
            finally:
                EPOCH_END
            if FULL:
                break
    history.extend(entered)
    FINAL
main()
""",
    "enumerate": """
def main():
    SETUP
    for epoch in range(99):
        EPOCH
        for number, batch in enumerate(loader, start=1):
            ids, x, y = batch
            STEP
            history.append(number)
            if FULL:
                break
        else:
            history.append(-epoch)
        EPOCH_END
        if FULL:
            break
    FINAL
main()
""",
    "zip": """
def main():
    SETUP
    other = DataLoader(range(40), batch_size=3, shuffle=True)
    for epoch in range(99):
        EPOCH
        for (ids, x, y), more in zip(loader, other):
            STEP
            history.extend(more.tolist())
            if FULL:
                break
        EPOCH_END
        if FULL:
            break
    FINAL
main()
""",
}
