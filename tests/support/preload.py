"""What the server of test processes has loaded before it forks: torch, ullage, its attention for
transformers' models, and the planner's compiled loops."""

import torch
import torch.distributed.device_mesh

import ullage
import ullage.attention
import ullage.exchange

torch.set_num_threads(1)
ullage.plan(range(1, 40), ranks=3, capacity=64, pad_to_multiple_of=4)
