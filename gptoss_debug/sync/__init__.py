"""Weight sync: the loader that is right, and the oracles that prove it."""

from gptoss_debug.sync.client import sync_weights
from gptoss_debug.sync.weight_sync import SyncReport, WeightSync
from gptoss_debug.sync.worker import SyncWorker

__all__ = ["SyncReport", "SyncWorker", "WeightSync", "sync_weights"]
