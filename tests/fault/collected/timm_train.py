# timm's train.py in short: model, optimizer and scheduler by factory, ModelEmaV3, mixup, AverageMeter.
import timm
import timm.data
import timm.optim
import timm.scheduler
import timm.utils

torch.manual_seed(5)
model = timm.create_model("test_vit", pretrained=False, num_classes=3, img_size=160, drop_rate=0.1)
ddp = DDP(model, find_unused_parameters=True)
optimizer = timm.optim.create_optimizer_v2(model, opt="lamb", lr=0.01, weight_decay=0.05)
scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, sched="cosine", num_epochs=4, warmup_epochs=1, warmup_lr=1e-4, updates_per_epoch=4, step_on_epochs=False)
ema = timm.utils.ModelEmaV3(model, decay=0.9, use_warmup=True)
mixup = timm.data.Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=3)
losses = timm.utils.AverageMeter()
data = TensorDataset(torch.arange(16), torch.randn(16, 3, 160, 160), torch.randint(3, (16,)))
loader = DataLoader(data, 4, sampler=timm.data.distributed_sampler.RepeatAugSampler(data, num_replicas=WORLD, rank=RANK, num_repeats=2, selected_round=0), drop_last=True)
np.random.seed(3)
step = 0
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    losses.reset()
    for ids, x, y in loader:
        x, target = mixup(x, y)
        loss = -(target * F.log_softmax(ddp(x), -1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        timm.utils.dispatch_clip_grad(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model, step=step)
        losses.update(loss.item(), len(x))
        step += 1
        scheduler.step_update(num_updates=step, metric=losses.avg)
        say(step, loss, ids)
        if step == 10:
            break
    scheduler.step(epoch + 1, losses.avg)
    if step == 10:
        break
final(model=model.state_dict(), opt=optimizer.state_dict(), ema=ema.module.state_dict(), sched=scheduler.state_dict(), losses=[losses.avg, losses.count])
dist.destroy_process_group()
