"""What a name that people type means: a folder, the Hugging Face cache, or the hub, in this order.

A folder or file that exists is taken as it is. Otherwise the name is that of a repository (``gpt2``,
``org/name``, either with ``@revision``): a snapshot in the cache that holds the files asked for is taken without asking
anybody, and only where there is none does the hub hear of the name. ``HF_HUB_OFFLINE``, as the user set it, forbids
that. No code of a repository and no pickle is fetched unless the caller wants those files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.errors import InputError, first_line

#: Given the names of all files of a repository, those that are needed; raises ``InputError`` where it lacks them.
Wanted = Callable[[Sequence[str]], list[str]]

#: ``name`` or ``organisation/name``, as the hub allows it, and perhaps ``@`` with a branch, a tag or a commit.
_REPOSITORY = re.compile(r"(?P<repository>[\w][\w.-]*(/[\w][\w.-]*)?)(@(?P<revision>[\w./-]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: Small files of a repository: configs, tokenizers, templates.
_TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe")
_TEMPLATES = "additional_chat_templates/"
#: Any of these makes a tokenizer.
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)

_user_allows_hub = False


class NotFoundError(InputError):
    """A name that means nothing on this machine, and that the hub does not know or cannot be asked about."""


@dataclass(frozen=True)
class Located:
    """Where the files of a name are.

    Attributes:
        name: as it was typed, without the revision.
        path: the folder with the files, or the file that was named.
        source: "disk", "cache" or "hub".
        revision: the commit; None for what lies on the disk.
    """

    name: str
    path: Path
    source: str
    revision: str | None = None

    def __str__(self) -> str:
        if self.revision is None:
            return str(self.path)
        return f"{self.name} from the {self.source}, revision {self.revision[:12]}"

    @property
    def pinned(self) -> str | None:
        """``repository@commit``, as a run writes it down; None for what lies on the disk."""
        return None if self.revision is None else f"{self.name}@{self.revision}"


def keep_off_hub() -> None:
    """Turn the hub off for everything but :func:`locate`, unless the user has set ``HF_HUB_OFFLINE`` either way.

    Called before ``huggingface_hub`` loads, which reads the variable once.
    """
    global _user_allows_hub
    _user_allows_hub = not {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} & os.environ.keys()
    if _user_allows_hub:
        os.environ["HF_HUB_OFFLINE"] = "1"


def let_through() -> bool:
    """Turn the hub on again, for a run that is pushed there. Returns False where the user has turned it off."""
    from huggingface_hub import constants

    if _user_allows_hub:
        os.environ["HF_HUB_OFFLINE"] = "0"
        constants.HF_HUB_OFFLINE = False
    return not constants.HF_HUB_OFFLINE


def locate(name: str, kind: str, wanted: Wanted, *, revision: str | None = None) -> Located:
    """Find the files of ``name``. Collective: every rank gets the same revision, and all raise if one fails.

    One process per machine asks the hub; the others read what it has put into the cache.

    Args:
        name: a folder, a file, or a repository with an optional ``@revision``.
        kind: "model", "tokenizer" or "dataset", for messages and for the hub.
        wanted: which files of a repository are needed.
        revision: the commit that a run took before, for a name that says none itself.

    Raises ``InputError``: an unknown name, one that the hub keeps back, a revision that it does not have, and a name
    that is not on this machine where the hub cannot be asked.
    """
    from ullage.training.agreement import agreement, gather, rank_here, several_ranks

    several, doing = several_ranks(), f"finding the {kind} {name}"
    found: Located | None = None
    # The first rank decides what the name means; the others find the same, or say that they do not.
    with agreement(several, doing):
        if rank_here(several) == 0:
            found = _locate(name, kind, wanted, revision)
    first = gather(None if found is None else (found.source, found.revision), several)[0]
    for is_turn in (lambda local: local == 0, lambda local: local != 0):
        with agreement(several, doing):
            if found is None and is_turn(int(os.environ.get("LOCAL_RANK", "0"))):
                found = _locate(name, kind, wanted, first[1])
                if (found.source == "disk") != (first[0] == "disk"):
                    raise InputError(
                        f"the {kind} is not the same on all machines",
                        where=name,
                        expected="a folder on all of them" if first[0] == "disk" else "a folder on none of them",
                    )
    assert found is not None
    return found


def pinned_commit(name: str, before: str | None) -> str | None:
    """The commit of ``before``, a :attr:`Located.pinned` of an earlier call, if its repository is that of ``name``."""
    repository, _, commit = (before or "").partition("@")
    return commit if repository == name.partition("@")[0] else None


def is_on_disk(name: str) -> bool:
    """Whether ``name`` is a file or folder here, so that it is no name of a repository."""
    return Path(name).exists()


def is_repository(name: str) -> bool:
    """Whether ``name`` could be that of a repository."""
    return _REPOSITORY.fullmatch(name) is not None


def model_files(
    names: Sequence[str], *, pickle: bool = False, code: bool = False, where: str | None = None
) -> list[str]:
    """The files of a causal language model in a repository or folder: config, weights, tokenizer.

    Safetensors where there are any. Raises ``InputError`` where there is no config or no weights, and where all weights
    are pickled unless ``pickle`` allows them. ``code``: its Python files too. ``where``: the folder, for messages.
    """
    if "config.json" not in names:
        raise InputError("there is no model in it", where=where, expected="config.json", found=_few(names))
    weights = [name for name in names if re.fullmatch(r"model[\w.-]*\.safetensors", name)]
    pickled = [name for name in names if re.fullmatch(r"pytorch_model[\w.-]*\.bin", name)]
    if not weights and not pickled:
        raise InputError("there are no weights in it", where=where, expected="model.safetensors", found=_few(names))
    if not weights and not pickle:
        raise InputError(
            "the weights of this model are pickled, and reading them could run code",
            where=where,
            expected="safetensors",
            found=_few(pickled),
            hint="--allow_pickle_weights takes them; torch then reads tensors only",
        )
    return [*_texts(names), *(weights or pickled), *(name for name in names if code and name.endswith(".py"))]


def tokenizer_files(names: Sequence[str], *, code: bool = False) -> list[str]:
    """The files of a tokenizer in a repository. Raises ``InputError`` where there is none."""
    if not set(TOKENIZER_FILES) & set(names):
        raise InputError("there is no tokenizer in it", expected=TOKENIZER_FILES[0], found=_few(names))
    return [*_texts(names), *(name for name in names if code and name.endswith(".py"))]


def _texts(names: Sequence[str]) -> list[str]:
    return [n for n in names if n.endswith(_TEXTS) and ("/" not in n or n.startswith(_TEMPLATES))]


def _few(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "no files"


def _locate(name: str, kind: str, wanted: Wanted, revision: str | None) -> Located:
    if is_on_disk(name):
        return Located(name, Path(name), "disk")
    match = _REPOSITORY.fullmatch(name)
    if match is None:
        raise InputError(f"there is no such {kind}", where=name, expected="a folder, or a name on the hub")
    repository = match["repository"]
    named: str = match["revision"] or revision or "main"
    return _cached(repository, kind, wanted, named) or _fetched(repository, kind, wanted, named)


def _cached(repository: str, kind: str, wanted: Wanted, revision: str) -> Located | None:
    """The snapshot of the cache, if it holds all files that are wanted."""
    commit = _commit_in_cache(repository, kind, revision)
    if commit is None:
        return None
    folder = _cache_of(repository, kind) / "snapshots" / commit
    # A link whose blob has not arrived, or is gone, is no file.
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        needed = wanted(names)
    except InputError:
        return None
    if kind == "model" and not _has_weights(folder, needed):
        return None
    return Located(repository, folder, "cache", commit)


def _commit_in_cache(repository: str, kind: str, revision: str) -> str | None:
    base = _cache_of(repository, kind)
    reference = base / "refs" / revision
    if reference.is_file():
        revision = reference.read_text(encoding="utf-8").strip()
    # A commit may be given by its first digits, as git takes them.
    commits = [commit for commit in _commits(base) if commit == revision or commit.startswith(revision)]
    return commits[0] if len(commits) == 1 else None


def _commits(base: Path) -> list[str]:
    snapshots = base / "snapshots"
    return sorted(path.name for path in snapshots.iterdir()) if snapshots.is_dir() else []


def _has_weights(folder: Path, needed: Sequence[str]) -> bool:
    weights = {name for name in needed if name.endswith((".safetensors", ".bin"))}
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if name in needed and "model.safetensors" not in weights and "pytorch_model.bin" not in weights:
            shards = set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values())
            return shards <= weights
    return bool(weights)


def _cache_of(repository: str, kind: str) -> Path:
    from huggingface_hub import constants

    folder = "--".join([f"{_type_of(kind)}s", *repository.split("/")])
    return Path(constants.HF_HUB_CACHE) / folder


def _type_of(kind: str) -> str:
    """The hub's kind of repository: a tokenizer lies in that of a model."""
    return "dataset" if kind == "dataset" else "model"


def _fetched(repository: str, kind: str, wanted: Wanted, revision: str) -> Located:
    from huggingface_hub import HfApi, snapshot_download

    with _on_hub(), _hub_errors(repository, kind, revision):
        info: Any = HfApi().repo_info(repository, repo_type=_type_of(kind), revision=revision)
        files = wanted([file.rfilename for file in info.siblings or ()])
        folder = snapshot_download(
            repository, repo_type=_type_of(kind), revision=info.sha, allow_patterns=[_literal(file) for file in files]
        )
    _remember(repository, kind, revision, info.sha)
    return Located(repository, Path(folder), "hub", info.sha)


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _remember(repository: str, kind: str, revision: str, commit: str) -> None:
    """Write down which commit a branch or tag was, so that the next run finds it in the cache by that name."""
    if _COMMIT.fullmatch(revision) or commit.startswith(revision):
        return
    reference = _cache_of(repository, kind) / "refs" / revision
    with contextlib.suppress(OSError):  # a cache that cannot be written is asked for again
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit, encoding="utf-8")


@contextlib.contextmanager
def _on_hub() -> Iterator[None]:
    """Let requests through that :func:`keep_off_hub` has turned off."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before and not _user_allows_hub
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _hub_errors(repository: str, kind: str, revision: str) -> Iterator[None]:
    """One line for each way in which the hub may not give a repository."""
    from huggingface_hub import errors
    from huggingface_hub.constants import ENDPOINT

    page = f"{ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repository}"
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise NotFoundError(
            f"this {kind} is neither a folder nor in the Hugging Face cache, and the hub is turned off",
            where=repository,
            found=_in_cache(repository, kind) or "HF_HUB_OFFLINE is set",
            hint=f"get it where there is a network: {_download(repository, kind, revision)}",
        ) from error
    except errors.GatedRepoError as error:
        raise InputError(
            f"this {kind} is gated", where=repository, hint=f"accept its terms at {page}, then hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"the {kind} {repository} has no such revision", where=page, found=revision) from error
    except errors.RepositoryNotFoundError as error:
        raise NotFoundError(
            f"there is no such {kind}: no folder, nothing in the Hugging Face cache, and nothing on the hub",
            where=repository,
            hint="see whether the name is right; if it is private: hf auth login",
        ) from error
    except InputError as error:
        raise error.at(error.where or page) from error
    except Exception as error:  # of the network, of the disk, of the hub: each library has its own
        raise NotFoundError(
            f"the {kind} cannot be fetched from the hub",
            where=page,
            found=f"{type(error).__name__}: {first_line(error)}",
            hint=f"where there is a network: {_download(repository, kind, revision)}",
        ) from error


def _download(repository: str, kind: str, revision: str) -> str:
    options = " --repo-type dataset" if kind == "dataset" else ""
    return f"hf download {repository}{options}" + ("" if revision == "main" else f" --revision {revision}")


def _in_cache(repository: str, kind: str) -> str | None:
    """What the cache holds of a repository that was not found in it, if anything."""
    commits = _commits(_cache_of(repository, kind))
    if not commits:
        return None
    return f"other revisions or not all files of it there: {', '.join(commit[:12] for commit in commits[:4])}"
