"""A run as a whole: before its first step, its capacity, a rehearsal, the layouts that it was trained on."""

#: The key in ``stateful_callbacks`` of a Trainer's state: ``[[step, layout], ...]``, after which step a process began.
LAYOUTS = "ullage_layouts"
