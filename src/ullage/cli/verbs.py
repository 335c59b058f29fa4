"""The names of the verbs."""

from __future__ import annotations

#: Verb -> the line that ``ullage --help`` shows, so that help loads no verb.
VERBS = {
    "train": "Train a model on text of unequal lengths, with the Hugging Face Trainer's own arguments.",
    "trl": "Run TRL's command line with packing: its flags and YAML recipes, and --packing_capacity beside them.",
    "plan": "Plan one step: where sequences of these lengths go, and how near the ideal that is.",
    "report": "Show a run: its curves, the plan of a step, its checkpoints; beside another run.",
    "audit": "Show that a model keeps packed sequences apart: outputs, gradients, and that nothing leaks.",
    "inspect": "Say what a checkpoint holds, whether it is whole, and where its padding lies.",
    "convert": "Convert a checkpoint to universal, safetensors or dcp, for any number of ranks.",
    "verify": "Compare a converted checkpoint with its source, byte by byte.",
    "diff": "Say which tensors of two checkpoints differ, and by how much.",
    "env": "Print versions and devices, for a report of a bug.",
}
