# transformers: a tiny BERT with a plain loop, a schedule and a masking collator, as in the course.
from transformers import BertConfig, BertForMaskedLM, get_cosine_schedule_with_warmup

config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=12)
torch.manual_seed(5)
model = BertForMaskedLM(config)
ddp = DDP(model, find_unused_parameters=True)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
scheduler = get_cosine_schedule_with_warmup(optimizer, 3, 20)


class Mask:
    def __init__(self, probability):
        self.probability, self.rng, self.masked = probability, np.random.default_rng(4), 0

    def __call__(self, rows):
        ids, tokens = torch.tensor([r[0] for r in rows]), torch.stack([r[1] for r in rows])
        chosen = torch.from_numpy(self.rng.random(tokens.shape) < self.probability)
        self.masked += int(chosen.sum())
        return ids, tokens.masked_fill(chosen, 3), tokens.masked_fill(~chosen, -100)


collate = Mask(0.3)
data = TensorDataset(torch.arange(16), torch.randint(4, 40, (16, 8)))
loader = DataLoader(data, 4, shuffle=True, collate_fn=collate)
step = 0
for epoch in range(3):
    model.train()
    for ids, tokens, labels in loader:
        loss = ddp(input_ids=tokens, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        say(step, loss, ids)
final(model=model.state_dict(), opt=optimizer.state_dict(), lr=scheduler.get_last_lr(), masked=collate.masked)
dist.destroy_process_group()
