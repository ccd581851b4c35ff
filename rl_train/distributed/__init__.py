"""Ranks: the process group, DistributedDataParallel, a sharded base, the launcher."""
