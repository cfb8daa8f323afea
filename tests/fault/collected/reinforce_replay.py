# DQN as in PyTorch's tutorial: a replay memory, an epsilon schedule, a target network, a small environment.
Transition = collections.namedtuple("Transition", "state action next_state reward")


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = collections.deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, size):
        return random.sample(self.memory, size)


class Walk:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.at, self.turns = self.rng.normal(size=4), 0
        return torch.tensor(self.at, dtype=torch.float32)

    def step(self, action):
        self.turns += 1
        self.at = self.at * 0.9 + (0.1 if action else -0.1) + self.rng.normal(size=4) * 0.05
        return torch.tensor(self.at, dtype=torch.float32), -float(np.abs(self.at).sum()), self.turns >= 9


policy, target = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
target.load_state_dict(policy.state_dict())
ddp = DDP(policy)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, amsgrad=True)
memory, env, steps_done, durations = ReplayMemory(24), Walk(3 + RANK), 0, []


def select_action(state):
    global steps_done
    epsilon = 0.05 + 0.85 * math.exp(-steps_done / 20)
    steps_done += 1
    if random.random() > epsilon:
        with torch.no_grad():
            return int(policy(state).argmax())
    return random.randrange(2)


step = 0
for episode in itertools.count():
    state, total = env.reset(), 0.0
    for t in itertools.count():
        action = select_action(state)
        after, reward, over = env.step(action)
        total += reward
        memory.push(state, action, after, reward)
        state = after
        if len(memory.memory) >= 6:
            batch = Transition(*zip(*memory.sample(6)))
            values = ddp(torch.stack(batch.state)).gather(1, torch.tensor(batch.action)[:, None]).squeeze(1)
            with torch.no_grad():
                wanted = torch.tensor(batch.reward) + 0.9 * target(torch.stack(batch.next_state)).max(1).values
            loss = F.smooth_l1_loss(values, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), policy.parameters()):
                    slow.lerp_(fast, 0.05)
            step += 1
            say(step, loss, [steps_done, action])
            if step == 14:
                break
        if over:
            break
    durations.append(total)
    if step == 14:
        break
final(policy=policy.state_dict(), target=target.state_dict(), opt=optimizer.state_dict(), memory=list(memory.memory), done=steps_done, durations=durations)
dist.destroy_process_group()
