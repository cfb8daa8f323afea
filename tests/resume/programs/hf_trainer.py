# ranks: 2; kills: 3 7 10
# transformers.Trainer: a tiny GPT-2 from a config, evaluation every four steps, cosine schedule,
# gradient accumulation. On the CPU it takes no backend but gloo by `ddp_backend`, and uses a
# process group that is already there.
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from tests.resume.scripts.digest import digest


class Text(Dataset):
    def __init__(self, size, seed):
        self.rows = torch.randint(0, 64, (size, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Tell(TrainerCallback):
    def __init__(self, rank):
        self.rank = rank
        self.logged = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged += 1
        known = {k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k}
        print(f"r{self.rank} {state.global_step} log {self.logged} {known}", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        print(f"r{self.rank} {state.global_step} of {state.max_steps} epoch {state.epoch}", flush=True)


def main():
    torch.distributed.init_process_group(backend="reft")
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    rank = args.process_index
    trainer = Trainer(model, args, train_dataset=Text(32, 1), eval_dataset=Text(8, 2), callbacks=[Tell(rank)])
    result = trainer.train()
    print(
        f"r{rank} final {result.global_step} {result.training_loss.hex()} {trainer.state.log_history[-2].get('loss')}",
        flush=True,
    )
    print(f"r{rank} final {digest(trainer.model, trainer.optimizer, trainer.lr_scheduler)}", flush=True)


if __name__ == "__main__":
    main()
