"""ZeRO shards, read into an inventory: what each file holds, how flat buffers are cut, and whether files agree."""
