"""Random training scripts for `tools/dev fault scripts`: parts, assembly, trial."""
