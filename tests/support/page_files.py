"""The files that shell blocks of pages name, made small and by the real code, and where the blocks run."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.forked import ROOT, environment, shell_tools
from tests.support.page_blocks import OUTPUT, Block, blocks_of, commands_of, differences

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
#: Files and folders that a page's Python blocks have made by the time its shell blocks run.
MADE_BY_PYTHON = {
    "docs/coming_from/trl.md": ("model", "chats"),
    "docs/checkpoints.md": ("checkpoints",),
    "docs/index.md": ("runs/index",),
    "docs/report.md": ("run",),
    "docs/start.md": ("texts.jsonl",),
    "docs/fsdp.md": ("runs/trainer/checkpoint-3",),
}
#: Pages whose commands take a file or a model that the reader has, and which one. All others begin in an empty folder.
READERS_OWN = {
    "docs/fsdp.md": "the checkpoint of a DeepSpeed run",
    "docs/packed_models.md": "a folder with a model",
    "docs/planning.md": "files of lengths and of token ids",
    "docs/coming_from/trl.md": "a file of token ids",
}


def prepare(blocks: list[Block], folder: Path, made_by_python: Path | None = None) -> None:
    """Makes in ``folder`` whatever the shell blocks among ``blocks`` name of :data:`FILES`."""
    shell = "\n".join(filter(None, map(commands_of, blocks)))
    for name in MADE_BY_PYTHON.get(str(blocks[0].page.relative_to(ROOT)), ()) if made_by_python else ():
        copy = shutil.copytree if (made_by_python / name).is_dir() else shutil.copy
        copy(made_by_python / name, folder / name)
    for name, make in FILES.items():
        target = folder / name
        if not target.exists() and re.search(rf"(?<![\w./]){re.escape(name)}(?![\w-])", shell):
            target.parent.mkdir(parents=True, exist_ok=True)
            make(target)


def run_pasted(page: str, line: int) -> None:
    """Runs the shell block of a page whose fence is in a line, where the page's Python runs, and reads its output."""
    blocks = blocks_of(page)
    number = next(i for i, block in enumerate(blocks) if block.line == line)
    block = blocks[number]
    done = run_shell(commands_of(block), Path.cwd(), Path.cwd().parent)
    if done.returncode or "Traceback" in done.stdout:
        raise AssertionError(f"{block.place}: status {done.returncode}\n{block.text}{done.stdout[-3000:]}")
    output = blocks[number + 1] if number + 1 < len(blocks) else None
    if output is not None and output.language in OUTPUT and not output.why_not:
        wrong = differences(output.text, done.stdout)
        if wrong:
            raise AssertionError(f"{output.place}: {wrong}\n{done.stdout}")


def run_shell(text: str, folder: Path, home: Path, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    """Runs a block as bash would for a user of this environment: any command that fails fails the block.

    Where it starts ``python``, ``ullage`` or ``torchrun``, they are forks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {
        **shell_tools(home / ".tools"),
        # torchrun without --standalone meets at a fixed port
        "PET_MASTER_PORT": str(port),
        "COLUMNS": "120",
        "HOME": str(home),
    }
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", text],
        cwd=folder, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip


def _rows(target: Path, rows: list[dict[str, object]]) -> None:
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _texts(target: Path) -> None:
    texts = [f"no. {i}: " + "some words of a text. " * (i % 7 + 1) for i in range(40)]
    _rows(target, [{"text": text, "body": text} for text in texts])


def _chats(target: Path) -> None:
    roles = ("user", "assistant")
    _rows(target, [
        {"messages": [{"role": role, "content": f"{role} says {i} " * (i % 5 + 1)} for role in roles]} for i in range(80)
    ])  # fmt: skip


def _tokens(target: Path) -> None:
    _rows(target, [{"input_ids": [1 + i % 90] * (3 + i * 37 % 200)} for i in range(80)])


def _parquet(target: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    ids = [[1 + i % 90] * (3 + i * 37 % 200) for i in range(80)]
    parquet.write_table(pyarrow.table({"input_ids": ids}), target)


def _lengths(target: Path) -> None:
    target.write_text("".join(f"sample {i}\t{3 + i * 37 % 200}\n" for i in range(80)))


def _config(target: Path) -> None:
    target.write_text(json.dumps({"model_type": "llama", "vocab_size": 384, **SIZES}))


def _model(target: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_dict({"vocab_size": 384, **SIZES, "num_hidden_layers": 4})
    LlamaForCausalLM(config).save_pretrained(target)


def _zero(target: Path) -> None:
    from tests.support import real_zero

    aside = target.with_name(f".{target.name}")
    # Three ranks share 5 * 7 + 3 * 64 elements, so the last partition ends in padding.
    groups = [{"embed.weight": (5, 7), "block.weight": (3, 64)}]
    truth = real_zero.write(aside, real_zero.Recipe(stage=2, dp=3, groups=groups))
    shutil.move(truth.tag_folder, target)
    shutil.rmtree(aside)
    (target.parent / "latest").write_text(target.name)


#: What a block may name, and what makes it.
FILES: dict[str, Callable[[Path], None]] = {
    "texts.jsonl": _texts,
    "chat.jsonl": _chats,
    "chats.jsonl": _chats,
    "data.jsonl": _tokens,
    "in.jsonl": _tokens,
    "data.parquet": _parquet,
    "lengths.tsv": _lengths,
    "llama.json": _config,
    "path/to/model": _model,
    "runs/zero/checkpoint-300/global_step300": _zero,
}
