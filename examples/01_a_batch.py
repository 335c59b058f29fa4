"""A batch of sequences of unequal length, in every form that something else wants it in.

python examples/01_a_batch.py
"""

import numpy as np
import torch

import ullage

# Samples as a dataset gives them: tokens, labels, and one number a sequence.
samples = [
    {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "weight": 1.0},
    {"input_ids": [8], "labels": [8], "weight": 0.5},
    {"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, 4, 5], "weight": 2.0},
]
batch = ullage.RaggedBatch.from_samples(samples)
print("flat       ", batch["input_ids"].tolist())
print("cu_seqlens ", batch.cu_seqlens.tolist())
print("positions  ", batch.position_ids.tolist())

# Padded, for what needs a rectangle; and back, with nothing of the padding left.
padded = batch.to_padded(padding_value=0)
print("padded     ", padded["input_ids"].tolist())
again = ullage.RaggedBatch.from_padded({"input_ids": padded["input_ids"]}, padded["attention_mask"])
assert torch.equal(again["input_ids"], batch["input_ids"])

# A PackedSequence, for a torch recurrent layer: one index, no padded detour.
packed = batch.to_packed_sequence("input_ids")
print("packed     ", packed.data.tolist(), "batch sizes", packed.batch_sizes.tolist())

# Keywords of padding-free models; the first label of each sequence is -100, so no loss crosses a boundary.
flattened = batch.to_flattened()
print("labels     ", flattened["labels"].tolist())

# The layout behind it is an idea of its own: segments with their padding in one buffer, cut by shards. Three segments
# padded to multiples of 4, on two shards of 8: which part of which segment lies where?
layout = ullage.Layout([3, 1, 5], pad_to_multiple_of=4)
pieces = layout.pieces(np.array([0, 8, 16]))
for item, shard, start, length in zip(pieces.item, pieces.shard, pieces.shard_start, pieces.length, strict=True):
    print(f"segment {item}: {length} elements on shard {shard} from {start}")
print(f"{layout.size} slots, {layout.num_tokens} tokens, ullage {layout.ullage:.0%}")
