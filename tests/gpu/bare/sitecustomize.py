"""Hides packages that a bare GPU machine lacks, in every process whose PYTHONPATH begins with this folder."""

import importlib.machinery

MISSING = ("datasets", "deepspeed", "dill", "flash_attn", "fla", "mamba_ssm", "megatron", "pandas", "pyarrow", "trl")
_find = importlib.machinery.PathFinder.find_spec


@classmethod
def find_spec(cls, fullname, path=None, target=None):
    return None if fullname.partition(".")[0] in MISSING else _find(fullname, path, target)


setattr(importlib.machinery.PathFinder, "find_spec", find_spec)  # noqa: B010
