# torchvision: random transforms, CutMix in the collate function, a small ResNet, an EMA as in its references.
from torch.utils.data import default_collate
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock
from torchvision.transforms import v2


class Images(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(2)
        self.images, self.labels = torch.rand(16, 3, 12, 12, generator=g), torch.randint(3, (16,), generator=g)
        self.transform = v2.Compose([v2.RandomCrop(8), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2), v2.RandomErasing(0.5), v2.RandAugment(1)][:4])

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return i, self.transform(self.images[i]), self.labels[i]


mix = v2.RandomChoice([v2.CutMix(num_classes=3), v2.MixUp(num_classes=3)])


def collate(rows):
    ids, x, y = default_collate(rows)
    x, y = mix(x, y)
    return ids, x, y


class EMA(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay):
        super().__init__(model, avg_fn=lambda a, m, n: decay * a + (1 - decay) * m, use_buffers=True)


model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3)
ddp, ema = DDP(model), EMA(model, 0.9)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=True)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)], [1])
loader = DataLoader(Images(), 4, shuffle=True, collate_fn=collate)
step = 0
for epoch in range(3):
    for i, (ids, x, y) in enumerate(loader):
        loss = F.cross_entropy(ddp(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2 == 0:
            ema.update_parameters(model)
            if epoch < 1:
                ema.n_averaged.fill_(0)
        step += 1
        say(step, loss, ids)
    scheduler.step()
final(model=model.state_dict(), opt=optimizer.state_dict(), ema=ema.state_dict(), lr=scheduler.get_last_lr())
dist.destroy_process_group()
