"""The backend "reft" for torch.distributed."""
