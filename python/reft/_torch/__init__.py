"""What torch.distributed needs of a backend."""
