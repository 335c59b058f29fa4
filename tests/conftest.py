"""What all tests share: nothing depends on how fast this machine is, and no test reaches the network."""

import os

from hypothesis import settings

settings.register_profile("ullage", deadline=None)
settings.load_profile("ullage")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
